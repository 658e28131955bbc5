"""Everything generate can do, against DynamicCache."""

import copy
import functools

import pytest
import torch
import transformers
from families import random_ids
from families import tiny_model as build
from packaging.version import Version
from test_anchor_cache_exact import SMALL
from test_anchor_cache_rows import left_padded
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache

pytestmark = pytest.mark.usefixtures("ranks_few")

FAMILIES = ["llama", "qwen3", "gemma3", "gpt_neox", "phi3"]
tiny_model = functools.cache(build)
CHUNKS_OF_A_FILLED_CACHE = Version(transformers.__version__) >= Version("5.24")
FILLED = 90  # tokens of the prompt that a filled cache holds


def by_hand(model, input_ids, generation_config, **kwargs):
    """A decoding loop of one's own: greedy, the prompt in two pieces."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    fed = input_ids[:, :50]
    model(fed, past_key_values=cache)
    fed = input_ids[:, 50:]
    while input_ids.shape[1] < generation_config.max_length:
        fed = model(fed, past_key_values=cache).logits[:, -1:].argmax(-1)
        input_ids = torch.cat((input_ids, fed), 1)
    return input_ids


MODES = {
    "greedy": dict(),
    "sampling": dict(do_sample=True, top_k=20, temperature=1.5),
    "beams": dict(num_beams=3),
    "sampled beams": dict(num_beams=3, do_sample=True),
    "all beams": dict(num_beams=3, num_return_sequences=3, early_stopping=True),
    "several sequences": dict(do_sample=True, num_return_sequences=3),
    "logits processors": dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=5),
    "guidance": dict(guidance_scale=1.5),
    "chunked prefill": dict(prefill_chunk_size=23),
    "custom loop": dict(custom_generate=by_hand),
    "assisted": dict(assistant_model="another"),
    "sampled assisted": dict(assistant_model="another", do_sample=True),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
}
# Checks of several candidates at once are exact, and dense.
DRAFTING = {"assisted", "sampled assisted", "prompt lookup"}
# How the next token is chosen does not depend on the family.
TOUCH_THE_CACHE = {"greedy", "beams", "chunked prefill", "assisted", "prompt lookup"}
FAMILY_AND_MODE = [(f, m) for f in FAMILIES for m in MODES if f == "llama" or m in TOUCH_THE_CACHE]


def prompt():
    """120 tokens with repetitions for prompt lookup to find."""
    part = random_ids(1, 40)
    return torch.cat((part, random_ids(1, 40), part), 1)


def call(model, ids, cache, tokens=9, **options):
    """One seeded call of generate; returns its whole output."""
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False) | options
    if "assistant_model" in options:
        options["assistant_model"] = tiny_model("llama", num_hidden_layers=1)
    torch.manual_seed(1)
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=tokens, eos_token_id=[5], **options
    )


def dense(model):
    return DynamicCache(config=model.config)


def anchors(model, **settings):
    return AnchorDynamicCache(model.config, **{**SMALL, "budget": 1.0, **settings})


@pytest.mark.parametrize(("family", "mode"), FAMILY_AND_MODE)
def test_full_budget_equals_dynamic_cache(family, mode):
    model, ids = tiny_model(family), prompt()
    expected = call(model, ids, dense(model), **MODES[mode])
    cache = anchors(model)
    assert torch.equal(call(model, ids, cache, **MODES[mode]), expected)
    assert cache.report().sparse_steps == 0


@pytest.mark.parametrize(("family", "mode"), FAMILY_AND_MODE)
def test_small_budget_is_sparse_and_the_same_each_time(family, mode):
    model, ids = tiny_model(family), prompt()
    caches = [anchors(model, budget=48) for _ in range(2)]
    outs = [call(model, ids, cache, **MODES[mode]) for cache in caches]
    assert torch.equal(*outs)
    report = caches[0].report()
    assert report.to_dict() == caches[1].report().to_dict()
    if mode not in DRAFTING:
        assert report.sparse_steps > 0 and report.dense_steps == 0
        assert report.max_tokens_attended <= 48
    else:
        assert report.reasons["several tokens appended at once are exact, and dense"] > 0


WHOLE, NEW, EMBEDS = "whole ids", "new ids and the whole mask", "embeddings"
# Left out is what transformers does wrong (see test_refed_tokens.py) and what feeds ids only.
FILLINGS = [
    (family, mode, filling)
    for family, mode in FAMILY_AND_MODE
    for filling in (WHOLE, NEW, EMBEDS)
    if family in ("llama", "gemma3")
    and mode != "custom loop"
    and not (mode in DRAFTING and (filling != NEW or not CHUNKS_OF_A_FILLED_CACHE))
    and not (mode == "chunked prefill" and (filling == EMBEDS or not CHUNKS_OF_A_FILLED_CACHE))
    and not (mode == "guidance" and filling == EMBEDS)
]


@pytest.mark.parametrize(("family", "mode", "filling"), FILLINGS)
def test_a_filled_cache(family, mode, filling):
    options = dict(MODES[mode])
    model, ids = tiny_model(family), prompt()
    if filling == EMBEDS:
        options["inputs_embeds"] = model.get_input_embeddings()(ids)
    if filling == NEW:
        options["attention_mask"] = torch.ones_like(ids)
    fed = ids[:, FILLED:] if filling == NEW else ids
    outs = []
    for make, budget in ((dense, None), (anchors, 1.0), (anchors, 48)):
        cache = make(model) if budget is None else make(model, budget=budget)
        model(ids[:, :FILLED], past_key_values=cache)
        several = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
        if several > 1:
            cache.batch_repeat_interleave(several)
        outs.append(call(model, fed, cache, **options))
    assert torch.equal(outs[1], outs[0])
    assert outs[2].shape[0] == outs[0].shape[0]
    if mode not in DRAFTING:
        assert cache.report().sparse_steps > 0


@pytest.mark.parametrize("budget", [1.0, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_continuing_equals_going_on(family, budget):
    """Upstream's generate_continue_from_past_key_values: 9 tokens are 4 and then 5."""
    model, ids = tiny_model(family), prompt()
    once, twice = (anchors(model, budget=budget) for _ in range(2))
    expected = call(model, ids, once)
    first = call(model, ids, twice, tokens=4)
    assert torch.equal(call(model, first, twice, tokens=5), expected)
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(one[:2], other[:2], atol=1e-5, rtol=1e-5)
    assert once.report().to_dict() == twice.report().to_dict()


