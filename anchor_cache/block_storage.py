"""Growable storage of per-token states that a decoding step can append to without copying."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .kernels import ops

# A sixteenth keeps memory within 1.07 x the states; every token is then copied ~16 times at
# worst over the cache's life, against once per step for a concatenated cache.
_GROWTH = 16
_SMALLEST_GROWTH = 64


class GrowingStates:
    """States ``[B, H, length, D]`` of one layer in a preallocated buffer ``[B, H, capacity, D]``.

    The buffer is contiguous, so that any tokens of any head can be gathered in one read.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self.length = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was stored yet (a batch size is then not known either)."""
        return self._buffer is None

    @property
    def states(self) -> torch.Tensor:
        """A view of all stored states, ``[B, H, length, D]``."""
        return self._buffer[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored states, without the room to grow."""
        return 0 if self._buffer is None else self.states.numel() * self._buffer.element_size()

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._buffer is None else self._buffer.numel() * self._buffer.element_size()

    def append(self, new: torch.Tensor) -> None:
        """Add ``[B, H, T, D]`` at the end."""
        end = self.length + new.shape[2]
        if self._buffer is None or end > self._buffer.shape[2]:
            self._grow(new, end)
        self._buffer[:, :, self.length : end] = new
        self.length = end

    def _grow(self, like: torch.Tensor, length: int) -> None:
        b, h, _, dim = like.shape
        capacity = length + max(length // _GROWTH, _SMALLEST_GROWTH)
        grown = torch.zeros((b, h, capacity, dim), dtype=like.dtype, device=like.device)
        if self._buffer is not None:
            grown[:, :, : self.length] = self.states
        self._buffer = grown

    def assign(self, states: torch.Tensor) -> None:
        """Replace everything by ``[B, H, T, D]``."""
        self._buffer, self.length = None, 0
        self.append(states)

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; the room stays."""
        self.length = min(length, self.length)

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Tokens by position, ``[B, H, S]`` int64 -> ``[B, H, S, D]``."""
        return ops.gather_tokens(self._buffer, index)

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension or the device to the buffer."""
        if self._buffer is not None:
            self._buffer = change(self._buffer).contiguous()
