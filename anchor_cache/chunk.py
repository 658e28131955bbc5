"""What a stored chunk is, and how a blend reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Protocol

import torch

FORMAT = "anchor_cache chunk 1"


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """What a chunk is: the model that encoded it, the prefix it was encoded after, its tokens."""

    model: str
    prefix: tuple[int, ...]
    ids: tuple[int, ...]
    dtype: str = "model"

    @property
    def is_lossy(self) -> bool:
        return self.dtype != "model"

    @property
    def digest(self) -> str:
        """SHA-256 of the key, the same in every process and on every machine."""
        fields = [FORMAT, self.model, list(self.prefix), list(self.ids)]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


class DamagedChunk(Exception):
    """A chunk's file turned out to be damaged while it was read."""


class StoredChunk(Protocol):
    key: ChunkKey
    rotary: str

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def close(self) -> None: ...


@dataclasses.dataclass
class Chunk:
    """Keys before RoPE and values of one chunk: one ``[1, H_kv, T, D]`` pair per layer.

    ``rotary`` is a digest of the rotary tables with which the chunk was encoded: some models
    change them with the length of the prompt, and what was encoded with others is not exact.
    """

    key: ChunkKey
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rotary: str

    def layer(self, i):
        return self.keys[i], self.values[i]

    def close(self):
        pass
