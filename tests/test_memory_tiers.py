"""Wherever keys and values are kept, the same comes out, and the memory is what was promised.

There is no accelerator here: for ``offload="cpu"`` the CPU is told to be one, and every copy to it
is counted where it is made.
"""

import copy
import errno
import gc
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import random_ids, tiny_model
from test_anchor_cache_exact import SMALL, generate
from test_anchor_cache_rows import left_padded, step
from transformers import DeepseekV3Config, DynamicCache

from anchor_cache import AnchorDynamicCache, host_states, mapped_states
from anchor_cache.block_storage import GrowingStates
from anchor_cache.host_states import HostStates
from anchor_cache.mapped_states import MappedStates
from anchor_cache.residency import Residency

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
        # Blocks of 8 tokens; 7 of them hold the budget, in each of 2 heads.
        assert all(shape[1:] == (8, 12) and shape[0] <= 7 * 2 for shape in copied)
    assert 0 < sum(shape[0] for shape in copied) < 38 * 2 * 2 * 2 * 3  # sinks, window: not copied
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


def test_residency_is_least_recently_used():
    """Against the step in which each page was last used, per head."""
    residency, pages = Residency(2, 3), 30
    last = [dict() for _ in range(6)]
    for clock in range(60):
        asked = torch.randint(0, pages, (2, 3, 5))
        slots, (head, page, _) = residency.bring(asked, 2)
        there = residency.slots_of(torch.arange(pages).expand(2, 3, -1)).flatten(0, 1) >= 0
        for i, used in enumerate(last):
            now = set(asked.flatten(0, 1)[i].tolist())
            assert sorted(page[head == i].tolist()) == sorted(now - used.keys())
            held = set(there[i].nonzero().flatten().tolist())
            gone = [used[p] for p in used.keys() - held]
            assert now <= held <= now | used.keys()
            assert len(held) == min(len(now | used.keys()), residency.slots)
            assert max(gone, default=-1) <= min((used[p] for p in held - now), default=clock)
            last[i] = {p: clock if p in now else used[p] for p in held}
        same = asked.unsqueeze(-1) == asked.unsqueeze(-2)
        assert torch.equal(slots.unsqueeze(-1) == slots.unsqueeze(-2), same)
    assert residency.slots == 10


# -- the disk tier ---------------------------------------------------------------------------


def mapped_files(folder):
    """Mappings of files in a folder, which have lost their names."""
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_files_vanish_with_the_cache(tmp_path):
    model, ids, folder = tiny_model(), random_ids(2, 150), tmp_path / "kv"
    cache = AnchorDynamicCache(budget=56, offload="disk", offload_dir=folder, **SMALL)
    model(ids, past_key_values=cache)
    assert mapped_files(folder) == 8 and list(folder.iterdir()) == []
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    assert mapped_files(folder) == 24
    del copies
    gc.collect()
    cache.reorder_cache(torch.tensor([1, 1]))
    assert mapped_files(folder) == 8
    keys = cache.layers[0].keys
    cache.reset()
    gc.collect()
    assert mapped_files(folder) == 1 and torch.isfinite(keys).all()  # a view keeps its own file
    del keys, cache
    gc.collect()
    assert mapped_files(folder) == 0


def test_a_full_disk_is_an_error_that_leaves_the_cache_whole(monkeypatch):
    model, ids = tiny_model(), random_ids(1, 150)
    without, _, cache = caches(model)
    for c in (without, cache):
        model(ids, past_key_values=c)
    pwrite, calls = mapped_states.os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) == 3:  # the first layer's values, of two heads
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    monkeypatch.setattr(mapped_states.os, "pwrite", full)
    token = random_ids(1, 1)
    with pytest.raises(OSError, match="No space left on device, .*offload_dir"):
        step(model, cache, token)
    torch.testing.assert_close(step(model, cache, token), step(model, without, token))


MEASURE = """
import json, sys, torch
from transformers import LlamaConfig, AutoModelForCausalLM
from anchor_cache import AnchorDynamicCache

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=16,
    num_attention_heads=4, num_key_value_heads=4, head_dim=64, max_position_embeddings=16384,
)
with torch.no_grad():
    model = AutoModelForCausalLM.from_config(config).eval()
    def cache_of(tokens, step):
        generator = torch.Generator().manual_seed(1)
        cache = AnchorDynamicCache(config, **json.loads(sys.argv[1]))
        for _ in range(0, tokens, step):
            for layer in range(16):
                keys, values = torch.randn(2, 1, 4, step, 64, generator=generator)
                cache.update(keys, values, layer)
        return cache
    def decode(cache, steps):
        return [model(torch.tensor([[7]]), past_key_values=cache).logits[0, 0, :8].tolist()
                for _ in range(steps)]
    decode(cache_of(512, 512), 2)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    cache = cache_of(10240, 512)
    logits = decode(cache, 6)
    report = cache.report()
    peak = status("VmHWM") - before
    if len(sys.argv) > 2:
        cache.save_pretrained(sys.argv[2])
        loaded = AnchorDynamicCache.from_pretrained(sys.argv[2])
        assert decode(loaded, 1) == decode(cache, 1)
    print(json.dumps(dict(
        peak=peak, peak_with_files=status("VmHWM") - before, kv=report.kv_bytes, logits=logits,
        index=report.index_bytes, sparse=report.sparse_steps, dense=report.dense_steps)))
"""


