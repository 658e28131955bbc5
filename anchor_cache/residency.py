"""Which pages of which head are resident in a small pool, the least recently used ones leaving."""

from __future__ import annotations

from collections.abc import Callable

import torch

_ABSENT = -1


class Residency:
    """The bookkeeping of a pool of slots per batch row and head; it holds no states itself.

    Everything is on the CPU: what is missing has to be known there, to be fetched.

    Args:
        batch, heads: of the states.
    """

    def __init__(self, batch: int, heads: int) -> None:
        self._slot_of = torch.full((batch, heads, 0), _ABSENT)
        self._page_of = torch.full((batch, heads, 0), _ABSENT)
        self._used = torch.zeros((batch, heads, 0), dtype=torch.long)
        self._clock = 0

    @property
    def slots(self) -> int:
        """Slots per batch row and head."""
        return self._page_of.shape[2]

    def slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """The slots ``[B, H, K]`` of pages ``[B, H, K]``, -1 for those that are not resident."""
        self._know(pages)
        return self._slot_of.gather(2, pages)

    def bring(
        self, pages: torch.Tensor, room: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Make pages resident.

        Args:
            pages: ``[B, H, K]``, the same one several times if need be.
            room: how many slots to have for every page that is needed at once, at least 1.

        Returns:
            Their slots ``[B, H, K]``, and what has to be put into the pool for that: batch rows
            and heads as one number, pages, and slots, each ``[F]``.
        """
        self._know(pages)
        self._clock += 1
        needed = torch.zeros_like(self._slot_of, dtype=torch.bool).scatter_(2, pages, True)
        most = int(needed.sum(2).max())
        if most > self.slots:
            self._add_slots(room * most - self.slots)
        slot_of, page_of, used = (
            table.view(-1, table.shape[2]) for table in (self._slot_of, self._page_of, self._used)
        )
        needed = needed.flatten(0, 1)
        head, page = (needed & (slot_of >= 0)).nonzero(as_tuple=True)
        used[head, slot_of[head, page]] = self._clock
        missing = needed & (slot_of < 0)
        head, page = missing.nonzero(as_tuple=True)
        if len(head):
            counts = missing.sum(1)
            rank = torch.arange(len(head)) - (counts.cumsum(0) - counts)[head]
            slot = used.argsort(1)[:, : int(counts.max())][head, rank]
            left = page_of[head, slot]
            was_taken = left != _ABSENT
            slot_of[head[was_taken], left[was_taken]] = _ABSENT
            slot_of[head, page] = slot
            page_of[head, slot] = page
            used[head, slot] = self._clock
        else:
            slot = page
        return self._slot_of.gather(2, pages), (head, page, slot)

    def forget(self, first: int, last: int) -> None:
        """Make pages ``first`` to ``last`` absent, for all heads: their content has changed."""
        gone = (self._page_of >= first) & (self._page_of < last)
        self._page_of[gone] = _ABSENT
        self._used[gone] = 0
        self._slot_of[:, :, first:last] = _ABSENT

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension."""
        self._slot_of, self._page_of, self._used = (
            change(table).contiguous() for table in (self._slot_of, self._page_of, self._used)
        )

    def _know(self, pages: torch.Tensor) -> None:
        """Have room in the table for the pages asked for, and for some more."""
        missing = int(pages.max()) + 1 - self._slot_of.shape[2]
        if missing > 0:
            self._slot_of = _longer(self._slot_of, missing + self._slot_of.shape[2] // 2, _ABSENT)

    def _add_slots(self, count: int) -> None:
        self._page_of = _longer(self._page_of, count, _ABSENT)
        self._used = _longer(self._used, count, 0)


def _longer(table: torch.Tensor, count: int, fill: int) -> torch.Tensor:
    return torch.nn.functional.pad(table, (0, count), value=fill)
