"""Keeping a folder of chunks below a size."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

from .chunk_folder import ChunkFolder

# The folder is looked at again when this share of what was free has been filled: listing many files
# takes long, and others write there, too.
_SHARE = 1 / 8


class ChunkEviction:
    """Deletes the least recently used files beyond ``max_bytes``; None: never any.

    Several processes may evict from one folder: they go by the times of last use of its files.
    Files that this process holds open are kept, so a folder can be larger for a while.
    """

    def __init__(self, folder: ChunkFolder, max_bytes: int | None) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._unlisted = 0.0  # bytes that may be written before the folder is looked at
        self._held: Counter[str] = Counter()
        # A chunk that is collected as garbage lets go of its file, in whatever thread that happens.
        self._lock = threading.RLock()

    def hold(self, digest: str) -> None:
        with self._lock:
            self._held[digest] += 1

    def release(self, digest: str) -> None:
        with self._lock:
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest]

    def require_room(self, nbytes: int) -> None:
        """Raise ValueError for a file that is larger than the whole folder may be."""
        if self.max_bytes is not None and nbytes > self.max_bytes:
            raise ValueError(
                f"a chunk of {nbytes:,} bytes does not fit into max_bytes={self.max_bytes:,}: "
                "raise max_bytes, or store shorter documents or dtype='int8'"
            )

    def evict(self, written: str, nbytes: int) -> list[str]:
        """Delete what is too much, but for the file of ``nbytes`` that was just written; which
        ones were."""
        if self.max_bytes is None:
            return []
        evicted = []
        with self._lock:
            self._unlisted -= nbytes
            if self._unlisted >= 0:
                return []
            files = sorted(self.folder.files(), key=lambda file: file.used)
            excess = sum(file.nbytes for file in files) - self.max_bytes
            for file in files:
                if excess <= 0:
                    break
                if file.digest == written or file.digest in self._held:
                    continue
                with contextlib.suppress(OSError):
                    if self.folder.delete(file.digest):
                        evicted.append(file.digest)
                    excess -= file.nbytes
            self._unlisted = -excess * _SHARE
        return evicted
