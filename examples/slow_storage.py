"""A storage that is as slow as asked for: local files behind a wire, as an fsspec filesystem."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile


class SlowStorage(LocalFileSystem):
    """Reads local files by ranges, all readers together at ``bytes_per_second``, each range after
    ``latency`` seconds. URLs are ``slow:///folder``."""

    protocol = "slow"
    bytes_per_second = 100e6
    latency = 0.0
    ranges: list[tuple[str, int, int]] = []
    _wire = threading.Lock()

    @classmethod
    def use(cls, bytes_per_second: float, latency: float = 0.0) -> None:
        """Register the protocol and set how slow it is."""
        cls.bytes_per_second, cls.latency, cls.ranges = bytes_per_second, latency, []
        fsspec.register_implementation("slow", cls, clobber=True)

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("slow://"))

    def _open(self, path, mode="rb", **kwargs):
        if mode != "rb":
            return super()._open(path, mode, **kwargs)
        return _SlowFile(self, path, mode, cache_type="none")


class _SlowFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        time.sleep(self.fs.latency)
        with self.fs._wire:
            time.sleep((end - start) / self.fs.bytes_per_second)
        self.fs.ranges.append((self.path, start, end))
        with Path(self.path).open("rb") as file:
            file.seek(start)
            return file.read(end - start)
