"""A chunk that is read from its file, layer by layer, when it is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from .chunk import Chunk, ChunkKey, ChunkReader, DamagedChunk
from .chunk_files import DAMAGED, ChunkHeader, decode, read_header, verify
from .chunk_folder import ChunkFolder, RangedFile
from .chunk_memory import ChunkMemory, RememberedChunk
from .chunk_statistics import StoreCounters


def open_chunk_file(
    folder: ChunkFolder, key: ChunkKey, layers: int
) -> tuple[RangedFile, ChunkHeader]:
    """Open a chunk's file and compare what it says with ``key`` and the model's depth.

    Raises:
        DamagedChunk: there is none, or none that can be used; why.
    """
    try:
        file = folder.open(key.digest)
    except OSError as error:
        raise DamagedChunk(_unreadable(error)) from error
    try:
        header = read_header(file.read, file.size)
        if header.key != key:
            raise DamagedChunk("chunk file holds another chunk than its name says")
        if len(header.layers) != layers:
            raise DamagedChunk(DAMAGED)
    except BaseException as error:
        file.close()
        if isinstance(error, OSError):
            raise DamagedChunk(_unreadable(error)) from error
        raise
    return file, header


def _unreadable(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "chunk not in the store"
    return f"chunk file cannot be read: {error.strerror or error}"


class StoredChunk(ChunkReader):
    """An open chunk of a store: its layers come from memory if they are there, or from its file,
    each by one read.

    Args:
        header: what the file says.
        file: the open file; None if ``remembered`` is whole.
        device: where layers are put.
        memory, remembered: where layers are kept that were read; ``remembered`` None: nowhere.
        counters: count what is read.
        on_close: called once.
        on_damage: called when the file turns out not to hold what was written.
    """

    def __init__(
        self,
        header: ChunkHeader,
        file: RangedFile | None,
        device: torch.device,
        memory: ChunkMemory,
        remembered: RememberedChunk | None,
        counters: StoreCounters,
        on_close: Callable[[], None],
        on_damage: Callable[[], None],
    ) -> None:
        self.key, self.rotary = header.key, header.rotary
        self.header, self.device = header, device
        self._file, self._memory, self._remembered = file, memory, remembered
        self._counters, self._on_close, self._on_damage = counters, on_close, on_damage
        self._closing, self._closed = threading.Lock(), False

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._closed:
            raise ValueError("the chunk was closed")
        raw = self._remembered.layers.get(i) if self._remembered else None
        try:
            return decode(self.header, i, self._read(i) if raw is None else raw, self.device)
        except OSError as error:
            raise DamagedChunk(_unreadable(error), self.key) from error
        except (DamagedChunk, EOFError) as error:
            self._on_damage()
            raise DamagedChunk(DAMAGED, self.key) from error

    def _read(self, i: int) -> torch.Tensor:
        stored, started = self.header.layers[i], time.perf_counter()
        raw = self._file.read(stored.start, stored.end - stored.start)
        verify(self.header, i, raw)
        self._counters.add(bytes_read=raw.nbytes, read_seconds=time.perf_counter() - started)
        if self._remembered:
            self._memory.keep(self._remembered, i, raw)
        return raw

    def load(self) -> Chunk:
        """All layers, in tensors that nothing else holds."""
        layers = [self.layer(i) for i in range(len(self.header.layers))]
        if self._remembered and not self.key.is_lossy:
            layers = [(keys.clone(), values.clone()) for keys, values in layers]
        keys, values = map(list, zip(*layers, strict=True))
        return Chunk(self.key, keys, values, self.rotary)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._file is not None:
            self._file.close()
        self._on_close()

    def __del__(self) -> None:
        if hasattr(self, "_closing"):
            self.close()
