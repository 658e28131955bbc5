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

    The buffer is contiguous, so that any tokens of any head can be gathered in one read. Classes
    that keep the buffer elsewhere than on the model's device inherit from this one.
    """

    is_remote = False
    """Whether :attr:`states` copies everything to the model's device."""
    is_read_in_place = True
    """Whether a few tokens are better read where they lie than gathered."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self.length = 0

    @classmethod
    def around(cls, states: torch.Tensor) -> GrowingStates:
        """States that exist already, ``[B, H, L, D]``; nothing is copied if they are contiguous."""
        storage = cls()
        storage._buffer, storage.length = states.contiguous(), states.shape[2]
        return storage

    @property
    def is_empty(self) -> bool:
        """Whether nothing was stored yet (a batch size is then not known either)."""
        return self._buffer is None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, length, D."""
        b, h, _, dim = self._buffer.shape
        return b, h, self.length, dim

    @property
    def model_device(self) -> torch.device:
        """Where :attr:`states` are wanted."""
        return self._buffer.device

    @property
    def states(self) -> torch.Tensor:
        """All stored states on the model's device, ``[B, H, length, D]``; a view where possible."""
        return self._buffer[:, :, : self.length]

    @property
    def stored(self) -> torch.Tensor:
        """A view of all stored states where they are kept, ``[B, H, length, D]``."""
        return self._buffer[:, :, : self.length]

    def in_memory(self) -> torch.Tensor:
        """All stored states ``[B, H, length, D]`` for writing or sending: a view, or a copy if
        they are not in memory."""
        return self.stored

    def span(self, start: int, stop: int) -> torch.Tensor:
        """Tokens ``start`` to ``stop`` on the model's device, ``[B, H, stop - start, D]``."""
        return self._buffer[:, :, start:stop]

    def give_back(self) -> None:
        """Let go of memory that can be filled again from where the states are kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored states, without the room to grow."""
        return 0 if self._buffer is None else self.stored.numel() * self._buffer.element_size()

    @property
    def device_bytes(self) -> int:
        """Bytes that are allocated on the model's device, the room to grow included."""
        return 0 if self._buffer is None else self._buffer.numel() * self._buffer.element_size()

    def append(self, new: torch.Tensor) -> None:
        """Add ``[B, H, T, D]`` at the end.

        Raises:
            ValueError: its batch size, heads or head size are not those of what is stored.
        """
        self._require_fit(new)
        end = self.length + new.shape[2]
        if torch.is_grad_enabled() and (new.requires_grad or self._has_gradient):
            # Writing in place would invalidate what earlier steps saved for their backward pass.
            parts = (new,) if self._buffer is None else (self.states, new)
            self._buffer = torch.cat(parts, 2).contiguous()
        else:
            if self._buffer is None or end > self._buffer.shape[2] or self._has_gradient:
                self._grow(new, end)
            self._buffer[:, :, self.length : end] = new
        self.length = end

    def _require_fit(self, new: torch.Tensor) -> None:
        if self._buffer is None:
            return
        stored, shape = self._buffer.shape, new.shape
        if (stored[:2], stored[3]) != (shape[:2], shape[3]):
            raise ValueError(
                f"new states of shape {tuple(shape)} do not fit a cache of "
                f"{tuple(self.shape)} [batch, heads, tokens, head size]; use another "
                "cache, or batch_repeat_interleave(n) to go on with n sequences"
            )

    @property
    def _has_gradient(self) -> bool:
        return self._buffer is not None and self._buffer.requires_grad

    def _grow(self, like: torch.Tensor, length: int) -> None:
        b, h, _, dim = like.shape
        capacity = length + max(length // _GROWTH, _SMALLEST_GROWTH)
        # A buffer made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            grown = self._allocate((b, h, capacity, dim), like)
        if self._buffer is not None:
            grown[:, :, : self.length] = self.stored.detach()
        self._buffer = grown

    def _allocate(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; the room stays."""
        self.length = min(length, self.length)

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Tokens by position, ``[B, H, S]`` int64 -> ``[B, H, S, D]``, on the model's device."""
        return ops.gather_tokens(self._buffer, index)

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension."""
        if self._buffer is not None:
            with torch.inference_mode(False):
                self._buffer = change(self._buffer).contiguous()

    def move_(self, device: torch.device | str) -> None:
        """Put the states on another device for a while; those kept elsewhere anyway stay."""
        self.map_(lambda states: states.to(device, non_blocking=True))


def require_no_gradient(new: torch.Tensor, offload: str) -> None:
    """Raise RuntimeError for states that carry a gradient, which an offloaded cache would lose."""
    if torch.is_grad_enabled() and new.requires_grad:
        raise RuntimeError(
            f"offload={offload!r} keeps no gradients: call the model under torch.no_grad(), or "
            "use a cache without offload"
        )
