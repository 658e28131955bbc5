"""What an index believes about the candidates of a step.

Shapes: H_r heads make a selection each, H_kv key/value heads or, with one selection per query
head, all H query heads; g = H / H_r query heads share one. N candidate pieces, of ``parts`` to a
block, lie between the sinks and the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .kernels import ops
from .selection import StepPlan


class Estimates(NamedTuple):
    """Log mass of the candidates: of whole blocks by their anchors, and of the pieces of some of
    them by something finer.

    by_anchors: ``[B, H_r, g, N / parts]``; -inf for blocks that a row does not have.
    proposed: the blocks that were looked at again, ``[B, H_r, C]``; None when all were, or none.
    refined: log mass of their pieces, ``[B, H_r, g, parts C]``; None when none were.
    """

    by_anchors: torch.Tensor
    proposed: torch.Tensor | None = None
    refined: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Estimates:
        """The same for changed batch rows or another device."""
        return Estimates(*(None if part is None else change(part) for part in self))

    def of_pieces(self, parts: int) -> torch.Tensor:
        """The best estimate of every candidate piece, ``[B, H_r, g, N]``. A block that was not
        looked at again has its mass in equal pieces."""
        if self.refined is None:
            return in_equal_pieces(self.by_anchors, parts)
        if self.proposed is None:
            return self.refined
        places = ops.pieces_of(self.proposed, parts).unsqueeze(2).expand_as(self.refined)
        return in_equal_pieces(self.by_anchors, parts).scatter(3, places, self.refined)

    def total(self) -> torch.Tensor:
        """Log mass of all candidates, ``[B, H_r, g, 1]``."""
        if self.refined is None:
            return self.by_anchors.logsumexp(-1, keepdim=True)
        if self.proposed is None:
            return self.refined.logsumexp(-1, keepdim=True)
        return ops.mass_with_refined(self.by_anchors, self.proposed, self.refined)


def in_equal_pieces(estimates: torch.Tensor, parts: int) -> torch.Tensor:
    """Log mass of blocks, ``[..., N]``, as that of their pieces, ``[..., parts N]``."""
    return estimates if parts == 1 else (estimates - math.log(parts)).repeat_interleave(parts, -1)


def only_valid(estimates: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Estimates ``[B, H_r, g, N]`` with -inf where ``valid`` ``[B, N]`` is False."""
    if valid is None:
        return estimates
    return estimates.masked_fill(~valid[:, None, None], float("-inf"))


def valid_shares(
    estimates: torch.Tensor,
    valid: torch.Tensor | None,
    whole_layer: bool = False,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each query head's share of the candidates' mass, summed over the heads that choose together.

    Args:
        estimates: estimated log mass ``[B, H_r, g, C]``, fp32.
        valid: which of them a row really has, ``[B, C]``; None for all. The others come last.
        whole_layer: whether all heads choose together.
        total: log mass of all candidates, ``[B, H_r, g, 1]``, if ``estimates`` are of some only.

    Returns:
        ``[B, H_r, C]``.
    """
    estimates = only_valid(estimates, valid)
    shares = ops.group_shares(estimates, total)
    if whole_layer:
        shares = shares.sum(1, keepdim=True).expand(-1, shares.shape[1], -1)
    # Shares of valid blocks can underflow to 0; others must still come after them.
    return shares if valid is None else shares.masked_fill(~valid[:, None], -1.0)


def shares_to_choose_by(
    estimates: Estimates, plan: StepPlan, whole_layer: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Shares of the pieces among which a step chooses, and which candidates these are.

    Returns:
        ``[B, H_r, C]`` as :func:`valid_shares` gives them, and the numbers of the pieces
        ``[B, H_r, C]``, None for all in order.
    """
    if estimates.proposed is None:
        every = estimates.of_pieces(plan.parts)
        return valid_shares(every, plan.piece_valid, whole_layer), None
    own = plan.proposal_valid
    own = None if own is None else own.repeat_interleave(plan.parts, 1)
    shares = valid_shares(estimates.refined, None, whole_layer, estimates.total())
    if own is not None:
        shares = shares.masked_fill(~own[:, None], -1.0)
    return shares, ops.pieces_of(estimates.proposed, plan.parts)
