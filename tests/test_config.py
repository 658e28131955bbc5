"""Bad settings are refused by field, value and remedy; good ones survive JSON."""

import dataclasses
import json
from pathlib import Path

import pytest
from families import tiny_model

from anchor_cache import AnchorBuilder, AnchorConfig, AnchorDynamicCache, BlendConfig
from anchor_cache.anchors import Mean, Representative, Tangent


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(block_size=0), "block_size=0 is not valid: an int >= 1"),
        (dict(block_size=16.0), r"block_size=16.0"),
        (dict(read_size=3), "read_size=3 is not valid: None or a divisor of block_size=16"),
        (dict(read_size=4, refine=None), "read_size=4 .* choose refine='sketch'"),
        (dict(budget=62), "budget=62 is not valid: .* here 63; raise budget"),
        (dict(budget=69, reselect_every=8), "budget=69 is not valid: .* here 70"),
        (dict(budget=46, sink_size=0), "budget=46 is not valid: .* here 47"),
        (dict(budget=True), "budget=True"),
        (dict(budget=0.0), r"budget=0.0 is not valid: a share lies in \(0, 1\]"),
        (dict(budget=1.5), "budget=1.5"),
        (dict(budget=float("nan")), "budget=nan"),
        (dict(coverage=0), r"coverage=0 is not valid: None or a share in \(0, 1\]"),
        (dict(coverage=1.1), "coverage=1.1"),
        (dict(tolerance=-0.1), r"tolerance=-0.1 is not valid: None, 0 \(read everything\)"),
        (dict(tolerance=0.1, coverage=0.9), "tolerance=0.1 is not valid: leave coverage at None"),
        (dict(tolerance=0.1, reselect_every=2), "tolerance=0.1 .* leave reselect_every at 1"),
        (dict(builder="median"), "builder='median' is not valid: one of 'tangent', 'mean'"),
        (dict(builder=Tangent), "builder=.* or an AnchorBuilder object of your own"),
        (dict(builder=[]), r"builder=\[\]"),
        (dict(anchors_per_head=0), "anchors_per_head=0"),
        (dict(anchor_heads="all"), "anchor_heads='all' is not valid: one of 'query', 'key_value'"),
        (dict(anchor_dtype="int4"), "anchor_dtype='int4' is not valid: one of None, 'int8'"),
        (dict(refine="guess"), "refine='guess' is not valid: one of 'sketch', 'exact', None"),
        (dict(refine_factor=0), "refine_factor=0"),
        (dict(sketch_bits=3), "sketch_bits=3 is not valid: one of 1, 2"),
        (dict(sketch_bits=True), "sketch_bits=True"),
        (dict(selection_heads="kv"), "selection_heads='kv' is not valid: one of 'key_value', "),
        (dict(reselect_every=0), "reselect_every=0"),
        (dict(skipped="median"), "skipped='median' is not valid: one of None, 'mean'"),
        (dict(skipped="mean", builder="minmax"), "skipped='mean' .* choose another builder"),
        (dict(skipped="mean", reselect_every=2), "skipped='mean' .* leave reselect_every at 1"),
        (dict(sink_size=-1), "sink_size=-1"),
        (dict(window_size=8), "window_size=8 is not valid: an int of at least block_size=16"),
        (dict(dense_below=-1), "dense_below=-1"),
        (dict(dense_above=0.0), "dense_above=0.0"),
        (dict(audit_every="often"), "audit_every='often'"),
        (dict(offload="gpu"), "offload='gpu' is not valid: one of None, 'cpu', 'disk'"),
        (dict(offload_dir="x"), "offload_dir='x' is not valid: .* together with offload='disk'"),
        (dict(offload="disk", offload_dir=3), "offload_dir=3 is not valid: a path"),
        (dict(per_layer={-1: {}}), "per_layer=-1 is not valid: layers are numbered from 0"),
        (dict(per_layer={0: 5}), r"per_layer\[0\]=5"),
        (dict(per_layer=[1]), r"per_layer=\[1\] is not valid: a dictionary"),
        (dict(per_layer={0: {"budget": 2}}), r"per_layer\[0\]: budget=2 is not valid"),
        (dict(per_layer={0: {"offload": "disk"}}), r"per_layer\[0\]=.* other than offload"),
        (dict(tolerance=False), "tolerance=False"),
        (dict(sketch_bits=2.0), "sketch_bits=2.0"),
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
        (
            dict(recompute_ratio=1.2),
            r"recompute_ratio=1.2 is not valid: a share in \[0, 1\], or 'auto'",
        ),
        (dict(recompute_ratio="15%"), "recompute_ratio='15%'"),
        (
            dict(selector="best"),
            "selector='best' is not valid: one of hkvd, first, query, front, attended, random",
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


def test_settings_per_layer():
    config = AnchorConfig(per_layer={0: {"budget": 1.0}, 3: {"refine": None, "block_size": 8}})
    assert config.for_layer(0) == AnchorConfig(budget=1.0)
    assert config.for_layer(1) == AnchorConfig()
    assert config.for_layer(3) == AnchorConfig(refine=None, block_size=8)
    assert (
        hash(config) and AnchorConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    )
    with pytest.raises(TypeError, match="no field 'bugdet'; did you mean 'budget'"):
        AnchorConfig(per_layer={0: {"bugdet": 1.0}})


def test_a_builder_of_ones_own_is_named_in_the_dictionary_and_refused_from_there():
    class Newest(Mean):
        pass

    data = AnchorConfig(builder=Newest()).to_dict()
    assert data["builder"] == "Newest"
    with pytest.raises(ValueError, match="builder='Newest' is not valid: .* object of your own"):
        AnchorConfig.from_dict(data)
    assert AnchorConfig.from_dict({**data, "builder": "mean"}) == AnchorConfig()


def test_tokens_read_together_follow_from_the_block_and_the_refinement():
    sizes = {8: 2, 16: 2, 6: 2, 7: 1, 1: 1}
    assert {size: AnchorConfig(block_size=size).read_tokens for size in sizes} == sizes
    assert AnchorConfig(refine=None).read_tokens == AnchorConfig(read_size=16).read_tokens == 16


def test_builders_that_cannot_be_used():
    @dataclasses.dataclass
    class Unhashable(AnchorBuilder):
        size: int = 1

        def weights(self, keys, perspectives, valid):
            raise NotImplementedError

    with pytest.raises(ValueError, match="it must be hashable: .* make it a frozen one"):
        AnchorConfig(builder=Unhashable())
    with pytest.raises(ValueError, match="tokens=0 is not valid: an int of at least 1"):
        Representative(0)


def test_builder_objects_survive_json():
    config = AnchorConfig(builder=Representative(4), per_layer={2: {"builder": Representative(3)}})
    assert AnchorConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
