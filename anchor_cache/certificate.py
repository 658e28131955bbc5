"""Reading on until the skipped share of the attention mass is proven small."""

from __future__ import annotations

import torch

from .anchor_index import AnchorIndex
from .block_choice import CachedTokens, Choice, fixed_log_mass
from .selection import StepPlan, token_positions


def read_until_certain(
    index: AnchorIndex, tokens: CachedTokens, plan: StepPlan, choice: Choice
) -> tuple[Choice | None, torch.Tensor]:
    """Extend a choice until no query head can have skipped more than ``tolerance`` of its mass.

    With Z the true mass of what is read and U an upper bound of each skipped block's mass, the
    skipped share is at most ``sum U / (sum U + Z)``. The bound is loose for heads that attend
    broadly: these read on for long, mostly to the end.

    Returns:
        The choice, or None when everything has to be read, and the proven bound of the skipped
        share, ``[B, H]``.
    """
    heads, first = choice.slots.shape[1], plan.first_candidate
    bounds = index.upper_bounds(tokens.query, first, plan.last_candidate, tokens.softcap)
    bounds = bounds.reshape(choice.estimates.shape)
    if plan.candidate_valid is not None:
        bounds = bounds.masked_fill(~plan.candidate_valid[:, None, None], float("-inf"))
    shares = bounds.softmax(-1).nan_to_num_(0.0).sum(2)
    fixed = fixed_log_mass(tokens, plan, heads)
    slots, read = choice.slots, choice.is_read(first)
    valid = torch.ones_like(slots, dtype=torch.bool) if choice.valid is None else choice.valid
    mass = torch.logaddexp(fixed, _read_mass(tokens, plan, slots, valid, index.config.block_size))
    while True:
        unread = bounds.masked_fill(read.unsqueeze(2), float("-inf"))
        share = torch.sigmoid(unread.logsumexp(-1) - mass).flatten(1)
        more = min(slots.shape[2], bounds.shape[-1] - slots.shape[2])
        if more == 0 or (unread == float("-inf")).all():
            return None, torch.zeros_like(share)
        if share.max() <= index.config.tolerance:
            return Choice(slots, None if valid.all() else valid, choice.estimates), share
        # A head that has read everything goes on with invalid blocks, for the others' sake.
        largest = shares.masked_fill(read, -1.0).topk(more)
        places, next_valid = largest.indices, largest.values >= 0
        next_slots = places + first
        if plan.candidate_valid is not None:
            next_valid &= plan.candidate_valid[:, None].expand_as(read).gather(2, places)
        mass = torch.logaddexp(
            mass, _read_mass(tokens, plan, next_slots, next_valid, index.config.block_size)
        )
        read = read.scatter(2, places, next_valid | read.gather(2, places))
        slots, valid = torch.cat((slots, next_slots), 2), torch.cat((valid, next_valid), 2)


def _read_mass(tokens, plan, slots, valid, block_size) -> torch.Tensor:
    """True log mass of the blocks read, ``[B, H_r, g]``."""
    mass = tokens.log_mass(token_positions(slots, plan, block_size))
    return mass.masked_fill(~valid.unsqueeze(2), float("-inf")).logsumexp(-1)
