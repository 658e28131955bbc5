"""Reading on until the skipped share of the attention mass is proven small."""

from __future__ import annotations

import math

import torch

from .anchor_index import AnchorIndex
from .block_choice import CachedTokens, Choice, fixed_log_mass
from .estimates import only_valid
from .selection import StepPlan, token_positions


def read_until_certain(
    index: AnchorIndex, tokens: CachedTokens, plan: StepPlan, choice: Choice
) -> tuple[Choice | None, torch.Tensor]:
    """Extend a choice until no query head can have skipped more than ``tolerance`` of its mass.

    With Z the true mass of what is read and U an upper bound of each skipped piece's mass, the
    skipped share is at most ``sum U / (sum U + Z)``. The bound is loose for heads that attend
    broadly: these read on for long, mostly to the end.

    Returns:
        The choice, or None when everything has to be read, and the proven bound of the skipped
        share, ``[B, H]``.
    """
    first = plan.first_piece
    bounds = index.upper_bounds(tokens.query, plan.first_block, plan.last_block, tokens.softcap)
    bounds = bounds.repeat_interleave(plan.parts, 3) + math.log(plan.piece)
    bounds = bounds.reshape(*choice.estimates.by_anchors.shape[:3], -1)
    bounds = only_valid(bounds, plan.piece_valid)
    shares = bounds.softmax(-1).nan_to_num_(0.0).sum(2)
    fixed = fixed_log_mass(tokens, plan, bounds.shape[1])
    pieces, read = choice.pieces, choice.is_read(plan)
    valid = choice.ranks()
    mass = torch.logaddexp(fixed, _read_mass(tokens, plan, pieces, valid))
    while True:
        unread = bounds.masked_fill(read.unsqueeze(2), float("-inf"))
        share = torch.sigmoid(unread.logsumexp(-1) - mass).flatten(1)
        left = int((unread > float("-inf")).any(2).sum(-1).max())
        if left == 0:
            return None, torch.zeros_like(share)
        if share.max() <= index.config.tolerance:
            return choice._replace(pieces=pieces, valid=None if valid.all() else valid), share
        # A head that has read everything goes on with invalid pieces, for the others' sake.
        largest = shares.masked_fill(read, -1.0).topk(min(pieces.shape[2], left))
        places, next_valid = largest.indices, largest.values >= 0
        next_pieces = places + first
        if plan.piece_valid is not None:
            next_valid &= plan.piece_valid[:, None].expand_as(read).gather(2, places)
        mass = torch.logaddexp(mass, _read_mass(tokens, plan, next_pieces, next_valid))
        read = read.scatter(2, places, next_valid | read.gather(2, places))
        pieces, valid = torch.cat((pieces, next_pieces), 2), torch.cat((valid, next_valid), 2)


def _read_mass(tokens, plan, pieces, valid) -> torch.Tensor:
    """True log mass of the pieces read, ``[B, H_r, g]``."""
    mass = tokens.log_mass(token_positions(pieces, plan))
    return mass.masked_fill(~valid.unsqueeze(2), float("-inf")).logsumexp(-1)
