"""How much a store keeps: files up to a size, and chunks in memory in front of them."""

import gc
import json
import os
import tracemalloc

import pytest
import torch
from families import random_ids, tiny_model

from anchor_cache import ChunkStore
from anchor_cache.chunk import Chunk
from anchor_cache.chunk_folder import ChunkFolder


def row(n):
    return random_ids(n).tolist()


def filled(tmp_path, chunks, **arguments):
    """A store with chunks of one size, the first one used least recently."""
    store = ChunkStore(tmp_path, tiny_model(), **arguments)
    keys = store.add([row(40) for _ in range(chunks)], progress=False)
    for age, key in enumerate(keys):
        os.utime(tmp_path / f"{key.digest}.safetensors", (1000 + age, 1000 + age))
    return store, keys


def test_the_least_recently_used_files_make_room(tmp_path):
    store, keys = filled(tmp_path, 4)
    size = store.nbytes // 4
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    limited = ChunkStore(tmp_path, store.model, max_bytes=4 * size + 10)
    reader, _ = limited.open(keys[1])  # open files stay
    limited.get(keys[0])  # used last
    (new,) = limited.add([row(40)], progress=False)
    assert set(limited.keys()) == {keys[0], keys[1], keys[3], new}
    assert limited.stats().evictions == 1
    limited.add([row(40)], progress=False)
    assert keys[3] not in limited and keys[1] in limited
    reader.close()
    os.utime(tmp_path / f"{keys[1].digest}.safetensors", (5, 5))
    limited.add([row(40)], progress=False)
    assert keys[1] not in limited and keys[0] in limited and new in limited
    assert limited.nbytes <= 4 * size + 10 and (tmp_path / "model.safetensors").exists()


def test_a_folder_with_much_room_is_seldom_listed(tmp_path, monkeypatch):
    store, _ = filled(tmp_path, 1)
    size, listings, files = store.nbytes, [], ChunkFolder.files
    two = [ChunkStore(tmp_path, store.model, max_bytes=60 * size + 100) for _ in range(2)]
    monkeypatch.setattr(ChunkFolder, "files", lambda self: listings.append(1) or files(self))
    for _ in range(40):
        for limited in two:
            limited.add([row(40)], progress=False)
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 60 * size + 100
        if len(listings) < 25:
            early = sum(1 for _ in tmp_path.iterdir())
    assert early > 50


def test_a_chunk_that_no_one_closed_is_let_go(tmp_path):
    store, keys = filled(tmp_path, 2)
    limited = ChunkStore(tmp_path, store.model, max_bytes=2 * (store.nbytes // 2) + 10)
    reader, _ = limited.open(keys[0])
    os.utime(tmp_path / f"{keys[0].digest}.safetensors", (5, 5))
    del reader
    gc.collect()
    limited.add([row(40)], progress=False)
    assert keys[0] not in limited


def test_a_chunk_larger_than_the_limit_is_refused_beforehand(tmp_path):
    store, keys = filled(tmp_path, 2)
    limited = ChunkStore(tmp_path, store.model, max_bytes=store.nbytes)
    with pytest.raises(ValueError, match=r"does not fit into max_bytes=[\d,]+: raise max_bytes"):
        limited.add([row(400)], progress=False)
    assert set(store.keys()) == set(keys)


@pytest.mark.parametrize("act", ["clear", "add"])
def test_abandoned_partial_files_go_and_fresh_ones_stay(tmp_path, act):
    store, keys = filled(tmp_path, 1)
    old, fresh = (tmp_path / f"{keys[0].digest}.{c * 32}.partial" for c in "ab")
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (5, 5))
    if act == "clear":
        store.clear()
        assert list(tmp_path.iterdir()) == [fresh]
    else:  # no one need ever clear a store
        ChunkStore(tmp_path, store.model).add([row(4)], progress=False)
        assert not old.exists() and fresh.exists() and len(store) == 2


def test_a_chunk_used_again_comes_from_memory(tmp_path):
    store, (key, other) = filled(tmp_path, 2)
    first, _ = store.get(key)
    read = store.stats().bytes_read
    path = tmp_path / f"{key.digest}.safetensors"
    path.write_bytes(b"junk")
    again, _ = store.get(key)
    assert store.stats().bytes_read == read and store.stats().memory_hits == 1
    first.keys[0].zero_()  # a chunk's tensors are its own
    assert torch.equal(store.get(key)[0].keys[0], again.keys[0])
    store.delete(key)
    assert store.get(key) == (None, "chunk not in the store")
    store.get(other)
    store.clear()
    assert store.get(other) == (None, "chunk not in the store")


@pytest.mark.parametrize("chunks", [0, 1, 2.5])
def test_memory_stays_within_its_size(tmp_path, chunks):
    store, keys = filled(tmp_path, 4)
    size = 4 * 2 * 2 * 40 * 12 * 4 + 10_000  # and what the file says, unpacked
    store = ChunkStore(tmp_path, store.model, memory_bytes=int(chunks * size))
    for _ in range(2):
        for key in keys:
            store.get(key)
            assert store._memory.nbytes <= chunks * size
    store.get(keys[-1])
    assert store.stats().memory_hits == (1 if chunks else 0)


def test_what_files_say_counts_as_memory(tmp_path):
    """Chunks that are opened and not read, with long prefixes: little but headers."""
    store = ChunkStore(tmp_path, tiny_model(), prefix=row(2000))
    keys = store.add([row(3) for _ in range(40)], progress=False)
    store = ChunkStore(tmp_path, store.model, memory_bytes=500_000)
    gc.collect()
    tracemalloc.start()
    for key in keys:
        store.open(key)[0].close()
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1_000_000 and 0 < store._memory.nbytes <= 500_000


def test_layers_read_before_are_not_read_again(tmp_path):
    store, (key,) = filled(tmp_path, 1)
    with store.open(key)[0] as reader:
        expected = reader.layer(1)
    read = store.stats().bytes_read
    with store.open(key)[0] as reader:
        assert torch.equal(reader.layer(1)[0], expected[0]) and store.stats().bytes_read == read
        reader.layer(0)
    assert store.stats().bytes_read == 2 * read and store.stats().memory_hits == 0
    with pytest.raises(ValueError, match="the chunk was closed"):
        reader.layer(0)


def test_chunks_put_again_replace_what_memory_held(tmp_path):
    store, (key,) = filled(tmp_path, 1)
    old, _ = store.get(key)
    store.put(Chunk(key, [k + 1 for k in old.keys], old.values, old.rotary))
    assert torch.equal(store.get(key)[0].keys[0], old.keys[0] + 1)


def test_statistics_are_json(tmp_path):
    store, (key,) = filled(tmp_path, 1)
    store.open(key)[0].close()
    store.open(store.key([3, 4]))
    stats = json.loads(json.dumps(store.stats().to_dict()))
    assert (stats["hits"], stats["misses"], stats["chunks"]) == (1, 1, 1)
    assert stats["bytes"] == store.nbytes
