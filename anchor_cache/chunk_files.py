"""A chunk as the bytes of a safetensors file that says what it is.

The ids come first, then the layers, each in one piece, so that a layer is read alone and by one
range. Any safetensors reader can open the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from .chunk import FORMAT, Chunk, ChunkKey, DamagedChunk
from .chunk_precision import pack, unpack

DAMAGED = "chunk file is damaged"
_FIRST_READ = 1 << 16  # holds the header and the ids of all but very long chunks
_ROW = 1024  # words of 8 bytes
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I8": torch.int8,
}
_UNREADABLE = (
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class StoredTensor(NamedTuple):
    """Where a tensor lies in a file: bytes ``start`` to ``end``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class StoredLayer:
    """Where a layer lies in a file, and what its bytes add up to."""

    tensors: dict[str, StoredTensor]
    start: int
    end: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class ChunkHeader:
    """What a chunk file says about itself. ``dtype`` is what lossy layers are read as."""

    key: ChunkKey
    rotary: str
    dtype: torch.dtype | None
    layers: list[StoredLayer]


def chunk_file(chunk: Chunk) -> list[memoryview | bytes]:
    """The pieces of a chunk's file, in order; views of its tensors where they are on the host.

    Raises:
        ValueError: the chunk does not fit into its key's dtype.
    """
    from . import __version__

    entries, pieces, checksums, place = {}, [], [], 0

    def append(name: str, tensor: torch.Tensor) -> np.ndarray:
        nonlocal place
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + len(raw)],
        }
        pieces.append(memoryview(raw))
        place += len(raw)
        return raw

    append("token_ids", torch.tensor(chunk.key.ids, dtype=torch.long))
    append("prefix_ids", torch.tensor(chunk.key.prefix, dtype=torch.long))
    dtypes = {states.dtype for states in (*chunk.keys, *chunk.values)}
    if chunk.key.is_lossy and len(dtypes) > 1:
        raise ValueError(
            f"dtype={chunk.key.dtype!r} needs layers of one dtype, and this model's have "
            f"{sorted(map(str, dtypes))}: make the store with dtype=None"
        )
    dtype = dtypes.pop() if chunk.key.is_lossy else None
    for i, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        packed = pack(keys, chunk.key.dtype, "keys") | pack(values, chunk.key.dtype, "values")
        in_order = sorted(packed.items(), key=lambda item: -item[1].element_size())
        raw = [append(f"layer.{i:04d}.{name}", tensor) for name, tensor in in_order]
        described = {name: (_NAMES[t.dtype], tuple(t.shape)) for name, t in in_order}
        checksums.append(_checksum((chunk.rotary, dtype, described), raw))
    entries["__metadata__"] = {
        "format": FORMAT,
        "anchor_cache": __version__,
        "model": chunk.key.model,
        "storage": chunk.key.dtype,
        "dtype": _NAMES.get(dtype, ""),
        "layers": str(len(chunk.keys)),
        "keys": "before RoPE",
        "rotary": chunk.rotary,
        "checksums": " ".join(checksums),
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little"), header, *pieces]


def read_header(read: Callable[[int, int], torch.Tensor], size: int) -> ChunkHeader:
    """What a file of ``size`` bytes says; ``read(start, size)`` gives bytes of it.

    Raises:
        DamagedChunk: it is no chunk file, one of another format, or incomplete.
    """
    try:
        return _read_header(read, size)
    except _UNREADABLE as error:
        raise DamagedChunk(DAMAGED) from error


def _read_header(read, size: int) -> ChunkHeader:
    head = read(0, min(size, _FIRST_READ)).numpy().tobytes()

    def upto(end: int) -> bytes:
        nonlocal head
        if end > size:
            raise EOFError
        if end > len(head):
            head += read(len(head), end - len(head)).numpy().tobytes()
        return head

    first = 8 + int.from_bytes(upto(8)[:8], "little")
    entries = json.loads(upto(first)[8:first])
    about = entries.pop("__metadata__", {})
    if first + max(entry["data_offsets"][1] for entry in entries.values()) != size:
        raise DamagedChunk(DAMAGED)
    if about.get("format") != FORMAT:
        raise DamagedChunk("chunk file has another format")
    tensors = {name: _stored_tensor(entry, first) for name, entry in entries.items()}
    ids = []
    for name in ("prefix_ids", "token_ids"):
        stored = tensors[name]
        raw = upto(stored.end)[stored.start : stored.end]
        ids.append(tuple(np.frombuffer(raw, dtype="<i8").tolist()))
    checksums = about["checksums"].split()
    if int(about["layers"]) != len(checksums):
        raise ValueError
    own = [{} for _ in checksums]
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].start):
        if name.startswith("layer."):
            _, i, part = name.split(".")
            own[int(i)][part] = stored
    layers = []
    for parts, checksum in zip(own, checksums, strict=True):
        if not {"keys", "values"} <= set(parts):
            raise KeyError
        end = max(stored.end for stored in parts.values())
        layers.append(StoredLayer(parts, next(iter(parts.values())).start, end, checksum))
    key = ChunkKey(about["model"], *ids, about["storage"])
    dtype = _DTYPES[about["dtype"]] if key.is_lossy else None
    return ChunkHeader(key, about["rotary"], dtype, layers)


