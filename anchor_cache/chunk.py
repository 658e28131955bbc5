"""A chunk, what it is named by, and how a blend reads one."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json

import torch

FORMAT = "anchor_cache chunk 2"


class DamagedChunk(Exception):
    """A chunk that was opened cannot be read to its end; ``reason`` says why, as for a miss, and
    ``key`` which one it is, if that is known."""

    def __init__(self, reason: str, key: ChunkKey | None = None) -> None:
        super().__init__(reason)
        self.reason, self.key = reason, key


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """What a chunk is: the model that encoded it, the prefix it was encoded after, its tokens,
    and the dtype it is stored in (``"model"``: the one that it was computed in)."""

    model: str
    prefix: tuple[int, ...]
    ids: tuple[int, ...]
    dtype: str = "model"

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the key, the same in every process and on every machine."""
        fields = [FORMAT, self.model, list(self.prefix), list(self.ids), self.dtype]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    @property
    def is_lossy(self) -> bool:
        """Whether what is stored is rounded, so that it is never exact."""
        return self.dtype != "model"


class ChunkReader:
    """A chunk as a blend reads it, layer by layer and in any thread.

    Attributes:
        key: what the chunk is.
        rotary: digest of the rotary tables with which it was encoded: some models change them
            with the length of the prompt, and what was encoded with others is not exact.
    """

    key: ChunkKey
    rotary: str

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys before RoPE and values of one layer, each ``[1, H_kv, T, D]``, on the model's
        device and in its dtype. They may be shared: do not change them in place.

        Raises:
            DamagedChunk: they cannot be read, or are not what was written.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the file."""

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close()


@dataclasses.dataclass
class Chunk(ChunkReader):
    """A chunk in memory: keys before RoPE and values, one ``[1, H_kv, T, D]`` pair per layer."""

    key: ChunkKey
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rotary: str

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[i], self.values[i]
