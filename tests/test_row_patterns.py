"""What rows see where it can be said in few words, against the masks that transformers makes."""

import pytest
import torch
from anchor_cache.kernels.dispatch import use_implementation
from anchor_cache.kernels.reference_attention import mask_of_rows
from anchor_cache.patches.mask_recipe import MaskRecipe, RowMask
from anchor_cache.patches.partial_forward import PartialForward
from families import random_ids, tiny_model
from test_blended_cache import PREFIX, row, same_kv

from anchor_cache import BlendedCache, ChunkStore

TOKENS = 60


def recipes(model):
    calls = PartialForward(model, random_ids(1, TOKENS))._calls
    return {id(v): v for call in calls for v in call.kwargs.values() if isinstance(v, MaskRecipe)}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "windows", "others"),
    [("llama", {None}, 0), ("gemma3", {None, 24}, 0), ("llama4", {None}, 1)],
)
def test_patterns_say_what_the_masks_say(family, windows, others, implementation):
    """llama4 sees chunks of tokens, which is no such pattern."""
    positions = torch.randperm(TOKENS)[:20].sort().values
    visible = torch.rand(TOKENS) < 0.5
    found, rest = set(), 0
    for recipe in recipes(tiny_model(family, attn_implementation=implementation)).values():
        for seen in (None, visible):
            mask = recipe.rows(positions, seen)
            assert recipe.rows(positions, seen) is mask
            if not isinstance(mask, RowMask):
                rest += seen is None
                continue
            found.add(mask.pattern.window)
            assert mask.made.cache_info().misses == 0
            expected = mask_of_rows(TOKENS, None, *mask.pattern)
            actual = mask if mask.dtype == torch.bool else mask == 0
            assert torch.equal(actual, expected) and mask.made.cache_info().misses == 1
    assert (found, rest) == (windows, others)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_kernel_that_goes_by_the_pattern_never_needs_the_mask(family, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_model(family, num_hidden_layers=4).to(device)
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    documents = [row(30) for _ in range(2)]
    store.add(documents, progress=False)
    segments = [PREFIX, *documents, row(6)]
    for settings in (dict(recompute_ratio=0.3), dict(recompute_ratio=1), dict(selector="hkvd")):
        with use_implementation("reference"):
            expected = BlendedCache.blend(model, store, segments, **settings)
        with use_implementation("triton"), monkeypatch.context() as patch:
            patch.setattr(MaskRecipe, "_rows", lambda *_: pytest.fail("a mask was made"))
            actual = BlendedCache.blend(model, store, segments, **settings)
        same_kv(actual, expected, 1e-4)
        assert actual.report().selected == expected.report().selected
