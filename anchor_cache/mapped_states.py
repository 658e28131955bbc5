"""States in a memory-mapped file: a context that is larger than the memory can be decoded.

The file loses its name as soon as it is open, so that the system removes it with its last user,
however the process ends. It is sparse: each head has room for several times its tokens, and only
what was written takes space on the disk. Writing goes through the file and not through the
mapping: a full disk is then an error and not a killed process.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable

import torch

from .block_storage import GrowingStates, require_no_gradient
from .kernels import ops

_ROOM = 4
_SMALLEST_ROOM = 4096
_BYTES_AT_ONCE = 2**22

_lock = threading.Lock()
_handed_out: weakref.WeakSet[MappedStates] = weakref.WeakSet()


class MappedStates(GrowingStates):
    """Like its parent, with the buffer in a file.

    Pages that were read are given back after every gather, and those of a dense step when the
    next layer is appended to: at most one layer's keys and values are resident at a time.

    Args:
        directory: where the file lies; made if it does not exist. None: the system's directory
            for temporary files.
    """

    is_read_in_place = False

    def __init__(self, directory: str | None = None) -> None:
        super().__init__()
        self._directory = directory
        self._file = self._mapping = self._device = None

    @property
    def is_remote(self) -> bool:
        return self._device is not None and self._device.type != "cpu"

    @property
    def device_bytes(self) -> int:
        return 0

    @property
    def model_device(self) -> torch.device:
        return self._device

    @property
    def states(self) -> torch.Tensor:
        self._use("MADV_NORMAL")
        return self.stored.to(self._device)

    def in_memory(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self._buffer.dtype)
        for start, piece in self._pieces():
            whole[:, :, start : start + piece.shape[2]] = piece
        return whole

    def span(self, start: int, stop: int) -> torch.Tensor:
        self._use("MADV_NORMAL")
        return self._buffer[:, :, start:stop].to(self._device)

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        # What lies beside a selected block is not selected: reading ahead would only cost.
        self._use("MADV_RANDOM")
        rows = ops.gather_tokens(self._buffer, index.cpu()).to(self._device)
        self.give_back()
        return rows

    def append(self, new: torch.Tensor) -> None:
        self._require_fit(new)
        require_no_gradient(new, "disk")
        end = self.length + new.shape[2]
        if self._buffer is None or end > self._buffer.shape[2]:
            self._grow(new, end)
        self._write(new, self.length)
        self.length, self._device = end, new.device
        with _lock:
            others = [states for states in _handed_out if states is not self]
            _handed_out.clear()
        for states in others:
            states.give_back()

    def _use(self, advice: str) -> None:
        with _lock:
            _handed_out.add(self)
        self._advise(advice)

    def give_back(self) -> None:
        """Let go of the resident pages; whoever reads them again gets them from the file."""
        self._advise("MADV_DONTNEED")

    def _advise(self, advice: str) -> None:
        # Elsewhere such advice may mean something else, or throw written pages away.
        if self._mapping is not None and sys.platform == "linux":
            self._mapping.madvise(getattr(mmap, advice))

    def _grow(self, like: torch.Tensor, length: int) -> None:
        grown = MappedStates(self._directory)
        grown._open(like, _ROOM * max(length, _SMALLEST_ROOM))
        for start, piece in self._pieces():
            grown._write(piece, start)
        grown.length = self.length
        self._take(grown)

    def _open(self, like: torch.Tensor, capacity: int) -> None:
        b, h, _, dim = like.shape
        if self._directory is not None:
            os.makedirs(self._directory, exist_ok=True)
        size = b * h * capacity * dim * like.element_size()
        self._file = tempfile.TemporaryFile(
            prefix="anchor_cache-", dir=self._directory, buffering=0
        )
        self._file.truncate(size)
        self._mapping = mmap.mmap(self._file.fileno(), size)
        with torch.inference_mode(False):
            flat = torch.frombuffer(self._mapping, dtype=like.dtype)
            self._buffer = flat.view(b, h, capacity, dim)

    def _write(self, new: torch.Tensor, start: int) -> None:
        capacity, row = self._buffer.shape[2], new.shape[3] * new.element_size()
        # Head by head: a copy of all, thrown away, leaves holes that the allocator may keep.
        heads = (head for sequence in new.detach().cpu() for head in sequence)
        try:
            for i, head in enumerate(heads):
                states = memoryview(head.contiguous().view(torch.uint8).numpy())
                _write_at(self._file, states.cast("B"), (i * capacity + start) * row)
        except OSError as error:
            place = self._directory or tempfile.gettempdir()
            raise OSError(
                error.errno,
                f"{error.strerror}, writing keys and values to {place}; choose another place with "
                "offload_dir",
            ) from error

    def _pieces(self):
        """The stored states in pieces of a few MiB, one at least: their first tokens, and
        ``[B, H, t, D]``."""
        if self._buffer is None:
            return
        row = self._buffer[:, :, 0].numel() * self._buffer.element_size()
        step = max(_BYTES_AT_ONCE // row, 1)
        for start in range(0, max(self.length, 1), step):
            yield start, self.stored[:, :, start : start + step]
            self.give_back()

    def _rebuilt(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MappedStates:
        """A copy in a file of its own, changed along the batch."""
        copy = MappedStates(self._directory)
        copy._device, copy.length = self._device, self.length
        for start, piece in self._pieces():
            piece = change(piece)
            if copy.is_empty:
                copy._open(piece, self._buffer.shape[2])
            copy._write(piece, start)
        return copy

    def _take(self, other: MappedStates) -> None:
        device = self._device
        vars(self).update(vars(other))
        self._device = device

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._take(self._rebuilt(change))

    def move_(self, device: torch.device | str) -> None:
        """Nothing to do: the states are on the disk."""

    def __deepcopy__(self, memo: dict) -> MappedStates:
        return self._rebuilt(lambda states: states)

    def __getstate__(self) -> dict:
        states = None if self._buffer is None else self.in_memory()
        return {"directory": self._directory, "device": self._device, "states": states}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["directory"])
        if state["states"] is not None:
            self.append(state["states"])
        self._device = state["device"]


def _write_at(file, data: memoryview, offset: int) -> None:
    while data:
        if hasattr(os, "pwrite"):
            written = os.pwrite(file.fileno(), data, offset)
        else:
            file.seek(offset)
            written = file.write(data)
        data, offset = data[written:], offset + written
