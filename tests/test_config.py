"""Bad settings are refused by field, value and remedy; good ones survive JSON."""

import json
from pathlib import Path

import pytest
from families import tiny_model

from anchor_cache import AnchorConfig, AnchorDynamicCache, BlendConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(block_size=0), "block_size=0 is not valid: an int of at least 1"),
        (dict(block_size=16.0), r"block_size=16.0"),
        (dict(budget=10), "budget=10 is not valid: .* here 351; raise budget"),
        (dict(budget=True), "budget=True"),
        (dict(budget=0.0), r"budget=0.0 is not valid: a share lies in \(0, 1\]"),
        (dict(budget=1.5), "budget=1.5"),
        (dict(budget=float("nan")), "budget=nan"),
        (dict(coverage=0.9), "coverage=0.9 is not valid: only None in this version"),
        (dict(builder="median"), "builder='median' is not valid: one of tangent, mean"),
        (dict(anchors_per_head=0), "anchors_per_head=0"),
        (dict(anchor_heads="all"), "anchor_heads='all' is not valid: one of query, key_value"),
        (dict(refine="guess"), "refine='guess' is not valid: 'sketch' or None"),
        (dict(refine_factor=0), "refine_factor=0"),
        (dict(sink_size=-1), "sink_size=-1"),
        (dict(window_size=8), "window_size=8 is not valid: an int of at least block_size=16"),
        (dict(dense_below=-1), "dense_below=-1"),
        (dict(dense_above=0.0), "dense_above=0.0"),
        (dict(audit_every="often"), "audit_every='often'"),
        (dict(offload="gpu"), "offload='gpu' is not valid: 'cpu', 'disk' or None"),
        (dict(offload_dir="x"), "offload_dir='x' is not valid: .* together with offload='disk'"),
        (dict(offload="disk", offload_dir=3), "offload_dir=3 is not valid: a path"),
    ],
)
def test_bad_anchor_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        AnchorConfig(**fields)
    with pytest.raises(ValueError, match=message):
        AnchorDynamicCache(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(recompute_ratio=1.2), r"recompute_ratio=1.2 is not valid: a share lies in \[0, 1\]"),
        (dict(recompute_ratio="15%"), "recompute_ratio='15%'"),
        (
            dict(selector="best"),
            "selector='best' is not valid: one of hkvd, first, query, random, none",
        ),
        (dict(deviation="queries"), "deviation='queries'"),
        (dict(check_layer=0), "check_layer=0 is not valid: .* nothing deviates there"),
    ],
)
def test_bad_blend_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        BlendConfig(**fields)


def test_unknown_fields_name_the_nearest_one():
    with pytest.raises(TypeError, match="no field 'budjet'; did you mean 'budget'"):
        AnchorDynamicCache(budjet=64)


def test_a_model_or_a_config_in_the_wrong_place():
    with pytest.raises(TypeError, match="model.config"):
        AnchorDynamicCache(tiny_model())
    with pytest.raises(TypeError, match="goes to anchor_config"):
        AnchorDynamicCache(AnchorConfig())


@pytest.mark.parametrize(
    "config",
    [
        AnchorConfig(budget=0.1, offload="disk", offload_dir=Path("x")),
        BlendConfig(recompute_ratio=0.3),
    ],
)
def test_json_round_trip(config):
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