@pytest.mark.parametrize("given", ["all ids", "new ids and the whole mask"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_turns_on_one_cache(family, given):
    """A turn may bring one token or many."""
    model, turns = tiny_model(family), [prompt(), random_ids(1, 17), random_ids(1, 1)]
    histories = []
    for cache in (dense(model), anchors(model), anchors(model, budget=48)):
        history = torch.zeros(1, 0, dtype=torch.long)
        for turn in turns:
            history = torch.cat((history, turn), 1)
            cached = cache.get_seq_length() if given.startswith("new") else 0
            options = dict(attention_mask=torch.ones_like(history))
            new = call(model, history[:, cached:], cache, tokens=4, **options)
            history = torch.cat((history[:, :cached], new), 1)
            assert cache.get_seq_length() == history.shape[1] - 1
        histories.append(history)
    assert torch.equal(histories[1], histories[0])
    assert torch.equal(histories[2][:, :120], histories[0][:, :120])
    # The one token before and the one of the third turn are a step of two.
    assert cache.report().prefill_steps == 3 and cache.report().sparse_steps == 9


@pytest.mark.parametrize("family", FAMILIES)
def test_many_tokens_at_once_are_exact_and_one_by_one_are_sparse(family):
    model, ids, question = tiny_model(family), prompt(), random_ids(1, 9)
    caches = dense(model), anchors(model, budget=48), anchors(model, budget=48)
    for cache in caches:
        model(ids, past_key_values=cache)
    exact, once = (model(question, past_key_values=cache).logits for cache in caches[:2])
    torch.testing.assert_close(once, exact, atol=1e-4, rtol=1e-4)
    singly = [model(token, past_key_values=caches[2]).logits for token in question.split(1, 1)]
    assert (torch.cat(singly, 1) - exact).abs().max() > 1e-3
    assert caches[1].report().sparse_steps == 0 and caches[1].report().prefill_steps == 2
    assert caches[2].report().sparse_steps == 9
    assert caches[2].get_seq_length() == caches[1].get_seq_length()


@pytest.mark.parametrize("builder", ["mean", "tangent"])
@pytest.mark.parametrize("options", [dict(num_beams=3), dict(num_beams=2, do_sample=True)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_after_beam_search_the_cache_gives_what_a_rebuilt_one_gives(family, options, builder):
    model = tiny_model(family)
    ids, mask = left_padded([random_ids(110), random_ids(97)])
    cache = anchors(model, budget=56, builder=builder)
    call(model, ids, cache, tokens=18, attention_mask=mask, **options)
    rows, length = 2 * options["num_beams"], cache.get_seq_length()
    mask = torch.nn.functional.pad(mask, (0, length + 1 - mask.shape[1]), value=1)
    mask = mask.repeat_interleave(options["num_beams"], 0)
    for layer in cache.anchor_layers.values():
        assert layer.keys.shape[0] == layer.index.anchors.shape[0] == rows
        assert layer.index.blocks > 0
    other = copy.deepcopy(cache)
    if builder == "mean":  # perspectives are learned once, so tangent anchors stay what they are
        for layer in other.anchor_layers.values():
            layer.reader.keys_changed()
    else:
        for layer in other.anchor_layers.values():
            layer.index.truncate(0)
    positions = mask.cumsum(1)[:, -1:] - 1
    token = random_ids(rows, 1)
    logits = [
        model(token, past_key_values=c, attention_mask=mask, position_ids=positions).logits
        for c in (cache, other)
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
    assert cache.report().sparse_steps == other.report().sparse_steps > 0
