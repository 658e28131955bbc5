"""Left-padded batches, beams, and everything that rearranges a cache."""

import copy
import pickle

import pytest
import torch
from families import random_ids, tiny_model
from test_anchor_cache_exact import SMALL, generate
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache

pytestmark = pytest.mark.usefixtures("ranks_few")


def left_padded(rows):
    width = max(map(len, rows))
    ids = torch.stack([torch.cat((torch.zeros(width - len(r), dtype=r.dtype), r)) for r in rows])
    lengths = torch.tensor([len(r) for r in rows])
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    return ids, mask


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("heads", ["query", "key_value"])
@pytest.mark.parametrize("builder", ["tangent", "mean"])
@pytest.mark.parametrize(("budget", "refine_factor"), [(56, 1), (48, 2), (0.4, 4)])
def test_each_row_gives_what_it_gives_alone(implementation, heads, builder, budget, refine_factor):
    model = tiny_model(attn_implementation=implementation)
    # One row is short enough to be dense, one is a whole number of blocks shorter, one is not.
    rows = [random_ids(n) for n in (160, 144, 133, 40, 21)]
    settings = dict(SMALL, budget=budget, builder=builder, anchor_heads=heads, anchors_per_head=2)
    ids, mask = left_padded(rows)
    cache = AnchorDynamicCache(**settings)
    together = generate(model, ids, cache, attention_mask=mask)[1]
    for i, row in enumerate(rows):
        alone = generate(model, row[None], AnchorDynamicCache(**settings))[1]
        torch.testing.assert_close(together[:, i], alone[:, 0], atol=1e-4, rtol=1e-4)
    assert cache.report().sparse_steps == 19


def test_padding_enters_no_anchor():
    """What stands in the padding changes nothing."""
    model = tiny_model()
    ids, mask = left_padded([random_ids(150), random_ids(123)])
    garbled = torch.where(mask.bool(), ids, random_ids(*ids.shape))
    caches = [AnchorDynamicCache(budget=56, **SMALL) for _ in range(2)]
    outs = [
        generate(model, x, cache, attention_mask=mask)[1]
        for x, cache in zip((ids, garbled), caches, strict=True)
    ]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


def test_beam_search_with_full_budget_equals_dynamic_cache():
    model = tiny_model()
    ids, mask = left_padded([random_ids(90), random_ids(77)])
    beams = dict(attention_mask=mask, num_beams=3, max_new_tokens=12, do_sample=False)
    expected = model.generate(ids, past_key_values=DynamicCache(), **beams)
    cache = AnchorDynamicCache(budget=1.0, **SMALL)
    assert torch.equal(model.generate(ids, past_key_values=cache, **beams), expected)
    sparse = AnchorDynamicCache(budget=56, **SMALL)
    model.generate(ids, past_key_values=sparse, **beams)
    assert sparse.report().sparse_steps > 0


def warm(model, ids, mask=None, **settings):
    cache = AnchorDynamicCache(**{**SMALL, "budget": 56, **settings})
    generate(model, ids, cache, tokens=4, attention_mask=torch.ones_like(ids))
    return cache


def step(model, cache, token, rows=slice(None)):
    return model(token[rows], past_key_values=cache, use_cache=True).logits[:, -1]


def rebuilt(cache):
    """The same keys and values with an index made anew."""
    for layer in cache.layers:
        layer.reader.keys_changed()
    return cache


def test_anchors_of_blocks_completed_while_decoding_equal_a_rebuild():
    model, ids = tiny_model(), random_ids(2, 120)
    cache = AnchorDynamicCache(**SMALL, budget=56)
    generate(model, ids, cache, tokens=45)
    for layer in cache.layers:
        index, fresh = layer.index, copy.deepcopy(layer.index)
        fresh.truncate(0)
        fresh.extend(layer._keys, layer._values, None)
        assert index.blocks > 120 // 8
        blocks = index.blocks
        torch.testing.assert_close(index.anchors, fresh.anchors[:, :blocks])


