"""Wherever keys and values are kept, the same comes out, and the memory is what was promised.

There is no accelerator here: for ``offload="cpu"`` the CPU is told to be one, and every copy to it
is counted where it is made.
"""

import copy
import pickle

import pytest
import torch
from families import random_ids, tiny_model
from test_anchor_cache_exact import SMALL, generate
from test_anchor_cache_rows import left_padded, step
from transformers import DeepseekV3Config, DynamicCache

from anchor_cache import AnchorDynamicCache, host_states
from anchor_cache.block_storage import GrowingStates
from anchor_cache.host_states import HostStates
from anchor_cache.mapped_states import MappedStates

TIERS = ["cpu", "disk"]


@pytest.fixture
def copied(monkeypatch):
    """Let the CPU be an accelerator; the shapes of what was copied to it."""
    shapes = []

    def to_device(states, device):
        shapes.append(tuple(states.shape))
        return states.clone()

    monkeypatch.setattr(host_states, "is_accelerator", lambda device: True)
    monkeypatch.setattr(host_states, "to_device", to_device)
    return shapes


def caches(model, **settings):
    """One without offload, and one in each tier."""
    settings = {**SMALL, "budget": 56, **settings}
    return [AnchorDynamicCache(model.config, offload=o, **settings) for o in (None, *TIERS)]


def states_of(cache):
    return [s for layer in cache.anchor_layers.values() for s in (layer._keys, layer._values)]


# -- whole caches ----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "gpt_oss"])
@pytest.mark.parametrize("settings", [dict(), dict(builder="tangent"), dict(dense_below=155)])
def test_generation_is_that_without_offload(family, settings, implementation, copied):
    if family == "gpt_oss" and implementation == "sdpa":
        pytest.skip("upstream has no sdpa attention with sinks")
    model = tiny_model(family, attn_implementation=implementation)
    ids, mask = left_padded([random_ids(150), random_ids(133)])
    without, *tiers = caches(model, **settings)
    expected = generate(model, ids, without, attention_mask=mask)
    for cache in tiers:
        actual = generate(model, ids, cache, attention_mask=mask)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        assert cache.report().sparse_steps == without.report().sparse_steps > 0
        assert cache.report().dense_steps == without.report().dense_steps


def reset_and_fill(cache, model):
    cache.reset()
    model(random_ids(2, 120), past_key_values=cache)
    return cache


def offloaded_and_back(cache, model):
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    return cache


def saved_and_loaded(cache, model, folder):
    cache.save_pretrained(folder)
    return AnchorDynamicCache.from_pretrained(folder)


def changed(method, *args):
    def change(cache, model):
        getattr(cache, method)(*args)
        return cache

    return change


CHANGES = {
    "deepcopy": lambda cache, model: copy.deepcopy(cache),
    "pickle": lambda cache, model: pickle.loads(pickle.dumps(cache)),
    "reorder": changed("reorder_cache", torch.tensor([1, 0])),
    "repeat": changed("batch_repeat_interleave", 2),
    "select": changed("batch_select_indices", torch.tensor([1])),
    "crop": changed("crop", -37),
    "crop all": changed("crop", -154),
    "reset": reset_and_fill,
    "offload and prefetch": offloaded_and_back,
    "from_cache": lambda cache, model: AnchorDynamicCache.from_cache(cache, cache.anchor_config),
}