def measured(*extra, **settings):
    settings = dict(budget=512, dense_below=0, **settings)
    command = [sys.executable, "-c", MEASURE, json.dumps(settings), *map(str, extra)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_of_a_long_context(tmp_path):
    without = measured()
    disk = measured(tmp_path / "warm", offload="disk", offload_dir=str(tmp_path))
    assert without["kv"] == disk["kv"] > 300 * 2**20 and disk["sparse"] == 6
    assert without["peak"] > without["kv"]
    assert disk["peak"] < 0.25 * disk["kv"]
    assert disk["peak_with_files"] < 0.5 * disk["kv"]  # saving and loading go layer by layer
    torch.testing.assert_close(
        torch.tensor(disk["logits"]), torch.tensor(without["logits"]), atol=1e-5, rtol=1e-5
    )
    dense = measured(offload="disk", offload_dir=str(tmp_path), dense_above=0.01)
    assert dense["dense"] == 6 and dense["peak"] < 0.25 * dense["kv"]


# -- storage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [GrowingStates, lambda: HostStates(8), MappedStates])
def test_any_order_of_operations(make, dtype, seed, copied, monkeypatch):
    """Against a plain concatenated tensor."""
    monkeypatch.setattr(mapped_states, "_SMALLEST_ROOM", 16)
    monkeypatch.setattr(mapped_states, "_BYTES_AT_ONCE", 1000)
    torch.manual_seed(seed)
    states, plain = make(), torch.zeros(2, 3, 0, 5, dtype=dtype)
    for _ in range(150):
        batch, length = plain.shape[0], plain.shape[2]
        kind = int(torch.randint(0, 9, ()))
        if kind <= 2 or length < 3:
            count = [1, 1, 5, 40][int(torch.randint(0, 4, ()))]
            new = torch.randn(batch, 3, count, 5).to(dtype)
            states.append(new)
            plain = torch.cat((plain, new), 2)
        elif kind == 3:
            keep = length - int(torch.randint(0, min(length, 30), ()))
            states.truncate(keep)
            plain = plain[:, :, :keep]
        elif kind == 4:
            rows = torch.randint(0, batch, (int(torch.randint(1, 4, ())),))
            states.map_(lambda s, rows=rows: s.index_select(0, rows))
            plain = plain[rows]
        elif kind == 5:
            states = copy.deepcopy(states) if seed % 2 else pickle.loads(pickle.dumps(states))
        elif kind == 6:
            first, last = sorted(torch.randint(0, length, (2,)).tolist())
            last += 1
            assert torch.equal(states.span(first, last), plain[:, :, first:last])
        index = torch.randint(0, plain.shape[2], (plain.shape[0], 3, 11))
        expected = plain.gather(2, index[..., None].expand(-1, -1, -1, 5))
        assert torch.equal(states.gather(index), expected)
        assert states.shape == plain.shape and states.nbytes == plain.numel() * plain.itemsize
    assert torch.equal(states.states, plain) and torch.equal(states.stored, plain)


def test_memory_at_32k_tokens_is_that_of_the_states_and_the_index():
    """What is allocated, with the room to grow, and no second copy of what was appended."""
    cache, pieces = AnchorDynamicCache(budget=2048), 32
    for _ in range(pieces):
        for layer in range(2):
            cache.update(*torch.randn(2, 1, 2, 1024, 64), layer)
    model = tiny_model(
        num_hidden_layers=2, hidden_size=256, head_dim=64, max_position_embeddings=40000
    )
    for _ in range(40):
        step(model, cache, random_ids(1, 1))
    report = cache.report()
    assert report.sparse_steps == 40 and report.tokens_seen == 32 * 1024 + 40
    indices = [layer.index for layer in cache.layers]
    parts = [s for i in indices for s in (i._anchors, i._offsets, i._bits, i._scales)]
    allocated = sum(s.device_bytes for s in (*states_of(cache), *parts))
    assert report.kv_bytes == 2 * 2 * report.tokens_seen * 2 * 64 * 4
    assert allocated <= 1.1 * (report.kv_bytes + report.index_bytes)
    storages = {t.untyped_storage().data_ptr() for t in gc.get_objects() if is_large(t)}
    assert storages <= {s._buffer.untyped_storage().data_ptr() for s in states_of(cache)}


def is_large(candidate):
    return type(candidate) is torch.Tensor and candidate.untyped_storage().nbytes() > 2**23
