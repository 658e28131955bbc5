"""Every family of models in the documentation, in every way a cache can be given to it."""

import contextlib
import functools
import re
import sys

import pytest
import support_table
import torch
import transformers
from families import ALL_FAMILIES, BYPASSING, tiny_family
from packaging.version import Version
from support_table import PADDED, SETTINGS, greedy
from test_anchor_cache_exact import read_all_blocks
from test_blend_families import REFUSED
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache, anchor_attention, is_patched

LAYERS, STEPS = 4, 4
# How many layers are sparse, where it is not all of them.
SPARSE = {
    **dict.fromkeys(["llama4", "ministral", "gemma2", "gemma3", "cohere2", "olmo3"], 2),
    **dict.fromkeys(["exaone4", "gpt_oss", "qwen3_next", "qwen3_5", "lfm2", "bamba"], 2),
    **dict.fromkeys(["granite_hybrid"], 2),
    **dict.fromkeys(["gemma3n", "gemma4"], 1),
    **dict.fromkeys(["mistral_sliding", "deepseek_v32", "zamba2", "falcon_h1"], 0),
    **dict.fromkeys(["jetmoe", "deepseek_v2", "deepseek_v3"], 0),
}
# DynamicCache() fails in these: they need to know the layers beforehand.
NEEDS_CONFIG = {"qwen3_next", "qwen3_5", "lfm2", "bamba", "granite_hybrid", "zamba2", "falcon_h1"}
NEEDS_CONFIG |= {"deepseek_v32"}

every_family = pytest.mark.parametrize("family", ALL_FAMILIES)
both_implementations = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
padded_or_not = pytest.mark.parametrize("paddings", [(0, 0), PADDED])
pytestmark = pytest.mark.filterwarnings("ignore:AnchorDynamicCache stays dense")

_built = functools.cache(tiny_family)


def model_of(family, implementation="eager"):
    model = _built(family, implementation)
    if model is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family} in {implementation}")
    return model


def configs_for(family, model, paddings):
    """What a cache may be given; None only once, for the sake of the time it takes."""
    return [model.config] if family in NEEDS_CONFIG or paddings == PADDED else [model.config, None]


def sparse_layers(family, model):
    # GPT-J joined the attention interface after the oldest version that is supported.
    return SPARSE.get(family, LAYERS) if model._can_set_attn_implementation() else 0


def check_agreement(actual, expected):
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-5)


@both_implementations
@padded_or_not
@every_family
def test_full_budget_equals_dynamic_cache(family, paddings, implementation):
    model = model_of(family, implementation)
    for config in configs_for(family, model, paddings):
        expected = greedy(model, DynamicCache(config=config), paddings)
        cache = AnchorDynamicCache(config, budget=1.0, **SETTINGS)
        check_agreement(greedy(model, cache, paddings), expected)
        assert cache.report().sparse_steps == 0


@pytest.mark.parametrize(("implementation", "paddings"), [("eager", (0, 0)), ("sdpa", (13, 13))])
@every_family
def test_reading_all_blocks_through_the_index_equals_dense(
    family, paddings, implementation, monkeypatch
):
    model = model_of(family, implementation)
    expected = greedy(model, DynamicCache(config=model.config), paddings)
    read_all_blocks(monkeypatch)
    cache = AnchorDynamicCache(model.config, budget=1.0, **SETTINGS)
    check_agreement(greedy(model, cache, paddings), expected)
    assert cache.report().sparse_steps == (STEPS if sparse_layers(family, model) else 0)


@padded_or_not
@every_family
def test_small_budget_is_sparse_where_it_can_be_and_says_where_not(family, paddings):
    model = model_of(family)
    dense = greedy(model, DynamicCache(config=model.config), paddings)[1]
    expected = sparse_layers(family, model)
    for config in configs_for(family, model, paddings):
        cache = AnchorDynamicCache(config, budget=48, **SETTINGS)
        logits = greedy(model, cache, paddings)[1]
        report = cache.report()
        torch.testing.assert_close(logits[0], dense[0], atol=1e-5, rtol=1e-5)  # exact prefill
        assert ((logits - dense).abs().max() > 1e-3) == (expected > 0)
        assert report.max_tokens_attended <= 48
        records = report.records.values()
        assert sum(record.sparse_steps == STEPS for record in records) == expected
        assert all(sum(r.reasons.values()) >= r.dense_steps for r in records)
        assert all(r.sparse_steps + r.dense_steps == STEPS for r in records)
        assert expected == LAYERS or report.reasons
        for i, layer in enumerate(cache.layers):
            if i not in cache.anchor_layers:
                said = rf"{type(layer).__name__} layers are never sparse: .*\b{i}\b"
                assert any(re.match(said, reason) for reason in report.reasons)


