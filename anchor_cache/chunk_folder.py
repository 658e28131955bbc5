"""Where chunk files lie: a folder, or any other storage that fsspec has a name for."""

from __future__ import annotations

import contextlib
import datetime
import io
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from .validation import require

SUFFIX = ".safetensors"
_IS_CHUNK = re.compile(r"[0-9a-f]{64}\.safetensors")
_IS_PARTIAL = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.partial")
_ABANDONED = 3600.0  # seconds after which no writer can still be at a partial file
_RELIST = 5.0  # seconds after which what others write to a remote storage is looked for anew
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


class StoredFile(NamedTuple):
    """A chunk file in a folder: its digest, size in bytes and time of last use in seconds."""

    digest: str
    nbytes: int
    used: float


class RangedFile:
    """An open file of which any range is read, by one thread at a time."""

    def __init__(self, handle) -> None:
        if isinstance(handle, io.BytesIO):
            # memory:// gives all who open a file one object with one place in it.
            handle = io.BytesIO(handle.getvalue())
        self._handle, self._lock = handle, threading.Lock()
        with _as_os_errors():
            self.size = handle.seek(0, os.SEEK_END)

    def read(self, start: int, size: int) -> torch.Tensor:
        """Bytes as uint8 ``[size]`` on the host.

        Raises:
            OSError: they cannot be read.
            EOFError: the file ends before.
            ValueError: the file was closed.
        """
        buffer = torch.empty(size, dtype=torch.uint8)
        rest = memoryview(buffer.numpy())
        with self._lock:
            if self._handle.closed:
                raise ValueError("the chunk was closed")
            with _as_os_errors():
                self._handle.seek(start)
                while rest and (count := self._handle.readinto(rest)):
                    rest = rest[count:]
        if rest:
            raise EOFError(f"the file ends {len(rest)} bytes too early")
        return buffer

    def close(self) -> None:
        with self._lock, contextlib.suppress(Exception):
            self._handle.close()


class ChunkFolder:
    """Chunk files at one place, named by their digests; other files there are left alone.

    Files of other processes come and go: what is not there is no error, but for ``open``.

    Args:
        url: a path, made if it does not exist, or a URL (``s3://...``, ``memory://...``).

    Raises:
        ValueError: it is a file, or its protocol is unknown to fsspec or needs a package.
    """

    def __init__(self, url: str | os.PathLike) -> None:
        named = isinstance(url, (str, os.PathLike)) and os.fspath(url)
        require(named, "url", url, "a folder or a fsspec URL")
        given = os.fsdecode(url)
        try:
            if "://" in given:
                self.fs, self.path = fsspec.core.url_to_fs(given)
            else:
                self.fs = LocalFileSystem()
                self.path = self.fs._strip_protocol(given)
        except ImportError as error:
            raise ValueError(f"url={given!r} needs a package that is missing: {error}") from error
        except ValueError as error:
            raise ValueError(
                f"url={given!r} is not valid ({error}): use a folder, or a URL of a protocol that "
                "fsspec knows, such as s3:// or hf://; fsspec.available_protocols() lists them"
            ) from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.url = self.path if self.is_local else given
        self._used: dict[str, float] = {}
        self._written, self._relisted = False, -math.inf
        if self.is_local:
            with contextlib.suppress(FileExistsError):
                os.makedirs(self.path)
            require(os.path.isdir(self.path), "url", given, "there is a file of this name")

    def _file(self, digest: str) -> str:
        return f"{self.path.rstrip('/')}/{digest}{SUFFIX}"

    def open(self, digest: str) -> RangedFile:
        """Open a file to read ranges of it.

        Raises:
            FileNotFoundError: it is not there.
            OSError: it cannot be read.
        """
        with _as_os_errors():
            try:
                return self._open(digest)
            except FileNotFoundError:
                # Storages that keep listings do not see what others wrote since.
                if self.is_local or time.monotonic() < self._relisted + _RELIST:
                    raise
                self._relisted = time.monotonic()
                self.fs.invalidate_cache(self.path)
                return self._open(digest)

    def _open(self, digest: str) -> RangedFile:
        return RangedFile(self.fs.open(self._file(digest), "rb", cache_type="none"))

    def files(self) -> Iterator[StoredFile]:
        """The chunk files that are there now."""
        for name, nbytes, used in self._list():
            if _IS_CHUNK.fullmatch(name):
                digest = name.removesuffix(SUFFIX)
                yield StoredFile(digest, nbytes, max(used, self._used.get(digest, 0.0)))

    def _list(self) -> Iterator[tuple[str, int, float]]:
        if self.is_local:
            with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_file():
                            stat = entry.stat()
                            yield entry.name, stat.st_size, stat.st_mtime
            return
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self.fs.invalidate_cache(self.path)
            for info in self.fs.ls(self.path, detail=True):
                if info["type"] == "file":
                    yield info["name"].rpartition("/")[2], info["size"] or 0, _last_change(info)

    def touch(self, digest: str) -> None:
        """Note that a file is used now: on disk if it can be, for other processes to see."""
        now = time.time_ns()
        if self.is_local:
            with contextlib.suppress(OSError):
                try:
                    os.utime(self._file(digest), ns=(now, now))
                except PermissionError:
                    os.utime(self._file(digest))  # another user's file may only be set to now
        else:
            self._used[digest] = now / 1e9

    def write(self, digest: str, pieces: list[memoryview | bytes]) -> None:
        """Write a file, which appears when it is complete.

        Raises:
            OSError: the storage is full, or may not be written to.
        """
        if not self._written:
            self._written = True
            self.delete_abandoned()
        target = self._file(digest)
        if not self.is_local:
            with _as_os_errors():
                self._put(target, b"".join(pieces))
            self.touch(digest)
            return
        partial = f"{target.removesuffix(SUFFIX)}.{uuid.uuid4().hex}.partial"
        os.makedirs(self.path, exist_ok=True)  # it may have been deleted to empty the store
        try:
            with open(partial, "wb") as file:
                for piece in pieces:
                    file.write(piece)
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise

    def _put(self, target: str, whole: bytes) -> None:
        try:
            self.fs.pipe_file(target, whole)
        except FileNotFoundError:  # a storage with real folders
            self.fs.makedirs(self.path, exist_ok=True)
            self.fs.pipe_file(target, whole)

    def delete(self, digest: str) -> bool:
        """Delete a file; False if there was none.

        Raises:
            OSError: it may not be deleted.
        """
        self._used.pop(digest, None)
        try:
            with _as_os_errors():
                self.fs.rm_file(self._file(digest))
        except FileNotFoundError:
            return False
        return True

    def delete_abandoned(self) -> None:
        """Delete what writers left behind that were killed."""
        if self.is_local:
            with contextlib.suppress(OSError), os.scandir(self.path) as entries:
                for entry in entries:
                    if _IS_PARTIAL.fullmatch(entry.name):
                        with contextlib.suppress(OSError):
                            if entry.stat().st_mtime < time.time() - _ABANDONED:
                                os.unlink(entry)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Storages raise errors of their own; a store knows only what cannot be read."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _last_change(info: dict) -> float:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return 0.0
