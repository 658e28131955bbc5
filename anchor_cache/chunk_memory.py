"""Chunks that were read lately, kept on the host."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from .chunk import ChunkKey
from .chunk_files import ChunkHeader

_UNPACKED = 5  # what a header takes in memory, as a multiple of its bytes in the file (measured)


class RememberedChunk:
    """The layers of a chunk that were read so far, as they are stored.

    Attributes:
        nbytes: host memory in use, the header included.
    """

    def __init__(self, header: ChunkHeader) -> None:
        self.header = header
        self.layers: dict[int, torch.Tensor] = {}
        self.nbytes = _UNPACKED * header.layers[0].start

    @property
    def is_whole(self) -> bool:
        return len(self.layers) == len(self.header.layers)


class ChunkMemory:
    """Forgets the chunks that were opened longest ago beyond ``max_bytes``; 0: keeps nothing.

    Attributes:
        nbytes: host memory in use.
        stamp: changes whenever a chunk is told to be forgotten.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes, self.stamp = max_bytes, 0, 0
        self._chunks: OrderedDict[str, RememberedChunk] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: ChunkKey) -> RememberedChunk | None:
        """The chunk, if all of it is here."""
        with self._lock:
            chunk = self._chunks.get(key.digest)
            if chunk is None or not chunk.is_whole or chunk.header.key != key:
                return None
            self._chunks.move_to_end(key.digest)
            return chunk

    def begin(self, header: ChunkHeader, stamp: int) -> RememberedChunk | None:
        """Where to keep the layers of a chunk that was opened when ``stamp`` was; None for
        nowhere: nothing is kept, or its file may have been deleted since."""
        digest = header.key.digest
        with self._lock:
            if not self.max_bytes or stamp != self.stamp:
                return None
            chunk = self._chunks.get(digest)
            if chunk is None or chunk.header != header:
                self._forget(digest)
                chunk = self._chunks[digest] = RememberedChunk(header)
                self.nbytes += chunk.nbytes
            self._chunks.move_to_end(digest)
            self._shrink()
            return chunk

    def keep(self, chunk: RememberedChunk, layer: int, raw: torch.Tensor) -> None:
        """Keep a layer's bytes, unless the chunk was forgotten meanwhile."""
        digest = chunk.header.key.digest
        with self._lock:
            if self._chunks.get(digest) is not chunk or layer in chunk.layers:
                return
            chunk.layers[layer] = raw
            chunk.nbytes += raw.nbytes
            self.nbytes += raw.nbytes
            self._shrink()

    def forget(self, digest: str) -> None:
        with self._lock:
            self.stamp += 1
            self._forget(digest)

    def _shrink(self) -> None:
        while self.nbytes > self.max_bytes:
            self._forget(next(iter(self._chunks)))

    def _forget(self, digest: str) -> None:
        chunk = self._chunks.pop(digest, None)
        if chunk is not None:
            self.nbytes -= chunk.nbytes