def _stored_tensor(entry: dict, first: int) -> StoredTensor:
    start, end = (first + offset for offset in entry["data_offsets"])
    shape = tuple(entry["shape"])
    if not first <= start or end - start != math.prod(shape) * _DTYPES[entry["dtype"]].itemsize:
        raise ValueError
    return StoredTensor(entry["dtype"], shape, start, end)


def verify(header: ChunkHeader, i: int, raw: torch.Tensor) -> None:
    """Compare the bytes of layer ``i`` with its checksum.

    Raises:
        DamagedChunk: they are not what was written, or the header is not.
    """
    layer = header.layers[i]
    described = {name: (stored.dtype, stored.shape) for name, stored in layer.tensors.items()}
    pieces = [
        raw[stored.start - layer.start : stored.end - layer.start].numpy()
        for stored in layer.tensors.values()
    ]
    if _checksum((header.rotary, header.dtype, described), pieces) != layer.checksum:
        raise DamagedChunk(DAMAGED)


def decode(
    header: ChunkHeader, i: int, raw: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[1, H_kv, T, D]`` of layer ``i`` from its bytes.

    Raises:
        DamagedChunk: they have another shape.
    """
    layer, packed = header.layers[i], {}
    raw = raw.to(device)
    for name, stored in layer.tensors.items():
        piece = raw[stored.start - layer.start : stored.end - layer.start]
        kind = _DTYPES[stored.dtype]
        if piece.storage_offset() % kind.itemsize:
            piece = piece.clone()
        packed[name] = piece.view(kind).view(stored.shape)
    keys, values = (unpack(packed, n, header.dtype or packed[n].dtype) for n in ("keys", "values"))
    for states in (keys, values):
        if states.dim() != 4 or states.shape[0] != 1 or states.shape[2] != len(header.key.ids):
            raise DamagedChunk(DAMAGED)
    return keys, values


def _checksum(about: tuple, pieces: list[np.ndarray]) -> str:
    """A checksum of what is said about tensors and of their bytes.

    CRC-32 of sums over rows and over columns of 8-byte words: a changed byte, a zeroed page and a
    moved one show, at several times the speed of a CRC of the bytes themselves.
    """
    crc = zlib.crc32(repr(about).encode())
    for raw in pieces:
        whole = len(raw) - len(raw) % (8 * _ROW)
        words = raw[:whole].view("<u8").reshape(-1, _ROW)
        for part in (words.sum(0), words.sum(1), raw[whole:]):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"
