"""Keys and values in files: what is resident, what is left behind, what a full disk does."""

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
from test_anchor_cache_exact import SMALL
from test_anchor_cache_rows import step
from test_memory_tiers import caches

from anchor_cache import AnchorDynamicCache, mapped_states


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
    cache = cache_of(16384, 512)
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
