"""Attention is routed only while somebody asks for it, and only for calls from our layers."""

import copy
import gc
import warnings

import pytest
import torch
from families import random_ids, tiny_model
from test_anchor_cache_exact import SMALL, generate
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anchor_cache import AnchorDynamicCache, anchor_attention, is_patched

# A model that computes its attention without transformers' attention interface.
BLOOM = dict(
    family="BloomConfig",
    n_layer=2,
    n_head=4,
    num_key_value_heads=None,
    attn_implementation="eager",
)


@pytest.fixture(autouse=True)
def nothing_patched_before_and_after():
    gc.collect()
    before = dict(ALL_ATTENTION_FUNCTIONS)
    yield
    gc.collect()
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


def test_a_cache_patches_while_it_lives():
    model, ids = tiny_model(), random_ids(1, 100)
    cache = AnchorDynamicCache(budget=56, **SMALL)
    assert not is_patched(model)
    generate(model, ids, cache)
    assert is_patched(model) and cache.report().sparse_steps == 19
    other = copy.deepcopy(cache)
    model(ids[:, :1], past_key_values=other)
    del cache
    gc.collect()
    assert is_patched(model)
    del other
    gc.collect()
    assert not is_patched(model)


def test_explicit_patching_is_undone_also_after_an_error():
    model = tiny_model()
    with pytest.raises(RuntimeError, match="mine"), anchor_attention(model) as same:
        assert same is model and is_patched(model)
        with anchor_attention(model):
            pass
        assert is_patched(model)
        raise RuntimeError("mine")
    assert not is_patched(model)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_caches_and_models_are_unaffected(implementation):
    model, ids = tiny_model(attn_implementation=implementation), random_ids(2, 90)
    expected = generate(model, ids, DynamicCache())
    with anchor_attention(model):
        actual = generate(model, ids, DynamicCache())
    assert torch.equal(actual[1], expected[1])


def test_a_wrapper_put_over_ours_stays():
    model = tiny_model()
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with anchor_attention(model):
        ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
        theirs = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
        ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
    ALL_ATTENTION_FUNCTIONS["sdpa"] = original
    del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_an_attention_registered_while_a_cache_lives_is_routed_too():
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    model, ids = tiny_model(), random_ids(1, 100)
    cache = AnchorDynamicCache(budget=56, **SMALL)
    model(ids, past_key_values=cache)
    seen = []

    def mine(module, *args, **kwargs):
        seen.append("anchor_layer" in kwargs)
        return sdpa(module, *args, **kwargs)

    sdpa = AttentionInterface._global_mapping["sdpa"]
    AttentionInterface.register("mine", mine)
    AttentionMaskInterface.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.set_attn_implementation("mine")
        model(ids[:, :1], past_key_values=cache)
        assert cache.report().sparse_steps == 1 and seen == [False] * 4
    finally:
        del cache
        gc.collect()
        del AttentionInterface._global_mapping["mine"]
        del AttentionMaskInterface._global_mapping["mine"]


def test_a_model_that_bypasses_the_interface_is_refused_by_name():
    model = tiny_model(**BLOOM)
    with (
        pytest.raises(NotImplementedError, match="BloomForCausalLM does not route"),
        anchor_attention(model),
    ):
        pass


def test_an_unsupported_model_is_dense_and_says_so():
    model = tiny_model(**BLOOM)
    ids = random_ids(1, 100)
    expected = generate(model, ids, DynamicCache())
    cache = AnchorDynamicCache(budget=56, **SMALL)
    with pytest.warns(UserWarning, match="AnchorDynamicCache stays dense"):
        actual = generate(model, ids, cache)
    torch.testing.assert_close(actual[1], expected[1])
    report = cache.report()
    assert report.sparse_steps == 0
    assert any("did not pass through" in reason for reason in report.reasons)


def test_nothing_leaks():
    import weakref

    model, ids = tiny_model("gpt_neox"), random_ids(1, 100)
    cache = AnchorDynamicCache(budget=56, **SMALL)
    generate(model, ids, cache)
    layer = weakref.ref(cache.layers[0])
    del cache
    gc.collect()
    assert layer() is None


def test_no_warning_in_ordinary_use():
    model, ids = tiny_model(), random_ids(1, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
        generate(model, ids, AnchorDynamicCache(budget=56, **SMALL))
