"""With the budget at or above the length an AnchorDynamicCache is a DynamicCache."""

import dataclasses

import pytest
import torch
import transformers
from families import FAMILIES, random_ids, tiny_model
from packaging.version import Version
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache, anchor_layer

pytestmark = pytest.mark.usefixtures("ranks_few")

SMALL = dict(block_size=8, sink_size=8, window_size=16, dense_below=0, dense_above=1.0)


def generate(model, ids, cache, tokens=20, **kwargs):
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    out = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return out.sequences, torch.stack(out.logits)


def read_all_blocks(monkeypatch):
    """Let sparse steps choose every block: the sparse path, and still all of the context."""
    plan_step = anchor_layer.plan_step

    def plan_everything(config, length, paddings, device):
        # One token short of everything, so that the plan is sparse; then give the token back.
        budget = length - max(paddings) - 1
        plan = plan_step(dataclasses.replace(config, budget=budget), length, paddings, device)
        pieces = plan.parts * (plan.last_block - plan.first_block)
        return dataclasses.replace(plan, pieces=pieces)

    monkeypatch.setattr(anchor_layer, "plan_step", plan_everything)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_budget_equals_dynamic_cache(family, with_config, implementation):
    if family == "gpt_oss" and implementation == "sdpa":
        pytest.skip("upstream has no sdpa attention with sinks")
    model = tiny_model(family, attn_implementation=implementation)
    ids, config = random_ids(2, 70), model.config if with_config else None
    expected = generate(model, ids, DynamicCache(config=config))
    cache = AnchorDynamicCache(config, budget=1.0, **SMALL)
    actual = generate(model, ids, cache)
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-5)
    assert cache.report().sparse_steps == 0
    assert "context within the budget of 1.0" in cache.report().reasons


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_all_blocks_through_the_index_equals_dense(family, implementation, monkeypatch):
    """The sparse path itself, not the dense one that a full budget takes."""
    if family == "gpt_oss" and implementation == "sdpa":
        pytest.skip("upstream has no sdpa attention with sinks")
    read_all_blocks(monkeypatch)
    model = tiny_model(family, attn_implementation=implementation)
    ids = random_ids(2, 71)
    expected = generate(model, ids, DynamicCache(config=model.config))
    cache = AnchorDynamicCache(model.config, budget=1.0, **SMALL)
    actual = generate(model, ids, cache)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[0], expected[0])
    assert cache.report().sparse_steps == 19


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_budget_is_sparse_and_changes_the_logits(family):
    model = tiny_model(family, attn_implementation="eager")
    ids = random_ids(1, 150)
    expected = generate(model, ids, DynamicCache(config=model.config))
    cache = AnchorDynamicCache(model.config, budget=48, **SMALL)
    actual = generate(model, ids, cache)
    report = cache.report()
    assert report.sparse_steps == 19 and report.dense_steps == 0
    assert report.max_tokens_attended <= 48
    assert torch.isfinite(actual[1]).all()
    assert (actual[1][1] - expected[1][1]).abs().max() > 1e-3
    torch.testing.assert_close(actual[1][0], expected[1][0])  # prefill is exact


@pytest.mark.parametrize("budget", [0.5, 48])
def test_prefill_in_pieces_gives_the_same_generation(budget):
    model, ids = tiny_model(), random_ids(1, 160)
    settings = dict(budget=budget, audit_every=1, **SMALL)
    whole, pieces = AnchorDynamicCache(**settings), AnchorDynamicCache(**settings)
    expected = generate(model, ids, whole)
    actual = generate(model, ids, pieces, prefill_chunk_size=37)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-4, rtol=1e-4)
    for one, other in zip(whole.layers, pieces.layers, strict=True):
        torch.testing.assert_close(one.index.anchors, other.index.anchors, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(budget=48), "context of at most dense_below=4096 tokens"),
        (dict(budget=300), "context within the budget of 300"),
        (dict(budget=48, dense_below=0), "the budget of 48 is more than dense_above=0.1 of the"),
        (dict(budget=0.9, dense_below=0), "the budget of 0.9 is more than dense_above=0.1 of"),
    ],
)
def test_contexts_too_short_to_pay_are_dense_and_say_so(settings, reason):
    model = tiny_model()
    cache = AnchorDynamicCache(block_size=8, sink_size=8, window_size=16, **settings)
    generate(model, random_ids(1, 200), cache)
    report = cache.report()
    assert report.sparse_steps == 0 and report.dense_steps == 19
    assert any(found.startswith(reason) for found in report.reasons)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="the keyword came with 5.24"
)
def test_the_new_keyword_of_generate():
    model, ids = tiny_model(), random_ids(1, 90)
    options = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    one, other = (AnchorDynamicCache(budget=48, **SMALL) for _ in range(2))
    expected = model.generate(ids, past_key_values=one, **options)
    assert torch.equal(model.generate(ids, cache=other, **options), expected)
    assert other.report().sparse_steps == one.report().sparse_steps == 7


def test_generate_returns_the_cache_it_was_given():
    model, ids = tiny_model(), random_ids(1, 90)
    cache = AnchorDynamicCache(budget=48, **SMALL)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=3, return_dict_in_generate=True)
    returned = out.past_key_values if "past_key_values" in out else out.cache
    assert returned is cache
    assert cache.get_seq_length() == 92 and isinstance(cache.get_seq_length(), int)
