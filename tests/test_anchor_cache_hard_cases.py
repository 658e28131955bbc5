"""Uses that once broke the cache or its report: each is a kind of fault, not one instance."""

import copy

import pytest
import torch
from families import random_ids, tiny_model
from test_anchor_cache_exact import SMALL, generate
from test_anchor_cache_rows import left_padded, rebuilt
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache

pytestmark = pytest.mark.usefixtures("ranks_few")


def test_visible_tokens_that_fit_the_budget_are_all_read_when_the_mask_moves():
    """A mask that slides on forgets old tokens; they must not take the place of visible ones."""
    model = tiny_model(num_hidden_layers=2)
    cache, dense = AnchorDynamicCache(budget=80, **SMALL), DynamicCache()
    ids = random_ids(1, 140)
    for c in (cache, dense):
        model(ids, past_key_values=c)
    for length in range(141, 200):
        mask = torch.zeros(1, 1, 1, length, dtype=torch.bool)
        mask[..., length - 60 :] = True
        token = random_ids(1, 1)
        logits = [
            model(token, past_key_values=c, attention_mask=mask).logits for c in (cache, dense)
        ]
        torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def test_holes_in_the_mask_that_come_after_the_index_was_built():
    model, ids = tiny_model(num_hidden_layers=2), random_ids(2, 150)
    cache, mask = AnchorDynamicCache(budget=56, **SMALL), torch.ones(2, 150, dtype=torch.long)
    model(ids, past_key_values=cache, attention_mask=mask)
    for step in range(40):
        hole = torch.tensor([[1], [int(not 3 <= step <= 8)]])
        mask, token = torch.cat((mask, hole), 1), random_ids(2, 1)
        other = rebuilt(copy.deepcopy(cache))
        logits = [
            model(token, past_key_values=c, attention_mask=mask).logits for c in (cache, other)
        ]
        torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)


def test_rows_that_are_dense_alone_do_not_count_against_the_budget():
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=4096)
    ids, mask = left_padded([random_ids(1500), random_ids(900)])
    cache = AnchorDynamicCache(budget=400, dense_below=1024, dense_above=1.0)
    generate(model, ids, cache, tokens=4, attention_mask=mask)
    report = cache.report()
    assert report.max_tokens_attended <= 400 and report.sparse_steps == 3
    assert "rows of a batch that alone would be dense read everything" in report.reasons