@pytest.mark.parametrize("change", [*CHANGES, "save"])
def test_whatever_is_done_to_a_cache(change, copied, tmp_path):
    model, ids = tiny_model(), random_ids(2, 150)
    before, tokens = random_ids(4, 2, 1), random_ids(30, 2, 1)
    results = []
    for cache in caches(model):
        torch.manual_seed(1)
        model(ids, past_key_values=cache)
        for token in before:
            step(model, cache, token)
        if change == "save":
            cache = saved_and_loaded(cache, model, tmp_path)
        else:
            cache = CHANGES[change](cache, model)
        rows = {"repeat": torch.tensor([0, 0, 1, 1]), "select": [1]}.get(change, slice(None))
        results.append(torch.stack([step(model, cache, token, rows) for token in tokens]))
        kinds = {None: GrowingStates, "cpu": HostStates, "disk": MappedStates}
        assert {type(s) for s in states_of(cache)} == {kinds[cache.anchor_config.offload]}
    for actual in results[1:]:
        torch.testing.assert_close(actual, results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("clone", ["deepcopy", "pickle"])
@pytest.mark.parametrize("offload", TIERS)
def test_copies_share_nothing(offload, clone, copied):
    model, ids = tiny_model(), random_ids(1, 140)
    cache = AnchorDynamicCache(budget=56, offload=offload, **SMALL)
    model(ids, past_key_values=cache)
    step(model, cache, random_ids(1, 1))
    other, token = CHANGES[clone](cache, model), random_ids(1, 1)
    expected = step(model, cache, token)
    for _ in range(3):
        step(model, cache, random_ids(1, 1))
    torch.testing.assert_close(step(model, other, token), expected)
    assert other.get_seq_length() == cache.get_seq_length() - 3


@pytest.mark.parametrize("offload", TIERS)
def test_beams_prompt_lookup_and_bfloat16(offload, copied):
    model, ids = tiny_model().to(torch.bfloat16), random_ids(1, 120)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    for extra in (dict(num_beams=3), dict(prompt_lookup_num_tokens=3)):
        expected, actual = (
            model.generate(
                ids,
                past_key_values=AnchorDynamicCache(budget=56, offload=where, **SMALL),
                **extra,
                **options,
            )
            for where in (None, offload)
        )
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("offload", TIERS)
def test_gradients_are_refused(offload, copied):
    cache = AnchorDynamicCache(offload=offload)
    with (
        torch.enable_grad(),
        pytest.raises(RuntimeError, match="keeps no gradients: .*torch.no_grad"),
    ):
        tiny_model()(random_ids(1, 5), past_key_values=cache)


# -- the host tier ---------------------------------------------------------------------------


def test_a_sparse_step_copies_only_selected_blocks_that_are_not_there(copied):
    model, ids = tiny_model(num_hidden_layers=2), random_ids(1, 400)
    cache = AnchorDynamicCache(model.config, budget=56, offload="cpu", **SMALL)
    model(ids, past_key_values=cache)
    assert set(copied) == {(1, 2, 400, 12)}  # keys and values of a dense step
    step(model, cache, random_ids(1, 1))  # builds the index: keys, and what it selects
    copied.clear()
    for length in range(402, 440):
        logits = step(model, cache, random_ids(1, 1))
        assert torch.isfinite(logits).all() and cache.get_seq_length() == length
        # Pieces of 2 tokens; 28 of them hold the budget, in each of 2 heads.
        assert all(shape[1:] == (2, 12) and shape[0] <= 28 * 2 for shape in copied)
    assert 0 < sum(shape[0] for shape in copied) < 38 * 2 * 2 * 2 * 12  # sinks, window: not copied
    report = cache.report()
    assert report.sparse_steps == 39
    assert sum(s.device_bytes for s in states_of(cache)) < report.kv_bytes / 3
    assert "MiB of keys and values on the host" in str(report)


def test_blocks_that_were_read_lately_are_not_copied_again(copied):
    states = HostStates(4)
    states.append(torch.randn(1, 2, 200, 3))
    first = torch.arange(0, 40).expand(1, 2, -1)
    states.gather(first)
    copied.clear()
    states.gather(first)
    states.gather(first[:, :, :9] + 15)
    assert not copied
    states.gather(torch.stack((first[0, 0], first[0, 1] + 100))[None])
    assert copied == [(10, 4, 3)]  # one head's ten blocks, and not the other's


def test_dense_steps_get_everything_and_audits_too(copied):
    model, ids = tiny_model(num_hidden_layers=2), random_ids(1, 150)
    without, cache, _ = caches(model, audit_every=1)
    for c in (without, cache):
        generate(model, ids, c)
    masses = [c.report().coverage for c in (without, cache)]
    assert masses[0] == pytest.approx(masses[1], abs=1e-6)
    dense = AnchorDynamicCache(model.config, offload="cpu")  # within the default budget
    expected = generate(model, ids, DynamicCache())
    torch.testing.assert_close(generate(model, ids, dense), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_config", [True, False])
def test_layers_that_share_keys_never_see_stand_ins(with_config, copied):
    model = tiny_model("gemma3n")
    ids, tokens = random_ids(1, 150), random_ids(5, 1, 1)
    config = model.config if with_config else None
    results = []
    for offload in (None, "cpu"):
        cache = AnchorDynamicCache(config, budget=56, offload=offload, **SMALL)
        model(ids, past_key_values=cache)
        results.append(torch.stack([step(model, cache, token) for token in tokens]))
        assert cache.report().sparse_steps == 5
    assert cache.report().reasons["the layer reads the cache of another layer"] >= 5
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


def test_a_model_on_the_cpu_has_nothing_to_offload():
    model, ids = tiny_model(), random_ids(1, 150)
    without, cache, _ = caches(model)
    torch.testing.assert_close(generate(model, ids, cache), generate(model, ids, without))
    assert "has nothing to offload: the model is on the CPU" in str(cache.report())
    assert cache.report().memory == cache.report().to_dict()["memory"] != without.report().memory


def test_multi_head_latent_attention_is_refused():
    with pytest.raises(NotImplementedError, match="kv_lora_rank"):
        AnchorDynamicCache(DeepseekV3Config(), offload="cpu")
    AnchorDynamicCache(DeepseekV3Config(), offload="disk")