@pytest.mark.parametrize("family", ["jetmoe", "deepseek_v2", "deepseek_v3"])
def test_keys_made_of_the_cached_ones_are_named(family):
    model = model_of(family)
    cache = AnchorDynamicCache(model.config, budget=48, **SETTINGS)
    greedy(model, cache)
    known = Version(transformers.__version__) >= Version("5.24")  # else it cannot see the call
    reason = "keys are made of the cached ones" if known else "did not pass .* with the cached keys"
    assert all(re.search(reason, found) for found in cache.report().reasons)
    assert cache.report().dense_steps == STEPS


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_are_reported(family, with_config):
    model = model_of(family)
    cache = AnchorDynamicCache(model.config if with_config else None, budget=48, **SETTINGS)
    greedy(model, cache)
    # One layer reads full attention's keys, one those of the sliding layer, which then are ours.
    # Gemma 4 also prefills layers that share keys by the last token alone.
    layers = 1 if with_config else 2
    count = cache.report().reasons["the layer reads the cache of another layer"]
    assert count in (layers * STEPS, layers * (STEPS + 1))


def test_keys_changed_after_the_cache_are_read_densely():
    """No model here does it; one that did would otherwise attend to the unchanged ones."""
    model = model_of("llama")
    cache = AnchorDynamicCache(budget=48, **SETTINGS)
    keys, values = cache.update(torch.randn(1, 2, 99, 12), torch.randn(1, 2, 99, 12), 0)
    keys, values = cache.update(torch.randn(1, 2, 1, 12), torch.randn(1, 2, 1, 12), 0)
    module, query = model.model.layers[0].self_attn, torch.randn(1, 4, 1, 12)
    layer = cache.layers[0]
    assert layer.read(module, query, keys * 2, values, None, {}) is None
    assert layer.read(module, query, keys, values, None, {}).gathered().keys.shape[2] <= 48
    assert "keys are made of the cached ones" in " ".join(cache.report().reasons)


@pytest.mark.parametrize("family", BYPASSING)
def test_models_beside_the_interface_are_refused_by_name_and_stay_dense(family):
    model = model_of(family)
    with (
        pytest.raises(NotImplementedError, match=f"{type(model).__name__} does not route"),
        anchor_attention(model),
    ):
        pass
    expected = greedy(model, DynamicCache(config=model.config))
    cache = AnchorDynamicCache(model.config, budget=48, **SETTINGS)
    with pytest.warns(UserWarning, match="AnchorDynamicCache stays dense"):
        check_agreement(greedy(model, cache), expected)
    report = cache.report()
    assert not is_patched(model)
    assert (report.sparse_steps, report.dense_steps) == (0, STEPS)
    assert any("did not pass through" in reason for reason in report.reasons)


def table_of(text):
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in cells] for cells in lines]
    return header, {cells[0]: cells for cells in rows}


def test_the_documented_table_is_up_to_date():
    text = support_table.DOCUMENT.read_text()
    header, rows = table_of(text)
    assert header == list(support_table.COLUMNS)
    assert [*rows] == [*ALL_FAMILIES, *BYPASSING]
    for family, cells in rows.items():
        row = dict(zip(header, cells, strict=True))
        assert {row["eager"], row["padded"]} == {"yes"} and row["sdpa"] in ("yes", "-")
        count = 0 if family in BYPASSING else SPARSE.get(family, LAYERS)
        assert row["sparse"] == f"{count} of {LAYERS}"
        assert (row["blended"] == "yes") == (family not in REFUSED)
        assert row["blended"] == "yes" or re.match(f"refused: {REFUSED[family]}", row["blended"])
    if f"transformers {transformers.__version__}." in text:
        for family in ("llama", "gemma3n", "deepseek_v3", "bloom"):
            assert rows[family] == list(support_table.row(family))


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("--help", "writes docs/models.md"),
        ("lama", "no family lama; there are llama, "),
        ("llama", "4 of 4"),
    ],
)
def test_the_command_line(arguments, printed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["support_table.py", arguments])
    with pytest.raises(SystemExit) if arguments != "llama" else contextlib.nullcontext():
        support_table.main()
    captured = capsys.readouterr()
    assert printed in captured.out + captured.err
