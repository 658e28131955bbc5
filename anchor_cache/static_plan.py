"""What a decoding step may read of a cache of fixed capacity: tensor arithmetic on its length.

The counterpart of :mod:`selection` for compiled decoding: all shapes follow from the capacity and
the settings, and how much of them a step uses from a length on the device, so that nothing waits
for it and one graph serves every step. Slots, pieces and rows are those of :mod:`selection`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from .anchor_config import AnchorConfig
from .selection import always_read, budget_of, ranked_blocks


class StaticPlan(NamedTuple):
    """One step, with the fields of :class:`~anchor_cache.selection.StepPlan` that the choice of
    blocks needs, for all slots of the capacity, R = B rows.

    ends: the pieces of sinks and window, ``[R, F]`` int64, -1 for none.
    attended: tokens that each row reads, ``[R]``.
    is_sparse: whether a row leaves something out, ``[R]``.
    """

    piece: int
    pieces: int
    proposals: int
    proposes_all: bool
    first_block: int
    last_block: int
    first_piece: int
    parts: int
    shifts: torch.Tensor
    block_valid: torch.Tensor
    piece_valid: torch.Tensor
    read_valid: torch.Tensor
    proposal_valid: None
    ends: torch.Tensor
    attended: torch.Tensor
    is_sparse: torch.Tensor


@dataclasses.dataclass(frozen=True)
class StaticSizes:
    """The fixed sizes of the steps of one layer.

    Args:
        config: budget, sinks, window.
        capacity: tokens that the cache can hold.
    """

    config: AnchorConfig
    capacity: int

    @property
    def blocks(self) -> int:
        """Block slots."""
        return self.capacity // self.config.block_size

    @property
    def parts(self) -> int:
        """Pieces per block."""
        return self.config.block_size // self.config.read_tokens

    @property
    def budget(self) -> int:
        """Tokens that a step may read."""
        return budget_of(self.config, self.capacity)

    @property
    def fixed(self) -> tuple[int, int]:
        """Blocks of sinks, and tokens of the window, where the context is long enough."""
        return always_read(self.config, self.budget)

    @property
    def pieces(self) -> int:
        """The most pieces that a step reads beside sinks and window."""
        config, (sinks, window) = self.config, self.fixed
        fixed = sinks * config.block_size + window
        affordable = (self.budget - fixed) // config.read_tokens
        return min(affordable, self.blocks * self.parts)

    @property
    def proposals(self) -> int:
        """Blocks whose pieces are ranked again."""
        return min(ranked_blocks(self.config, self.pieces, self.blocks), self.blocks)

    def plan(self, length: torch.Tensor, first: torch.Tensor) -> StaticPlan:
        """Plan the step of a cache of ``length`` tokens.

        Args:
            length: int64 ``[]``, the newest token and padding included.
            first: the first real token of each row, int64 ``[R]``.
        """
        config, parts, piece = self.config, self.parts, self.config.read_tokens
        most_sinks, window = self.fixed
        size, device = config.block_size, length.device
        shifts, first_slot = first % size, (first // size).unsqueeze(1)
        tokens = (length - first).unsqueeze(1)
        tail_block = (tokens - window).clamp(min=0) // size
        sinks = tail_block.clamp(max=most_sinks)
        fixed = (sinks - tail_block) * size + tokens
        pieces = torch.minimum((tail_block - sinks) * parts, (self.budget - fixed) // piece)

        slots = torch.arange(self.blocks, device=device)
        inside = (slots >= first_slot + sinks) & (slots < first_slot + tail_block)
        sink_pieces = torch.arange(most_sinks * parts, device=device)
        sink_ids = torch.where(sink_pieces < sinks * parts, first_slot * parts + sink_pieces, -1)
        tail_pieces = torch.arange(-(-(window + size - 1) // piece), device=device)
        tail_ids = (first_slot + tail_block) * parts + tail_pieces
        tail_ids = torch.where(tail_ids * piece + shifts.unsqueeze(1) < length, tail_ids, -1)
        return StaticPlan(
            piece=piece,
            pieces=self.pieces,
            proposals=self.proposals,
            proposes_all=self.proposals == self.blocks,
            first_block=0,
            last_block=self.blocks,
            first_piece=0,
            parts=parts,
            shifts=shifts,
            block_valid=inside,
            piece_valid=inside.repeat_interleave(parts, 1),
            read_valid=torch.arange(self.pieces, device=device) < pieces,
            proposal_valid=None,
            ends=torch.cat((sink_ids, tail_ids), 1),
            attended=(fixed + pieces * piece).squeeze(1),
            is_sparse=(pieces < (tail_block - sinks) * parts).squeeze(1),
        )
