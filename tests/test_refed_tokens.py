"""generate's silent traps with a filled cache, and honest uses that look like them."""

import warnings

import pytest
import torch
import transformers
from families import random_ids, tiny_model
from packaging.version import Version
from test_anchor_cache_exact import SMALL
from test_anchor_cache_rows import left_padded
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache
from anchor_cache.refed_tokens import refed_from

# GPT-NeoX hands no positions over, gemma3 begins with a sliding layer, phi3 turns half of a head.
FAMILIES = ["llama", "qwen3", "gemma3", "gpt_neox", "phi3", "GPT2Config"]
CHUNKS_OF_A_FILLED_CACHE = Version(transformers.__version__) >= Version("5.24")


def anchor_cache(model, **settings):
    return AnchorDynamicCache(model.config, **{**SMALL, "budget": 1.0, **settings})


def filled(model, ids, **kwargs):
    """A cache of exactly these tokens, at generate's positions."""
    cache = anchor_cache(model)
    generate(model, ids, cache, max_new_tokens=1, **kwargs)
    return cache


def generate(model, ids, cache, **kwargs):
    kwargs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False) | kwargs
    return model.generate(ids, past_key_values=cache, **kwargs)


TRAPS = {
    "ids as long as the cache": (60, {}),
    "use_cache=False": (69, dict(use_cache=False)),
    "prompt lookup, whole ids": (69, dict(prompt_lookup_num_tokens=3)),
    "assisted, whole ids": (69, dict(assistant_model="itself")),
    "ids shorter than the cache": (45, {}),
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_fed_again_are_refused(family, trap):
    model, ids = tiny_model(family), random_ids(1, 69)
    length, options = TRAPS[trap]
    options = {k: model if v == "itself" else v for k, v in options.items()}
    cache = filled(model, ids[:, :60])
    with pytest.raises(ValueError, match=r"in the cache already .* cache\.crop\(-1\) first"):
        generate(model, ids[:, :length], cache, **options)
    kept = 69 if trap == "use_cache=False" else 60  # its first step was right
    assert cache.get_seq_length() == kept
    assert {layer.get_seq_length() for layer in cache.layers} == {kept}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_use_cache_even_a_fresh_cache_is_refused(family):
    model = tiny_model(family)
    with pytest.raises(ValueError, match="use_cache=False: leave it out, or the cache"):
        generate(model, random_ids(1, 60), anchor_cache(model), use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_as_long_as_the_cache_are_refused(family):
    model, ids = tiny_model(family), random_ids(1, 60)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="in the cache already"):
        model.generate(inputs_embeds=embeds, past_key_values=filled(model, ids), max_new_tokens=6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_hides_no_trap(family, dtype):
    """Keys of 60 and of 61 tokens come from other matrix products, rounded otherwise."""
    model, ids = tiny_model(family).to(dtype), random_ids(1, 60)
    with pytest.raises(ValueError, match="in the cache already"):
        generate(model, ids, anchor_cache(model), use_cache=False)


@pytest.mark.parametrize("lengths", [(60, 41), (33, 52, 47)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_fed_again_is_refused(family, lengths):
    model = tiny_model(family)
    ids, mask = left_padded([random_ids(n) for n in lengths])
    cache = filled(model, ids, attention_mask=mask)
    with pytest.raises(ValueError, match="in the cache already"):
        generate(model, ids, cache, attention_mask=mask)


def test_a_padded_row_fed_again_is_refused():
    model = tiny_model()
    ids, mask = torch.cat((torch.zeros(1, 9).long(), random_ids(1, 51)), 1), torch.ones(1, 60)
    mask[:, :9] = 0
    cache = filled(model, ids, attention_mask=mask)
    with pytest.raises(ValueError, match="in the cache already"):
        generate(model, ids, cache, attention_mask=mask)


def test_a_second_call_with_the_same_prompt_is_refused_and_reset_is_the_remedy():
    model, ids = tiny_model(), random_ids(1, 60)
    cache = anchor_cache(model)
    expected = generate(model, ids, cache)
    with pytest.raises(ValueError, match="from token 5 on"):
        generate(model, ids, cache)
    cache.reset()
    assert torch.equal(generate(model, ids, cache), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_remedies_are_right(family):
    model, ids = tiny_model(family), random_ids(1, 69)
    expected = generate(model, ids, DynamicCache(config=model.config))[:, 69:]
    assert torch.equal(generate(model, ids, filled(model, ids[:, :-1]))[:, 69:], expected)
    if family != "gemma3":  # a sliding layer cannot be cropped
        cache = filled(model, ids)
        cache.crop(-1)
        assert torch.equal(generate(model, ids, cache)[:, 69:], expected)
    if CHUNKS_OF_A_FILLED_CACHE:
        for extra in (dict(prompt_lookup_num_tokens=3), dict(assistant_model=model)):
            cache = filled(model, ids[:, :60])
            out = generate(model, ids[:, 60:], cache, attention_mask=torch.ones_like(ids), **extra)
            assert torch.equal(out[:, 9:], expected)


# -- what must not be refused ---------------------------------------------------------------------


def appended(model, parts, cache, **kwargs):
    return torch.cat([model(p, past_key_values=cache, **kwargs).logits for p in parts], 1)


def without_rotation():
    return tiny_model("SmolLM3Config", no_rope_layers=[0] * 4)


MODELS = {family: lambda family=family: tiny_model(family) for family in FAMILIES} | {
    "no rotation": without_rotation,
    "alibi": lambda: tiny_model("BloomConfig", n_layer=2, n_head=4, attn_implementation="eager"),
}


@pytest.mark.filterwarnings("ignore:AnchorDynamicCache stays dense")
@pytest.mark.parametrize("sizes", [(37, 37), (37, 37, 37), (37, 12), (2, 3), (1, 2, 4, 8), (8, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_repetitive_text_is_not_refused(name, sizes):
    """Later pieces bring the tokens of the first one again, at other positions."""
    model, period = MODELS[name](), random_ids(1, sizes[0])
    if sizes[0] > 8:
        period[:, 5] = period[:, 2]  # in a real text some token occurs twice
    text = period.repeat(1, 20)
    parts = [text[:, : sizes[0]]] + [text[:, :n] for n in sizes[1:]]
    dense = appended(model, parts, DynamicCache(config=model.config))
    actual = appended(model, parts, anchor_cache(model))
    torch.testing.assert_close(actual, dense, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [dict(rope_type="linear", factor=64.0), dict(rope_theta=1e7)])
def test_slow_rotation_and_a_repeated_token(rope, dtype):
    """Neighbours of a slow rotation differ by less than bf16 rounds; they are two tokens still."""
    rope = dict(rope_type="default", rope_theta=1e4) | rope
    model = tiny_model(rope_parameters=rope).to(dtype)
    text = torch.full((1, 40), 7)
    parts = [text, text[:, :2], text[:, :3], text]
    dense = appended(model, parts, DynamicCache())
    actual = appended(model, parts, anchor_cache(model))
    torch.testing.assert_close(actual.float(), dense.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_cropped_tokens_may_be_fed_again(family):
    model, ids = tiny_model(family), random_ids(1, 60)
    cache = anchor_cache(model)
    cache.activate_past_recording()
    whole = model(ids, past_key_values=cache).logits
    cache.crop(-20)
    again = model(ids[:, 40:], past_key_values=cache).logits
    torch.testing.assert_close(again, whole[:, 40:], atol=1e-4, rtol=1e-4)


def test_outlier_channels_hide_no_difference():
    """One channel a thousand times as large as the others, and equal in both."""
    stored, new = torch.randn(2, 1, 2, 40, 16), torch.randn(2, 1, 2, 40, 16)
    stored[..., 3] = new[..., 3] = 1000.0
    assert refed_from(tuple(stored.bfloat16()), tuple(new.bfloat16())) is None
    assert refed_from(tuple(stored), tuple(stored[:, :, :, 7:20])) == 7


@pytest.mark.parametrize("shape", [(2, 2, 5, 16), (1, 4, 5, 16), (1, 2, 5, 8)])
def test_states_of_another_shape_are_left_to_the_storage(shape):
    assert refed_from((torch.ones(1, 2, 9, 16),) * 2, (torch.ones(shape),) * 2) is None


# -- warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_another_prompt_on_a_used_cache_is_warned_of(family):
    model = tiny_model(family)
    cache = filled(model, random_ids(1, 60))
    with pytest.warns(UserWarning, match=r"needs an empty cache \(cache.reset\(\)\)"):
        generate(model, random_ids(1, 60), cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_ids_without_a_mask_over_all_tokens_are_warned_of(family):
    model = tiny_model(family)
    cache = filled(model, random_ids(1, 60))
    with pytest.warns(UserWarning, match="need an attention_mask over all tokens"):
        generate(model, random_ids(1, 40), cache)


@pytest.mark.skipif(CHUNKS_OF_A_FILLED_CACHE, reason="transformers does it right")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("extra", [dict(prompt_lookup_num_tokens=3), dict(prefill_chunk_size=5)])
def test_a_mask_that_transformers_cut_is_warned_of(family, extra):
    model, ids = tiny_model(family), random_ids(1, 69)
    cache = filled(model, ids[:, :60])
    with pytest.warns(UserWarning, match="begin with an empty cache"):
        generate(model, ids[:, 60:], cache, attention_mask=torch.ones_like(ids), **extra)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_honest_calls_are_not_warned_of(family, implementation):
    model = tiny_model(family, attn_implementation=implementation)
    ids, mask = left_padded([random_ids(60), random_ids(41)])
    new = random_ids(2, 9)
    both, long = torch.cat((ids, new), 1), torch.cat((mask, torch.ones_like(new)), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generate(model, both, filled(model, ids, attention_mask=mask), attention_mask=long)
        generate(model, new, filled(model, ids, attention_mask=mask), attention_mask=long)
        generate(model, ids, anchor_cache(model), attention_mask=mask, prefill_chunk_size=13)
        generate(model, ids[:1], anchor_cache(model), prompt_lookup_num_tokens=3)
        generate(model, both[:1], filled(model, ids[:1]))
        cache = filled(model, ids[:1])
        model(new[:1], past_key_values=cache, position_ids=torch.arange(100, 109)[None])
