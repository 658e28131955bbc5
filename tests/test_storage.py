"""Storage of states, of every kind, by itself."""

import copy
import gc
import pickle

import pytest
import torch
from families import random_ids, tiny_model
from test_anchor_cache_rows import step
from test_memory_tiers import states_of

from anchor_cache import AnchorDynamicCache, host_states, mapped_states
from anchor_cache.block_storage import GrowingStates
from anchor_cache.host_states import HostStates
from anchor_cache.mapped_states import MappedStates
from anchor_cache.residency import Residency


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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [GrowingStates, lambda: HostStates(8), MappedStates])
def test_any_order_of_operations(make, dtype, seed, monkeypatch):
    """Against a plain concatenated tensor."""
    monkeypatch.setattr(host_states, "is_accelerator", lambda device: True)
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
    parts = [s for i in indices for s in (*i._per_anchor, *i._per_block)]
    allocated = sum(s.device_bytes for s in (*states_of(cache), *parts))
    assert report.kv_bytes == 2 * 2 * report.tokens_seen * 2 * 64 * 4
    assert allocated <= 1.1 * (report.kv_bytes + report.index_bytes)
    storages = {t.untyped_storage().data_ptr() for t in gc.get_objects() if is_large(t)}
    assert storages <= {s._buffer.untyped_storage().data_ptr() for s in states_of(cache)}


def is_large(candidate):
    return type(candidate) is torch.Tensor and candidate.untyped_storage().nbytes() > 2**23
