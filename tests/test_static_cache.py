"""An AnchorStaticCache selects what an AnchorDynamicCache does, in buffers of fixed capacity."""

import copy
import gc
import pickle

import pytest
import torch
from families import random_ids, tiny_model
from test_anchor_cache_exact import SMALL, generate
from transformers import DynamicCache

from anchor_cache import AnchorConfig, AnchorDynamicCache, AnchorStaticCache, is_patched

CAPACITY = 203  # no whole number of blocks
EAGER_OR_SDPA = [("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa"), ("gemma3", "sdpa")]
EAGER_OR_SDPA += [("gemma2", "eager"), ("gpt_oss", "eager"), ("gpt_neox", "sdpa")]
families = pytest.mark.parametrize(("family", "implementation"), EAGER_OR_SDPA)


def static(model, budget=56, capacity=CAPACITY, **fields):
    return AnchorStaticCache(model.config, capacity, budget=budget, **{**SMALL, **fields})


def decode(model, cache, ids, tokens, paddings=None, step=None):
    """Logits of teacher-forced steps, ``[B, T + 1, V]``: the prompt's last, then each token's.

    ``step`` computes all but the prompt, and gets the same shapes and strides each time.
    """
    everything = torch.cat((ids, tokens), 1)
    mask = torch.ones_like(everything)
    for row, padding in enumerate(paddings or ()):
        mask[row, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits, start = [], 0
    for stop in range(ids.shape[1], everything.shape[1] + 1):
        call = model if start == 0 or step is None else step
        out = call(
            everything[:, start:stop].clone(memory_format=torch.contiguous_format),
            # What the mask says of tokens to come is no matter.
            attention_mask=(mask if step else mask[:, :stop]) if paddings else None,
            position_ids=positions[:, start:stop].clone(memory_format=torch.contiguous_format),
            past_key_values=cache,
        )
        logits.append(out.logits[:, -1:])
        start = stop
    return torch.cat(logits, 1)


def agree(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@families
def test_a_budget_of_the_capacity_equals_dynamic_cache(family, implementation):
    model, ids = tiny_model(family, attn_implementation=implementation), random_ids(2, 70)
    expected = generate(model, ids, DynamicCache(config=model.config))
    cache = static(model, budget=1.0)
    actual = generate(model, ids, cache)
    assert torch.equal(actual[0], expected[0])
    agree(actual[1], expected[1])
    report = cache.report()
    assert (report.sparse_steps, report.dense_steps, report.prefill_steps) == (0, 19, 1)
    assert report.index_bytes == 0
    assert "max_cache_len=203: context within the budget of 1.0" in report.reasons


@families
def test_a_context_within_the_budget_is_read_whole(family, implementation):
    """By the compiled way of reading, which has no other one."""
    model, ids = tiny_model(family, attn_implementation=implementation), random_ids(1, 9)
    tokens = random_ids(1, 120)
    cache = static(model, budget=130)
    agree(
        decode(model, cache, ids, tokens),
        decode(model, DynamicCache(config=model.config), ids, tokens),
    )
    assert cache.report().sparse_steps == 0
    assert "context within the budget of 130" in cache.report().reasons
    assert cache.report().index_bytes > 0


@families
@pytest.mark.parametrize("paddings", [None, (0, 13)])
def test_selects_what_the_growing_cache_selects(family, implementation, paddings):
    model = tiny_model(family, attn_implementation=implementation)
    torch.manual_seed(1)  # with others a rounding error may turn a bit of one sketch
    ids, tokens = random_ids(2, 90), random_ids(2, 45)
    growing, cache = AnchorDynamicCache(model.config, budget=56, **SMALL), static(model)
    expected = decode(model, growing, ids, tokens, paddings)
    agree(decode(model, cache, ids, tokens, paddings), expected)
    dense = decode(model, DynamicCache(config=model.config), ids, tokens, paddings)
    assert (expected - dense).abs().max() > 1e-2
    one, other = growing.report(), cache.report()
    assert one.sparse_steps == other.sparse_steps == 45
    assert one.tokens_attended == pytest.approx(other.tokens_attended)
    assert one.max_tokens_attended == other.max_tokens_attended <= 56


@pytest.mark.parametrize(
    "fields",
    [
        dict(refine=None),
        dict(builder="minmax"),
        dict(builder="minmax", refine=None, anchor_dtype=None),
        dict(anchor_dtype=None, sketch_bits=1),
        dict(block_size=16, read_size=4, sink_size=0, window_size=17),
        dict(read_size=8, budget=55, refine_factor=2),
        dict(per_layer={0: {"budget": 1.0}, 2: {"budget": 80, "block_size": 4}}),
    ],
)
@pytest.mark.usefixtures("ranks_few")
def test_every_setting_that_is_taken_selects_the_same(fields):
    model, ids, tokens = tiny_model(), random_ids(2, 110), random_ids(2, 40)
    fields = {"budget": 56, "refine_factor": 64, **SMALL, **fields}
    expected = decode(model, AnchorDynamicCache(model.config, **fields), ids, tokens, (0, 5))
    cache = AnchorStaticCache(model.config, CAPACITY, **fields)
    agree(decode(model, cache, ids, tokens, (0, 5)), expected)
    assert cache.report().sparse_steps == 40


def test_budgets_and_dense_limits_are_measured_by_the_capacity():
    model, ids, tokens = tiny_model(), random_ids(1, 60), random_ids(1, 5)
    share = static(model, budget=0.25, capacity=240)
    decode(model, share, ids, tokens)
    assert share.report().sparse_steps == 5
    assert 54 <= share.report().max_tokens_attended <= 60
    for limit, reason in [
        (dict(dense_below=240), "context of at most dense_below=240 tokens"),
        (dict(dense_above=0.1), "the budget of 60 is more than dense_above=0.1 of the context"),
    ]:
        cache = static(model, budget=60, capacity=240, **limit)
        decode(model, cache, ids, tokens)
        assert cache.report().reasons == {f"max_cache_len=240: {reason}": 20}


def test_a_prompt_in_pieces_and_several_turns():
    model, ids, tokens = tiny_model(), random_ids(1, 120), random_ids(1, 20)
    expected = decode(model, static(model), ids, tokens)
    pieces = static(model)
    model(ids[:, :50], past_key_values=pieces)
    model(ids[:, 50:57], past_key_values=pieces)
    out = [model(ids[:, 57:], past_key_values=pieces).logits[:, -1:]]
    out += [model(t, past_key_values=pieces).logits for t in tokens.split(1, 1)]
    agree(torch.cat(out, 1), expected)
    # Another turn, of several tokens at once, is exact, and the index goes on behind it.
    turn = random_ids(1, 21)
    growing = AnchorDynamicCache(model.config, budget=56, **SMALL)
    decode(model, growing, ids, tokens)
    for cache in (growing, pieces):
        cache.turn = [model(turn, past_key_values=cache).logits]
        cache.turn += [model(t, past_key_values=cache).logits for t in tokens.split(1, 1)]
    agree(torch.cat(pieces.turn, 1), torch.cat(growing.turn, 1))
    assert pieces.report().prefill_steps == 4


def test_reset_and_crop_leave_nothing_behind():
    model, ids, tokens = tiny_model(), random_ids(2, 100), random_ids(2, 30)
    expected = decode(model, static(model), ids, tokens)
    cache = static(model)
    decode(model, cache, random_ids(2, 150), random_ids(2, 30), (9, 0))
    addresses = [states.data_ptr() for layer in cache.layers for states in layer._states()]
    cache.reset()
    assert cache.report().sparse_steps == 0 and int(cache.get_seq_length()) == 0
    agree(decode(model, cache, ids, tokens), expected)
    cache.crop(-30)
    again = [model(t, past_key_values=cache).logits for t in tokens.split(1, 1)]
    agree(torch.cat(again, 1), expected[:, 1:])
    assert addresses == [states.data_ptr() for layer in cache.layers for states in layer._states()]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_go_on_alone(copied):
    model, ids, tokens = tiny_model(), random_ids(1, 100), random_ids(1, 20)
    expected = decode(model, static(model), ids, tokens)
    cache = static(model)
    model(ids, past_key_values=cache)
    other = copied(cache)
    model(random_ids(1, 30), past_key_values=cache)
    del cache
    gc.collect()
    assert is_patched(model)
    out = [model(t, past_key_values=other).logits for t in tokens.split(1, 1)]
    agree(torch.cat(out, 1), expected[:, 1:])
    assert other.report().sparse_steps == 20


@pytest.mark.parametrize("options", [{}, dict(num_beams=3), dict(prefill_chunk_size=37)])
def test_generate(options):
    model, ids = tiny_model(), random_ids(2, 100)
    options["suppress_tokens"] = [0]  # its embedding, and so its query, is 0: all blocks are alike
    growing = AnchorDynamicCache(model.config, budget=56, **SMALL)
    expected = generate(model, ids, growing, tokens=40, **options)
    cache = static(model)
    actual = generate(model, ids, cache, tokens=40, **options)
    assert torch.equal(actual[0], expected[0])
    agree(actual[1], expected[1])
    assert cache.report().sparse_steps == growing.report().sparse_steps == 39


def test_padded_rows_give_what_they_give_alone():
    model, tokens = tiny_model(), random_ids(2, 30)
    ids = random_ids(2, 110)
    together = decode(model, static(model), ids, tokens, (0, 29))
    alone = decode(model, static(model), ids[1:, 29:], tokens[1:])
    agree(together[1:], alone)


@pytest.mark.parametrize(
    "fields",
    [
        dict(coverage=0.9),
        dict(tolerance=0.1),
        dict(selection_heads="query"),
        dict(selection_heads="layer"),
        dict(reselect_every=2),
        dict(skipped="mean"),
        dict(offload="cpu"),
        dict(audit_every=1),
        dict(refine="exact"),
        dict(builder="tangent"),
        dict(builder="representative"),
    ],
)
def test_settings_that_need_a_growing_cache_are_refused_by_name(fields):
    (name,) = fields
    config = tiny_model().config
    with pytest.raises(ValueError, match=f"^{name}=.*use AnchorDynamicCache"):
        AnchorStaticCache(config, CAPACITY, **fields)
    if name != "offload":
        with pytest.raises(ValueError, match=f"^{name}="):
            AnchorStaticCache(config, CAPACITY, AnchorConfig(per_layer={1: fields}))


def test_bad_arguments_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="max_cache_len=0 is not valid"):
        AnchorStaticCache(model.config, 0)
    with pytest.raises(TypeError, match="goes to anchor_config"):
        AnchorStaticCache(AnchorConfig(), 100)
    with pytest.raises(TypeError, match="did you mean 'budget'"):
        AnchorStaticCache(model.config, 100, budgt=3)
    with pytest.raises(ValueError, match=r"per_layer=\[4\]"):
        AnchorStaticCache(model.config, 100, per_layer={4: {"budget": 1.0}})


def test_tokens_that_do_not_fit_or_come_again_are_refused():
    model, ids = tiny_model(), random_ids(1, 100)
    cache = static(model)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"max_cache_len=203 .* hold 204 tokens"):
        model(random_ids(1, 104), past_key_values=cache)
    with pytest.raises(ValueError, match="would be read twice"):
        generate(model, ids, cache)
    model(random_ids(1, 103), past_key_values=cache)
    with pytest.raises((IndexError, RuntimeError)):
        model(ids[:, :1], past_key_values=cache)


def test_latent_attention_stays_dense_and_says_so():
    model, ids = tiny_model("deepseek_v3"), random_ids(1, 100)
    expected = generate(model, ids, DynamicCache(config=model.config))
    cache = static(model)
    with pytest.warns(UserWarning, match="AnchorStaticCache stays dense"):
        actual = generate(model, ids, cache)
    agree(actual[1], expected[1])
    report = cache.report()
    assert report.sparse_steps == 0 and report.dense_steps == 19
    assert "latent attention" in str(report)


def test_attention_is_patched_while_the_cache_lives():
    model = tiny_model()
    cache = static(model)
    assert is_patched(model)
    model(random_ids(1, 20), past_key_values=cache)
    del cache
    gc.collect()
    assert not is_patched(model)
