"""The bytes of a chunk file: self-describing, read by layers, believed only when verified."""

import random
from pathlib import Path

import pytest
import torch
from families import random_ids, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file
from second_device import DEVICE, second_device

from anchor_cache import ChunkStore
from anchor_cache.chunk import Chunk, DamagedChunk
from anchor_cache.chunk_files import chunk_file, decode, read_header, verify

# Chunks of odd sizes: nothing in a file is aligned to more than its own elements.
SIZES = [(1, 1, 1, 3), (1, 2, 7, 5), (1, 3, 65, 64)]
DTYPES = ["model", "int8", "bfloat16", "float16"]


def some_chunk(store, shape, dtype, layers=4, scale=1.0):
    ids = random_ids(shape[2]).tolist()
    key = store.key(ids, (5, 6))
    key = type(key)(key.model, key.prefix, key.ids, dtype)
    states = [scale * torch.randn(shape) for _ in range(2 * layers)]
    return Chunk(key, states[:layers], states[layers:], "some rotary")


@pytest.fixture
def store(tmp_path):
    return ChunkStore(tmp_path, tiny_model(), memory_bytes=0)


def file_of(store, key):
    return Path(store.url) / f"{key.digest}.safetensors"


def reader_of(data: bytes, ranges: list):
    def read(start, size):
        ranges.append((start, size))
        return torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8)

    return read, len(data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_a_layer_is_one_range_and_comes_back(store, shape, dtype):
    chunk = some_chunk(store, shape, dtype)
    data = b"".join(chunk_file(chunk))
    ranges = []
    read, size = reader_of(data, ranges)
    header = read_header(read, size)
    assert header.key == chunk.key and header.rotary == chunk.rotary and len(ranges) == 1
    ends = [(layer.start, layer.end) for layer in header.layers]
    assert [start for start, _ in ends[1:]] == [end for _, end in ends[:-1]]
    assert ends[-1][1] == size
    for i, layer in enumerate(header.layers):
        raw = read(layer.start, layer.end - layer.start)
        verify(header, i, raw)
        for back, states in zip(
            decode(header, i, raw, "cpu"), (chunk.keys[i], chunk.values[i]), strict=True
        ):
            assert back.dtype == states.dtype and back.shape == states.shape
            if dtype == "int8":
                step = states.abs().amax(-1, keepdim=True) / 127
                assert ((back - states).abs() <= 0.5001 * step).all()
            else:
                stored_as = states.dtype if dtype == "model" else getattr(torch, dtype)
                assert torch.equal(back, states.to(stored_as).to(states.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_safetensors_reader_opens_the_file(store, tmp_path, dtype):
    chunk = some_chunk(store, (1, 2, 7, 5), dtype)
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"".join(chunk_file(chunk)))
    tensors = load_file(path)
    assert tensors["token_ids"].tolist() == list(chunk.key.ids)
    assert tensors["prefix_ids"].tolist() == [5, 6]
    expected = torch.int8 if dtype == "int8" else chunk.keys[0].dtype
    if dtype.endswith("16"):
        expected = getattr(torch, dtype)
    assert tensors["layer.0003.values"].dtype == expected
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert about["format"] == "anchor_cache chunk 2" and about["keys"] == "before RoPE"
    assert about["model"] == chunk.key.model and about["layers"] == "4"


def test_headers_longer_than_the_first_read(store):
    chunk = some_chunk(store, (1, 1, 9000, 1), "model")
    ranges = []
    read, size = reader_of(b"".join(chunk_file(chunk)), ranges)
    assert read_header(read, size).key == chunk.key
    assert len(ranges) > 1 and max(start + size for start, size in ranges) < size


@pytest.mark.parametrize("dtype", ["model", "int8"])
def test_no_flipped_bit_gives_other_numbers(store, dtype):
    """Whatever byte of a file is damaged, what is read is what was written, or a miss."""
    chunk = some_chunk(store, (1, 2, 7, 5), dtype)
    store.put(chunk)
    path, missed = file_of(store, chunk.key), 0
    data = path.read_bytes()
    whole, _ = store.get(chunk.key)
    chosen = random.Random(0)
    for place in chosen.sample(range(len(data)), 400):
        damaged = bytearray(data)
        damaged[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        read, reason = store.get(chunk.key)
        if read is None:
            missed += reason == "chunk file is damaged"
        else:
            assert read.rotary == whole.rotary
            for a, b in zip(read.keys + read.values, whole.keys + whole.values, strict=True):
                assert torch.equal(a, b)
    assert missed > 300


@pytest.mark.parametrize("shape", [(1, 2, 600, 12), (1, 3, 65, 64)])
def test_pages_zeroed_or_exchanged_are_damage(store, shape):
    chunk = some_chunk(store, shape, "model")
    store.put(chunk)
    path = file_of(store, chunk.key)
    data = path.read_bytes()
    last = len(data) // 4096 - 2
    zeroed = data[: last * 4096] + bytes(4096) + data[(last + 1) * 4096 :]
    first, second, third = ((last + i) * 4096 for i in (-1, 0, 1))
    exchanged = data[:first] + data[second:third] + data[first:second] + data[third:]
    for damaged in (zeroed, exchanged):
        path.write_bytes(damaged)
        reader, _ = store.open(chunk.key)
        with reader, pytest.raises(DamagedChunk, match="chunk file is damaged"):
            for i in range(4):
                reader.layer(i)
        assert store.get(chunk.key) == (None, "chunk file is damaged")
        assert chunk.key not in store  # so that adding it writes it again
    store.put(chunk)
    assert chunk.key in store and store.get(chunk.key)[1] is None


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_file_that_is_cut_is_a_miss_when_it_is_opened(store, cut):
    chunk = some_chunk(store, (1, 2, 7, 5), "model")
    store.put(chunk)
    path = file_of(store, chunk.key)
    path.write_bytes(path.read_bytes()[:cut])
    assert store.open(chunk.key) == (None, "chunk file is damaged") and chunk.key not in store


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 0.0])
def test_int8_is_off_by_half_a_step_at_any_scale(store, scale):
    chunk = some_chunk(store, (1, 2, 7, 5), "int8", scale=scale)
    store.put(chunk)
    read, _ = store.get(chunk.key)
    for states, back in zip(chunk.keys + chunk.values, read.keys + read.values, strict=True):
        step = states.abs().amax(-1, keepdim=True) / 127
        assert ((back - states).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize(
    ("dtype", "bad", "remedy"),
    [
        ("float16", 1e6, r"dtype='float16' cannot hold these keys, which reach 1e\+06.*bfloat16"),
        ("int8", float("inf"), "dtype='int8' cannot hold these keys, which reach inf.*dtype=None"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(store, dtype, bad, remedy):
    chunk = some_chunk(store, (1, 2, 7, 5), dtype)
    chunk.keys[2][0, 1, 3, 2] = bad
    with pytest.raises(ValueError, match=remedy):
        store.put(chunk)
    assert len(store) == 0


def test_the_error_of_8_bits_on_a_real_layer(small_model, tmp_path):
    """Half a step for every number; a few per cent of the layer's norm."""
    model, _ = small_model
    exact, rounded = (ChunkStore(tmp_path, model, dtype=dtype) for dtype in (None, "int8"))
    ids = random_ids(64, high=40_000).tolist()
    for store in (exact, rounded):
        store.add([ids], progress=False)
    (a, _), (b, _) = (store.get(store.key(ids)) for store in (exact, rounded))
    assert exact.nbytes == rounded.nbytes and len(exact) == 2
    for true, back in zip(a.keys + a.values, b.keys + b.values, strict=True):
        assert ((back - true).abs() <= 0.5001 * true.abs().amax(-1, keepdim=True) / 127).all()
        assert 0 < (back - true).norm() / true.norm() < 0.02


def test_bits_are_never_read_as_another_dtype(tmp_path):
    store = ChunkStore(tmp_path, tiny_model().to(torch.bfloat16), memory_bytes=0)
    (key,) = store.add([random_ids(9).tolist()], progress=False)
    assert store.get(key)[0].keys[0].dtype == torch.bfloat16
    path = file_of(store, key)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"BF16"', b'"F16" '))
    assert path.stat().st_size == len(data) and key in store
    assert store.get(key) == (None, "chunk file is damaged")


@pytest.mark.parametrize("dtype", ["model", "int8"])
def test_a_layer_goes_to_the_device_as_it_is_stored(store, dtype):
    """In one copy, before it is made wider."""
    chunk = some_chunk(store, (1, 2, 7, 6), dtype)
    read, size = reader_of(b"".join(chunk_file(chunk)), [])
    header = read_header(read, size)
    layer = header.layers[1]
    raw = read(layer.start, layer.end - layer.start)
    expected = decode(header, 1, raw, "cpu")
    with second_device(tiny_model()) as (_, copies):
        states = decode(header, 1, raw, DEVICE)
        assert copies.to_device == [(layer.end - layer.start,)] and not copies.to_host
        for there, here in zip(states, expected, strict=True):
            assert there.device == DEVICE and torch.equal(there.cpu(), here)
