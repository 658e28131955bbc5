"""What a decoding step may read: sinks, window, and how many blocks the budget leaves.

Everything here follows from lengths alone, so it is worked out once per step and shared by all
layers; only the choice of the blocks needs a layer's query.

Blocks are what the anchors stand for; a *piece*, ``AnchorConfig.read_tokens`` tokens of a block, is
what is read or left out.

Rows of a left-padded batch are planned as if each stood alone: its blocks start at its first real
token. Blocks are numbered by *slot*: block g of a row starts at ``shift + g * block_size`` with
``shift = padding % block_size``, so that rows stay aligned to within a block. Pieces are numbered
alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from .anchor_config import AnchorConfig

# Picking sketches one by one costs about this many times as much as reading them in order.
_GATHER_COST = 1.5
# The sketches of so few tokens cost less than what the anchors may overlook.
_ALWAYS_RANKED = 8192


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """One row's share of a step, in tokens of the cache (padding included)."""

    padding: int
    shift: int
    sink: range
    tail: range
    candidates: range  # block slots between the sinks and the tail
    all_pieces: int  # pieces of the candidates
    pieces: int  # how many of them are read
    proposals: int  # of how many of the candidates pieces are ranked again before that

    @property
    def is_whole(self) -> bool:
        """Whether this row leaves nothing out."""
        return self.pieces == self.all_pieces

    def fixed_pieces(self, piece: int) -> list[int]:
        """The pieces of so many tokens that sinks and tail consist of; the last may be partial."""
        sink, tail = self.sink, self.tail
        return [
            *range((sink.start - self.shift) // piece, (sink.stop - self.shift) // piece),
            *range((tail.start - self.shift) // piece, -((self.shift - tail.stop) // piece)),
        ]

    def attended(self, piece: int) -> int:
        """Tokens this row reads, in pieces of so many; padding is never among them."""
        return len(self.sink) + self.pieces * piece + len(self.tail)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one decoding step reads in every layer, before the blocks are chosen.

    ``rows`` has one entry when all rows of the batch are padded alike. ``attended`` counts the
    tokens that the rows read which leave something out.
    """

    rows: tuple[RowPlan, ...]
    attended: tuple[int, ...]
    dense_reason: str | None
    piece: int  # tokens per piece
    pieces: int
    proposals: int
    first_block: int
    last_block: int
    parts: int  # pieces per block
    length: int  # tokens in the cache, padding included
    fixed_index: torch.Tensor | None = None  # [R, S_fixed] tokens of sinks and tail
    fixed_valid: torch.Tensor | None = None  # [R, S_fixed], None when all are
    fixed_pieces: torch.Tensor | None = None  # [R, F] the same as pieces, -1 for none
    shifts: torch.Tensor | None = None  # [R]
    block_valid: torch.Tensor | None = None  # [R, last - first], None when all are candidates
    piece_valid: torch.Tensor | None = None  # [R, parts * (last - first)] likewise
    read_valid: torch.Tensor | None = None  # [R, pieces] ranks that a row reads, None for all
    proposal_valid: torch.Tensor | None = None  # [R, proposals] likewise before the refinement

    @property
    def first_piece(self) -> int:
        """The first piece of the first candidate."""
        return self.first_block * self.parts

    @property
    def proposes_all(self) -> bool:
        """Whether every candidate of every row is ranked again."""
        return all(row.proposals == len(row.candidates) for row in self.rows)


def budget_of(config: AnchorConfig, tokens: int) -> int:
    """The budget, in tokens, for a context of so many."""
    if isinstance(config.budget, float):
        return max(int(config.budget * tokens), config.smallest_budget)
    return config.budget


def always_read(config: AnchorConfig, budget: int) -> tuple[int, int]:
    """Blocks of sinks and tokens of the window that a budget of so many tokens has room for: half
    of it is left to what is chosen, a block at least beside the block that is not full yet, and a
    quarter of the other half is the sinks' at most."""
    budget -= config.reselect_every - 1
    room = min(budget // 2, budget - 2 * config.block_size + 1)
    sinks = min(config.sink_blocks, max(room // (4 * config.block_size), 1))
    window = max(room - sinks * config.block_size, config.block_size)
    return sinks, min(config.window_size, window)


def why_dense(config: AnchorConfig, tokens: int) -> str | None:
    """Why a context of so many tokens is read densely; None if it is not."""
    budget = budget_of(config, tokens)
    if config.tolerance == 0:
        return "tolerance=0 allows nothing to be left out"
    if budget >= tokens:
        return f"context within the budget of {config.budget}"
    if tokens <= config.dense_below:
        return f"context of at most dense_below={config.dense_below} tokens"
    if budget > config.dense_above * tokens:
        return (
            f"the budget of {config.budget} is more than dense_above={config.dense_above} of the "
            "context"
        )
    return None


def ranked_blocks(config: AnchorConfig, pieces: int, free: int) -> int:
    """Of how many of the ``free`` blocks between sinks and window the pieces are ranked again when
    so many of them are read."""
    blocks = config.refine_factor * math.ceil(pieces * config.read_tokens / config.block_size)
    blocks = max(blocks, _ALWAYS_RANKED // config.block_size)
    return free if _GATHER_COST * blocks >= free else blocks


def _plan_row(config: AnchorConfig, length: int, padding: int) -> RowPlan:
    size, tokens = config.block_size, length - padding
    budget = tokens if why_dense(config, tokens) else budget_of(config, tokens)
    most_sinks, window = always_read(config, budget)
    tail_block = max(tokens - window, 0) // size
    sink_blocks = min(most_sinks, tail_block)
    free = tail_block - sink_blocks
    # A selection that serves several steps grows by the tokens that come meanwhile.
    fixed = sink_blocks * size + tokens - tail_block * size + config.reselect_every - 1
    all_pieces = free * size // config.read_tokens
    affordable = all_pieces if budget >= tokens else (budget - fixed) // config.read_tokens
    pieces = min(all_pieces, affordable)
    first_slot = padding // size
    proposals = ranked_blocks(config, pieces, free)
    return RowPlan(
        padding=padding,
        shift=padding % size,
        sink=range(padding, padding + sink_blocks * size),
        tail=range(padding + tail_block * size, length),
        candidates=range(first_slot + sink_blocks, first_slot + tail_block),
        all_pieces=all_pieces,
        pieces=pieces,
        proposals=proposals,
    )


def _padded(rows: list[list[int]], width: int, fill: int) -> list[list[int]]:
    return [[*row, *[fill] * (width - len(row))] for row in rows]


def _within(counts: list[int], device: torch.device) -> torch.Tensor | None:
    """Which of the first ``max(counts)`` places each row fills, ``[R, max]``; None for all."""
    if len(set(counts)) == 1:
        return None
    limits = torch.tensor(counts, device=device)
    return torch.arange(max(counts), device=device) < limits[:, None]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def plan_step(
    config: AnchorConfig, length: int, paddings: tuple[int, ...], device: torch.device
) -> StepPlan:
    """Plan the decoding step of a cache of ``length`` tokens.

    Args:
        config: budget, sinks and window.
        length: tokens in the cache, the newest one and padding included.
        paddings: left padding per row of the batch; one entry when all rows have the same.
        device: where the index tensors are wanted.
    """
    rows = tuple(_plan_row(config, length, padding) for padding in paddings)
    piece, parts = config.read_tokens, config.block_size // config.read_tokens
    sparse = [row for row in rows if not row.is_whole]
    reason = None
    if not sparse:
        reason = why_dense(config, length - min(paddings)) or "the budget holds every block"
    first = min((row.candidates.start for row in rows if row.candidates), default=0)
    last = max((row.candidates.stop for row in rows if row.candidates), default=0)
    pieces, proposals = [row.pieces for row in rows], [row.proposals for row in rows]
    plan = StepPlan(
        rows=rows,
        attended=tuple(row.attended(piece) for row in sparse),
        dense_reason=reason,
        piece=piece,
        pieces=max(pieces),
        proposals=max(proposals),
        first_block=first,
        last_block=last,
        parts=parts,
        length=length,
    )
    if reason is not None:
        return plan
    fixed = [[*row.sink, *row.tail] for row in rows]
    widths = [len(row) for row in fixed]
    fixed_pieces = [row.fixed_pieces(piece) for row in rows]
    inside = None
    if any(row.candidates != rows[0].candidates for row in rows):
        slots = torch.arange(first, last, device=device)
        starts = torch.tensor([[row.candidates.start] for row in rows], device=device)
        stops = torch.tensor([[row.candidates.stop] for row in rows], device=device)
        inside = (slots >= starts) & (slots < stops)
    return dataclasses.replace(
        plan,
        fixed_index=torch.tensor(_padded(fixed, max(widths), 0), device=device),
        fixed_valid=_within(widths, device),
        fixed_pieces=torch.tensor(
            _padded(fixed_pieces, max(map(len, fixed_pieces)), -1), device=device
        ),
        shifts=torch.tensor([row.shift for row in rows], device=device),
        block_valid=inside,
        piece_valid=None if inside is None else inside.repeat_interleave(parts, 1),
        read_valid=_within(pieces, device),
        proposal_valid=_within(proposals, device),
    )


def token_positions(pieces: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    """Where the tokens of pieces stand in the cache, ``[B, H, C]`` -> ``[B, H, C, piece]``."""
    starts = pieces * plan.piece + plan.shifts[:, None, None]
    return starts.unsqueeze(-1) + torch.arange(plan.piece, device=pieces.device)


def seen_at(visible: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Which positions ``[B, H, ...]`` of a cache with ``visible`` tokens ``[B, L]`` are seen."""
    flat = positions.flatten(2)
    seen = visible[:, None].expand(-1, flat.shape[1], -1).gather(2, flat)
    return seen.view_as(positions)