@pytest.mark.parametrize("operation", ["reorder", "repeat", "select"])
def test_batch_operations_keep_the_index_in_step(operation):
    model, ids = tiny_model(), random_ids(3, 140)
    cache, token = warm(model, ids), random_ids(3, 1)
    before = step(model, copy.deepcopy(cache), token)
    if operation == "reorder":
        rows = torch.tensor([2, 0, 0])
        cache.reorder_cache(rows)
    elif operation == "repeat":
        rows = torch.tensor([0, 0, 1, 1, 2, 2])
        cache.batch_repeat_interleave(2)
    else:
        rows = torch.tensor([1])
        cache.batch_select_indices(rows)
    torch.testing.assert_close(step(model, cache, token, rows), before[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keep", [131, 128, 67])
@pytest.mark.parametrize("convention", ["tokens to remove", "length to keep"])
def test_crop_then_append_other_tokens(keep, convention):
    model, ids = tiny_model(), random_ids(2, 140)
    cropped, never = warm(model, ids), warm(model, ids)
    length = cropped.get_seq_length()
    cropped.crop(keep - length if convention == "tokens to remove" else keep)
    assert cropped.get_seq_length() == keep
    never.layers[0].keys = never.layers[0].keys  # assigning is allowed, and keeps the tokens
    for layer in never.layers:
        layer.keys = layer.keys[:, :, :keep].clone()
        layer.values = layer.values[:, :, :keep].clone()
    for layer, other in zip(cropped.layers, never.layers, strict=True):
        layer.reader.keys_changed()
        other.reader.keys_changed()
    for token in random_ids(20, 2, 1):
        torch.testing.assert_close(step(model, cropped, token), step(model, never, token))


def test_reset_forgets_everything():
    model, ids = tiny_model(), random_ids(1, 140)
    cache = warm(model, ids)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.report().sparse_steps == 0
    fresh = AnchorDynamicCache(**SMALL, budget=56)
    expected = generate(model, ids, fresh)
    torch.testing.assert_close(generate(model, ids, cache)[1], expected[1])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_share_nothing(clone):
    model, ids = tiny_model(), random_ids(1, 140)
    cache = warm(model, ids)
    other, token = clone(cache), random_ids(1, 1)
    expected = step(model, cache, token)
    for _ in range(3):
        step(model, cache, random_ids(1, 1))
    torch.testing.assert_close(step(model, other, token), expected)
    assert other.get_seq_length() == cache.get_seq_length() - 3


def test_offload_and_prefetch_keep_everything():
    model, ids = tiny_model(), random_ids(1, 140)
    cache, token = warm(model, ids), random_ids(1, 1)
    expected = step(model, copy.deepcopy(cache), token)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    torch.testing.assert_close(step(model, cache, token), expected)


def test_question_token_by_token_equals_many_at_once_with_full_budget():
    model, ids, question = tiny_model(), random_ids(1, 120), random_ids(1, 9)
    one, many = (AnchorDynamicCache(budget=1.0, **SMALL) for _ in range(2))
    for cache in (one, many):
        model(ids, past_key_values=cache)
    for token in question[0]:
        logits = step(model, one, token.view(1, 1))
    torch.testing.assert_close(step(model, many, question), logits, atol=1e-5, rtol=1e-5)


def test_from_cache_indexes_a_filled_cache():
    model, ids = tiny_model(), random_ids(2, 140)
    plain = DynamicCache(config=model.config)
    model(ids, past_key_values=plain)
    token = random_ids(2, 1)
    expected = step(model, copy.deepcopy(plain), token)
    full = AnchorDynamicCache.from_cache(copy.deepcopy(plain), budget=1.0, **SMALL)
    torch.testing.assert_close(step(model, full, token), expected, atol=1e-5, rtol=1e-5)
    sparse = AnchorDynamicCache.from_cache(plain, budget=56, builder="tangent", **SMALL)
    for token in random_ids(12, 2, 1):
        assert torch.isfinite(step(model, sparse, token)).all()
    assert sparse.report().sparse_steps == 12
    assert sparse.layers[0].reader.perspectives._learned_from.tolist() == [8, 8]  # as queries came
