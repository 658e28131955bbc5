"""States in host memory, of which an accelerator holds the blocks that were read lately."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .block_storage import GrowingStates, require_no_gradient
from .residency import Residency

# Twice what a step reads: enough for what the next steps read again, little beside the whole.
_ROOM = 2


def is_accelerator(device: torch.device) -> bool:
    """Whether states on ``device`` can be offloaded to the host at all."""
    return device.type != "cpu"


def to_device(states: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy states from the host; every such copy of this module is made here."""
    return states.to(device, non_blocking=states.is_pinned())


class HostStates(GrowingStates):
    """Like its parent, with the buffer in (pinned) host memory and a pool on the accelerator.

    The pool holds pages of tokens per batch row and head, and evicts those that were not read for
    the longest time. New tokens go to the host, and into the pool where their page is resident, so
    that the newest ones are never fetched. States that are on the CPU anyway are kept there, as by
    the parent.

    Args:
        page: tokens per page.
    """

    is_read_in_place = False

    def __init__(self, page: int) -> None:
        super().__init__()
        self._page = page
        self._device: torch.device | None = None
        self._drop_pool()

    def _drop_pool(self) -> None:
        self._pool: torch.Tensor | None = None  # [B * H, slots, page, D]
        self._residency: Residency | None = None

    @property
    def is_remote(self) -> bool:
        return self._device is not None and is_accelerator(self._device)

    @property
    def model_device(self) -> torch.device:
        return self._device

    @property
    def states(self) -> torch.Tensor:
        return to_device(self.stored, self._device) if self.is_remote else self.stored

    @property
    def device_bytes(self) -> int:
        if not self.is_remote:
            return super().device_bytes
        return 0 if self._pool is None else self._pool.numel() * self._pool.element_size()

    def append(self, new: torch.Tensor) -> None:
        self._device = new.device
        if not self.is_remote:
            super().append(new)
            return
        require_no_gradient(new, "cpu")
        start = self.length
        super().append(new.detach())
        if self._pool is not None and new.shape[2]:
            self._write_through(new.detach(), start)

    def _allocate(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        b, h, capacity, dim = shape
        capacity = -(-capacity // self._page) * self._page
        return self._pinned(torch.zeros((b, h, capacity, dim), dtype=like.dtype))

    def _pinned(self, states: torch.Tensor) -> torch.Tensor:
        return states.pin_memory() if self._device.type == "cuda" else states

    def _write_through(self, new: torch.Tensor, start: int) -> None:
        """Put new tokens into the pool where their pages are, or begin with them."""
        b, h, count, dim = new.shape
        stop, size = start + count, self._page
        if count > size:
            self._residency.forget(start // size, -(-stop // size))
            return
        begun = -(-start // size)
        if begun * size < stop:
            self._bring(torch.full((b, h, 1), begun))
        tokens = torch.arange(start, stop)
        slots = self._residency.slots_of((tokens // size).expand(b, h, count))
        places = self._places(slots, tokens % size)[slots.flatten() >= 0]
        kept = new if len(places) == slots.numel() else None
        flat = self._pool.view(-1, dim)
        if kept is None:
            there = (slots >= 0).to(self._device)
            flat[places.to(self._device)] = new[there]
        else:
            flat.index_copy_(0, places.to(self._device), new.reshape(-1, dim))

    def _bring(self, pages: torch.Tensor):
        """Make pages resident in the bookkeeping, with a pool of as many slots as that has."""
        slots, missing = self._residency.bring(pages, _ROOM)
        b, h, _, dim = self._buffer.shape
        held = 0 if self._pool is None else self._pool.shape[1]
        if held < self._residency.slots:
            with torch.inference_mode(False):
                pool = torch.zeros(
                    (b * h, self._residency.slots, self._page, dim),
                    dtype=self._buffer.dtype,
                    device=self._device,
                )
            if held:
                pool[:, :held] = self._pool
            self._pool = pool
        return slots, missing

    def _places(self, slots: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rows of the flattened pool: slots ``[B, H, K]`` and tokens within their pages."""
        b, h, _ = slots.shape
        heads = torch.arange(b * h).view(b, h, 1)
        return ((heads * self._pool.shape[1] + slots) * self._page + offsets).flatten()

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        if not self.is_remote:
            return super().gather(index)
        b, h, _, dim = self._buffer.shape
        index = index.cpu()
        if self._residency is None:
            self._residency = Residency(b, h)
        slots, (head, page, slot) = self._bring(index // self._page)
        if len(head):
            pages = self._buffer.view(-1, self._page, dim)
            per_head = self._buffer.shape[2] // self._page
            fetched = to_device(self._pinned(pages[head * per_head + page]), self._device)
            target = (head * self._pool.shape[1] + slot).to(self._device)
            self._pool.view(-1, self._page, dim).index_copy_(0, target, fetched)
        places = self._places(slots, index % self._page).to(self._device)
        return self._pool.view(-1, dim).index_select(0, places).view(b, h, -1, dim)

    def span(self, start: int, stop: int) -> torch.Tensor:
        if not self.is_remote:
            return super().span(start, stop)
        b, h = self._buffer.shape[:2]
        if self._residency is not None:
            pages = torch.arange(start // self._page, -(-stop // self._page))
            if (self._residency.slots_of(pages.expand(b, h, -1)) >= 0).all():
                return self.gather(torch.arange(start, stop).expand(b, h, -1))
        return to_device(self._buffer[:, :, start:stop], self._device)

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().map_(change)
        if self._pool is not None:
            b, h = self._buffer.shape[:2]
            before = self._pool.unflatten(0, (-1, h))
            with torch.inference_mode(False):
                self._pool = change(before).flatten(0, 1).contiguous()
            self._residency.map_(change)
        if self.is_remote and self._buffer is not None:
            self._buffer = self._pinned(self._buffer)

    def move_(self, device: torch.device | str) -> None:
        """Free the accelerator when the cache is offloaded as a whole; there is nothing to bring
        back, since what is read is fetched."""
        if not self.is_remote:
            super().move_(device)
        elif torch.device(device).type == "cpu":
            self._drop_pool()

    def __getstate__(self) -> dict:
        return {**vars(self), "_pool": None, "_residency": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        if self.is_remote and self._buffer is not None:
            self._buffer = self._pinned(self._buffer)