@pytest.mark.parametrize("builder", ["mean", "tangent"])
@pytest.mark.parametrize("lengths", [(193, 1, 186), (160, 3, 97, 15), (120, 119, 2)])
def test_batches_with_very_short_rows(builder, lengths):
    model = tiny_model(num_hidden_layers=2)
    rows = [random_ids(n) for n in lengths]
    ids, mask = left_padded(rows)
    settings = dict(budget=56, builder=builder, **SMALL)
    together = generate(model, ids, AnchorDynamicCache(**settings), attention_mask=mask)[1]
    for i, row in enumerate(rows):
        if builder == "mean" or len(row) >= SMALL["block_size"]:
            alone = generate(model, row[None], AnchorDynamicCache(**settings))[1]
            torch.testing.assert_close(together[:, i], alone[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("builder", ["mean", "tangent"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_prompt_lookup_and_assisted_decoding(builder, implementation):
    model = tiny_model(num_hidden_layers=2, attn_implementation=implementation)
    ids = torch.cat((random_ids(1, 50),) * 3, 1)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    expected = model.generate(ids, **options)
    for extra in (dict(prompt_lookup_num_tokens=3), dict(assistant_model=model)):
        full = AnchorDynamicCache(budget=1.0, builder=builder, **SMALL)
        out = model.generate(ids, past_key_values=full, **extra, **options)
        assert torch.equal(out, expected)
        sparse = AnchorDynamicCache(budget=56, builder=builder, **SMALL)
        model.generate(ids, past_key_values=sparse, **extra, **options)
        reason = "several tokens appended at once are exact, and dense"
        assert sparse.report().reasons[reason] > 0


@pytest.mark.parametrize("builder", ["mean", "tangent"])
def test_crop_into_the_padding_of_a_row(builder):
    model = tiny_model(num_hidden_layers=2)
    ids, mask = left_padded([random_ids(160), random_ids(24)])
    cache = AnchorDynamicCache(budget=56, builder=builder, **SMALL)
    generate(model, ids, cache, tokens=3, attention_mask=mask)
    cache.crop(120 - cache.get_seq_length())
    mask = mask[:, :120]
    for _ in range(30):
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
        logits = model(random_ids(2, 1), past_key_values=cache, attention_mask=mask).logits
        assert torch.isfinite(logits[0]).all()


def test_tangent_anchors_without_any_query_yet():
    """Keys and values put in by hand bring no queries; the first ones that come must serve."""
    model, source = tiny_model(num_hidden_layers=2), DynamicCache()
    model(random_ids(1, 120), past_key_values=source)
    cache = AnchorDynamicCache(budget=56, builder="tangent", **SMALL)
    for i, layer in enumerate(source.layers):
        cache.update(layer.keys, layer.values, i)
    for _ in range(3):
        assert torch.isfinite(model(random_ids(1, 1), past_key_values=cache).logits).all()
    assert cache.report().sparse_steps == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = tiny_model(num_hidden_layers=2)
    with torch.autocast("cpu", dtype):
        logits = generate(model, random_ids(1, 120), AnchorDynamicCache(budget=56, **SMALL))[1]
    assert torch.isfinite(logits).all()


def test_inference_mode_and_no_grad_mix():
    model, ids = tiny_model(num_hidden_layers=2), random_ids(1, 120)
    cache, usual = (AnchorDynamicCache(budget=56, **SMALL) for _ in range(2))
    model(ids[:, :-1], past_key_values=usual)
    with torch.inference_mode():
        model(ids[:, :-1], past_key_values=cache)
        model(ids[:, -1:], past_key_values=copy.deepcopy(cache))
    expected = generate(model, ids, usual)[1]
    torch.testing.assert_close(generate(model, ids, cache)[1], expected)
    with torch.inference_mode():
        for _ in range(90):
            model(random_ids(1, 1), past_key_values=cache)
    with torch.enable_grad():
        model(random_ids(1, 1), past_key_values=cache)


def test_backward_through_several_cached_steps():
    model, ids = tiny_model(num_hidden_layers=2), random_ids(1, 60)
    gradients = []
    for make in (DynamicCache, lambda: AnchorDynamicCache(budget=1.0, **SMALL)):
        model.zero_grad()
        with torch.enable_grad():
            cache = make()
            loss = model(ids[:, :50], past_key_values=cache).logits.sum()
            for i in range(50, 60):
                loss = loss + model(ids[:, i : i + 1], past_key_values=cache).logits.sum()
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("budget", [1.0, 56])
def test_a_compiled_model(budget):
    model, ids = tiny_model(num_hidden_layers=1), random_ids(1, 110)
    torch._dynamo.reset()
    compiled = torch.compile(model.model, backend="eager", dynamic=True)
    caches = [AnchorDynamicCache(budget=budget, **SMALL) for _ in range(2)]
    for part in (ids[:, :100], *ids[:, 100:].split(1, 1)):
        one, other = (
            f(part, past_key_values=c).last_hidden_state
            for f, c in zip((compiled, model.model), caches, strict=True)
        )
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert caches[0].report().sparse_steps == caches[1].report().sparse_steps


def test_a_mask_then_none_then_a_broadcast_one():
    model = tiny_model(num_hidden_layers=2, attn_implementation="eager")
    ids, mask = left_padded([random_ids(120), random_ids(101)])
    cache, dense = AnchorDynamicCache(budget=1.0, **SMALL), DynamicCache()
    sparse = AnchorDynamicCache(budget=56, **SMALL)
    for c in (cache, dense, sparse):
        model(ids, past_key_values=c, attention_mask=mask)
    masks = [None, torch.zeros(1, 1, 1, 122), None, torch.zeros(1, 1, 1, 124)]
    for given in masks:
        token = random_ids(2, 1)
        a, b, s = (
            model(token, past_key_values=c, attention_mask=given).logits
            for c in (cache, dense, sparse)
        )
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        assert torch.isfinite(s).all()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_batch_size_is_refused_and_changes_nothing(before, after):
    model = tiny_model(num_hidden_layers=2)
    cache = AnchorDynamicCache(budget=56, **SMALL)
    model(random_ids(before, 100), past_key_values=cache)
    for tokens in (1, 80):
        with pytest.raises(ValueError, match=r"do not fit a cache .* batch_repeat_interleave"):
            model(random_ids(after, tokens), past_key_values=cache)
    assert cache.get_seq_length() == 100


def test_an_unsupported_model_is_reported_even_after_its_last_step():
    model = tiny_model("BloomConfig", n_layer=2, n_head=4, attn_implementation="eager")
    cache = AnchorDynamicCache(budget=56, **SMALL)
    with pytest.warns(UserWarning, match="stays dense"):
        generate(model, random_ids(1, 100), cache, tokens=2)
        report = cache.report()
    assert report.dense_steps == 1 and any("did not pass" in r for r in report.reasons)


def test_a_step_that_was_interrupted_and_cropped_is_not_reported():
    model, ids = tiny_model(num_hidden_layers=1), random_ids(1, 100)
    cache = AnchorDynamicCache(budget=56, **SMALL)
    model(ids, past_key_values=cache)
    layer = cache.layers[0]
    cache.update(layer.keys[:, :, :1], layer.values[:, :, :1], 0)  # attention never comes
    cache.crop(-1)
    model(ids[:, :1], past_key_values=cache)
    assert not any("did not pass" in reason for reason in cache.report().reasons)


def test_two_attention_calls_for_one_update_are_one_step():
    model = tiny_model("DiffLlamaConfig", num_hidden_layers=2)
    cache = AnchorDynamicCache(budget=56, **SMALL)
    generate(model, random_ids(1, 100), cache)
    report = cache.report()
    assert (report.sparse_steps, report.dense_steps, report.prefill_steps) == (19, 0, 1)


def test_from_cache_takes_only_dynamic_caches():
    for wrong in (None, [], "cache"):
        with pytest.raises(TypeError, match="must be a DynamicCache"):
            AnchorDynamicCache.from_cache(wrong)
    with pytest.raises(TypeError, match="expected a AnchorConfig, not a dict"):
        AnchorDynamicCache(None, {})
