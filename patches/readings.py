"""What a cache layer wants its query to attend to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .plain_attention import attend_to_blocks


class Reading(NamedTuple):
    """What a layer wants its query to attend to.

    keys, values: ``[B, H_kv, S, D]``.
    mask: boolean or additive, ``[B, 1 or H, 1, S]``; None when all of it is attended to.
    compare: if given, it is called with the attention outputs ``[B, 1, H, D]`` of this reading
        and of everything, which is then computed, too.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    compare: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def gathered(self) -> Reading:
        """Itself, as :meth:`BlockReading.gathered` gives one."""
        return self


class BlockReading(NamedTuple):
    """Blocks of the cache that a query attends to where they lie.

    keys, values: ``[B, H_kv, L, D]``, the whole cache.
    blocks, block_size, shifts, visible: as :func:`kernels.ops.attend_blocks` takes them.
    gather: makes copies of them, for attention functions that know more than plain attention.
    """

    keys: torch.Tensor
    values: torch.Tensor
    blocks: torch.Tensor
    block_size: int
    shifts: torch.Tensor | None
    visible: torch.Tensor | None
    gather: Callable[[], Reading]

    def gathered(self) -> Reading:
        """The same as copies."""
        return self.gather()

    def attend(self, query: torch.Tensor, scaling: float | None) -> torch.Tensor | None:
        """Plain attention ``[B, 1, H, D]`` of one query token per row, ``[B, H, 1, D]``; None where
        no faster way is known than to gather."""
        return attend_to_blocks(query, *self[:4], scaling, self.shifts, self.visible)
