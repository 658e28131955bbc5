"""What a store holds and what was asked of it."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter


@dataclasses.dataclass(frozen=True)
class ChunkStatistics:
    """What a ``ChunkStore`` holds, and what happened since it was made, in this process.

    Attributes:
        chunks, bytes: files in the folder, of all models, and their size.
        hits, misses: chunks that were opened, and that could not be.
        memory_hits: of the hits, those that needed no file.
        evictions: files that were deleted because of ``max_bytes``.
        bytes_read, read_seconds: layers read from files, and how long opening, reading and
            verifying took, in all threads together.
    """

    chunks: int
    bytes: int
    hits: int
    misses: int
    memory_hits: int
    evictions: int
    bytes_read: int
    read_seconds: float

    def to_dict(self) -> dict:
        """The figures as JSON-serialisable values."""
        return dataclasses.asdict(self)


class StoreCounters:
    """The running counts behind :class:`ChunkStatistics`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        with self._lock:
            self._counts.update(amounts)

    def statistics(self, chunks: int, nbytes: int) -> ChunkStatistics:
        with self._lock:
            counts = dict(self._counts)
        names = ("hits", "misses", "memory_hits", "evictions", "bytes_read")
        return ChunkStatistics(
            chunks=chunks,
            bytes=nbytes,
            read_seconds=float(counts.get("read_seconds", 0.0)),
            **{name: counts.get(name, 0) for name in names},
        )
