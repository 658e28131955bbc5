"""From chosen blocks to what attention is given: token positions, masks, skipped blocks' means."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .anchor_config import AnchorConfig
from .anchor_index import AnchorIndex
from .block_choice import CachedTokens, Choice
from .patches.attention import additive_mask
from .patches.readings import BlockReading, Reading
from .selection import StepPlan, seen_at, token_positions


class Selection(NamedTuple):
    """The tokens that a step reads.

    positions: ``[B, H_kv, S]``: sinks and window, then the chosen pieces.
    attended: which of them each head attends to, ``[B, H_kv, S]`` or, with one selection per
        query head, ``[B, H, S]``; None for all.
    length: tokens in the cache.
    plan: the step that it was made for.
    choice: the pieces.
    """

    positions: torch.Tensor
    attended: torch.Tensor | None
    length: int
    plan: StepPlan
    choice: Choice

    def grown_to(self, length: int, visible: torch.Tensor | None) -> Selection:
        """The same selection with the tokens that have come since."""
        b, heads, _ = self.positions.shape
        new = torch.arange(self.length, length, device=self.positions.device)
        positions = torch.cat((self.positions, new.expand(b, heads, -1)), 2)
        attended = self.attended
        if attended is not None:
            attended = torch.nn.functional.pad(attended, (0, len(new)), value=True)
        if visible is not None:  # a mask may hide by now what it did not hide before
            seen = seen_at(visible, positions)
            if attended is None:
                attended = seen
            else:
                attended = attended & seen.repeat_interleave(attended.shape[1] // heads, 1)
        return self._replace(
            positions=positions,
            attended=attended,
            length=length,
        )

    def map(self, change) -> Selection:
        """The same for changed batch rows or another device."""
        attended = None if self.attended is None else change(self.attended)
        return self._replace(
            positions=change(self.positions), attended=attended, choice=self.choice.map(change)
        )


def select_tokens(choice: Choice, tokens: CachedTokens, plan: StepPlan) -> Selection:
    """Lay out the tokens of the chosen pieces behind the ones that are always read."""
    visible, n_kv_heads = tokens.visible, tokens.keys.shape[1]
    b, heads, _ = choice.pieces.shape
    chosen = token_positions(choice.pieces, plan).reshape(b, n_kv_heads, -1)
    fixed = plan.fixed_index[:, None].expand(b, n_kv_heads, -1)
    positions = torch.cat((fixed, chosen), 2)
    attended = None
    if choice.valid is not None or visible is not None:
        valid = choice.ranks().repeat_interleave(plan.piece, 2).reshape(b, n_kv_heads, -1)
        ends = torch.ones_like(fixed, dtype=torch.bool)
        if plan.fixed_valid is not None:
            ends = plan.fixed_valid[:, None].expand_as(fixed)
        attended = torch.cat((ends, valid), 2)
        if visible is not None:
            attended = attended & seen_at(visible, positions)
    if heads > n_kv_heads:
        attended = _own_part(attended, positions, fixed.shape[2], heads)
    return Selection(positions, attended, plan.length, plan, choice)


def tokens_attended(choice: Choice, plan: StepPlan, config: AnchorConfig) -> tuple[float, ...]:
    """Tokens that each row attends to which leaves something out, mean over heads."""
    if config.coverage is None and config.tolerance is None:
        return plan.attended
    read = choice.ranks().sum(2).float().mean(1)
    rows = plan.rows * (len(read) if len(plan.rows) == 1 else 1)
    return tuple(
        row.attended(plan.piece) + (count - row.pieces) * plan.piece
        for row, count in zip(rows, read.tolist(), strict=True)
        if not row.is_whole
    )


def _own_part(attended, positions, n_fixed: int, heads: int) -> torch.Tensor:
    """Let each query head see, beside the fixed tokens, only its own part of its group's pieces."""
    b, n_kv_heads, total = positions.shape
    group = heads // n_kv_heads
    place = torch.arange(total, device=positions.device)
    owner = torch.div(place - n_fixed, (total - n_fixed) // group, rounding_mode="floor")
    own = (place < n_fixed) | (owner == torch.arange(group, device=place.device)[:, None])
    own = own.repeat(n_kv_heads, 1).expand(b, heads, total)
    return own if attended is None else own & attended.repeat_interleave(group, 1)


def blocks_to_read(
    choice: Choice, tokens: CachedTokens, plan: StepPlan, gather: Callable[[], Reading]
) -> BlockReading:
    """What is read, where it lies: the pieces of sinks and window, then the chosen ones."""
    pieces = choice.pieces
    if choice.valid is not None:
        pieces = pieces.masked_fill(~choice.valid, -1)
    fixed = plan.fixed_pieces[:, None].expand(*pieces.shape[:2], -1)
    shifts = plan.shifts.expand(len(pieces)) if any(row.shift for row in plan.rows) else None
    return BlockReading(
        keys=tokens.keys.states,
        values=tokens.values.states,
        blocks=torch.cat((fixed, pieces), 2),
        block_size=plan.piece,
        shifts=shifts,
        visible=tokens.visible,
        gather=gather,
    )


def reading_of(selection: Selection, tokens: CachedTokens, mask: torch.Tensor | None) -> Reading:
    """Gather the selected keys and values, and their mask ``[B, H, 1, S]`` if one is needed.

    Args:
        selection: what is read.
        tokens: of what.
        mask: the mask of the whole cache, boolean or additive, if there is one.
    """
    positions, attended = selection.positions, selection.attended
    keys, values = tokens.keys.gather(positions), tokens.values.gather(positions)
    if attended is None:
        return Reading(keys, values, None)
    n_heads = tokens.query.shape[1]
    attended = attended.repeat_interleave(n_heads // attended.shape[1], 1).unsqueeze(2)
    if mask is None or mask.dtype == torch.bool:
        return Reading(keys, values, attended)
    row = mask[:, :, -1].expand(*positions.shape[:2], -1).gather(2, positions)
    row = row.repeat_interleave(n_heads // row.shape[1], 1).unsqueeze(2)
    return Reading(keys, values, row.masked_fill(~attended, torch.finfo(mask.dtype).min))


def with_skipped_means(
    reading: Reading, index: AnchorIndex, choice: Choice, plan: StepPlan, query: torch.Tensor
) -> Reading:
    """Let what was skipped speak through its blocks' mean values (RetroInfer's estimation zone).

    Each query head gets one more token: its value is the skipped blocks' mean value, weighted by
    the lower bound of their mass, and an additive mask gives it that mass, whatever its key, here
    zero.
    """
    b, n_heads, _ = query.shape
    n_kv_heads, group = reading.keys.shape[1], n_heads // reading.keys.shape[1]
    skipped = ~choice.is_read(plan)
    # Anchors bound the mass from below. Sketches are nearer to it, but their noise would add up
    # over all that is skipped, and outweigh what is read.
    share = skipped.unflatten(2, (-1, plan.parts)).float().mean(-1)
    estimates = (choice.estimates.by_anchors + share.log().unsqueeze(2)).reshape(
        b, n_kv_heads, group, -1
    )
    mass = estimates.logsumexp(-1)
    means = index.mean_values(plan.first_block, plan.last_block)
    weights = (estimates - mass.unsqueeze(-1)).exp().nan_to_num_(0.0)
    value = torch.matmul(weights, means.float()).to(reading.values.dtype)
    key = reading.keys.new_zeros((*value.shape[:3], reading.keys.shape[-1]))

    dtype = query.dtype
    lowest = torch.finfo(dtype).min
    read = reading.mask
    if read is None:
        read = torch.zeros((b, n_heads, 1, reading.keys.shape[2]), dtype=dtype, device=key.device)
    elif read.dtype == torch.bool:
        read = additive_mask(read, dtype)
    own = torch.full((b, n_kv_heads, group, group), lowest, dtype=dtype, device=key.device)
    own.diagonal(dim1=2, dim2=3).copy_(mass.clamp(min=lowest))
    mask = torch.cat((read, own.flatten(1, 2).unsqueeze(2)), 3)
    return Reading(torch.cat((reading.keys, key), 2), torch.cat((reading.values, value), 2), mask)
