"""From a query to the blocks that it reads: anchors propose, sketches rank, coverage cuts.

Shapes: H_r heads make a selection each, H_kv key/value heads or, with one selection per query
head, all H query heads; g = H / H_r query heads share one. N candidate pieces, of ``parts`` to a
block, lie between the sinks and the window.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .anchor_index import AnchorIndex
from .block_storage import GrowingStates
from .kernels import ops
from .selection import StepPlan, seen_at, token_positions


class CachedTokens(NamedTuple):
    """What a layer holds at a decoding step, and the query ``[B, H, D]`` that wants to read it.

    visible: ``[B, L]``, False for padding; None when all tokens are real.
    """

    query: torch.Tensor
    keys: GrowingStates
    values: GrowingStates
    visible: torch.Tensor | None
    scaling: float
    softcap: float | None

    def log_mass(self, positions: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """True log mass of groups of tokens, ``[B, H_r, N, n]`` -> ``[B, H_r, g, N]``; ``valid``,
        of the same shape or broadcast to it, says which of them count."""
        b, heads, n_groups, size = positions.shape
        keys = self.keys.gather(positions.reshape(b, self.keys.shape[1], -1))
        if self.visible is not None:
            seen = seen_at(self.visible, positions)
            valid = seen if valid is None else seen & valid
        keys = keys.reshape(b, heads, n_groups, size, -1)
        return ops.log_mass(self.query.float() * self.scaling, keys, valid, self.softcap)


class Choice(NamedTuple):
    """What a step reads.

    pieces: ``[B, H_r, k]``, the best first where rows or heads read different numbers.
    valid: ``[B, H_r, k]``, False where a head reads fewer; None when all are read.
    estimates: estimated log mass of all candidate pieces, ``[B, H_r, g, N]``; -inf for those that
        a row does not have.
    by_anchors: that of their blocks by anchors alone, ``[B, H_r, g, N / parts]``, likewise.
    """

    pieces: torch.Tensor
    valid: torch.Tensor | None
    estimates: torch.Tensor
    by_anchors: torch.Tensor

    def ranks(self) -> torch.Tensor:
        """:attr:`valid`, also where that is None."""
        if self.valid is None:
            return torch.ones_like(self.pieces, dtype=torch.bool)
        return self.valid

    def is_read(self, plan: StepPlan) -> torch.Tensor:
        """Which of the candidate pieces are read, ``[B, H_r, N]``."""
        b, heads, _, n_pieces = self.estimates.shape
        read = torch.zeros((b, heads, n_pieces), dtype=torch.bool, device=self.pieces.device)
        return read.scatter_(2, self.pieces - plan.first_piece, self.ranks())


def fixed_log_mass(tokens: CachedTokens, plan: StepPlan, heads: int) -> torch.Tensor:
    """True log mass of the sinks and the window, ``[B, H_r, g]``."""
    fixed = plan.fixed_index[:, None, None].expand(tokens.query.shape[0], heads, 1, -1)
    valid = None if plan.fixed_valid is None else plan.fixed_valid[:, None, None]
    return tokens.log_mass(fixed, valid)[..., 0]


def only_valid(estimates: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Estimates ``[B, H_r, g, N]`` with -inf where ``valid`` ``[B, N]`` is False."""
    if valid is None:
        return estimates
    return estimates.masked_fill(~valid[:, None, None], float("-inf"))


def group_shares(
    estimates: torch.Tensor, valid: torch.Tensor | None, whole_layer: bool = False
) -> torch.Tensor:
    """Each query head's share of the candidates' mass, summed over the heads that choose together.

    Args:
        estimates: estimated log mass ``[B, H_r, g, N]``, fp32.
        valid: which candidates a row really has, ``[B, N]``; None for all. The others come last.
        whole_layer: whether all heads choose together.

    Returns:
        ``[B, H_r, N]``.
    """
    estimates = only_valid(estimates, valid)
    # A row without candidates has only -inf: its softmax is nan, and its choice is masked later.
    shares = estimates.softmax(-1).nan_to_num_(0.0).sum(2)
    if whole_layer:
        shares = shares.sum(1, keepdim=True).expand(-1, shares.shape[1], -1)
    # Shares of valid blocks can underflow to 0; others must still come after them.
    return shares if valid is None else shares.masked_fill(~valid[:, None], -1.0)


def choose_pieces(index: AnchorIndex, tokens: CachedTokens, plan: StepPlan) -> Choice:
    """What a query reads."""
    config = index.config
    whole_layer = config.selection_heads == "layer"
    estimates, centres = index.score(
        tokens.query, plan.first_block, plan.last_block, tokens.softcap
    )
    if config.selection_heads == "query":
        estimates, centres = (x.flatten(1, 2).unsqueeze(2) for x in (estimates, centres))
    proposed, by_anchors = None, estimates
    if config.refine is not None and plan.proposes_all:
        every = slice(plan.first_block, plan.last_block)
        estimates = _refined(index, tokens, plan, every, centres)
    elif config.refine is not None:
        shares = group_shares(estimates, plan.block_valid, whole_layer)
        blocks = shares.topk(plan.proposals, sorted=plan.proposal_valid is not None).indices
        chosen = blocks.unsqueeze(2).expand(-1, -1, centres.shape[2], -1)
        refined = _refined(
            index, tokens, plan, blocks + plan.first_block, centres.gather(3, chosen)
        )
        # A block that was not proposed has its mass in equal pieces.
        estimates = (estimates - math.log(plan.parts)).repeat_interleave(plan.parts, 3)
        proposed = _pieces_of(blocks, plan.parts)
        places = proposed.unsqueeze(2).expand(-1, -1, centres.shape[2], -1)
        if plan.proposal_valid is not None:
            own = plan.proposal_valid.repeat_interleave(plan.parts, 1)[:, None, None]
            refined = torch.where(own, refined, estimates.gather(3, places))
        estimates = estimates.scatter(3, places, refined)
    shares = group_shares(estimates, plan.piece_valid, whole_layer)
    ranked = config.coverage is not None or plan.read_valid is not None
    if proposed is None:
        best = shares.topk(plan.pieces, sorted=ranked).indices
    else:
        among = shares.gather(2, proposed)
        if plan.proposal_valid is not None:
            own = plan.proposal_valid.repeat_interleave(plan.parts, 1)
            among = among.masked_fill(~own[:, None], -1.0)
        best = proposed.gather(2, among.topk(plan.pieces, sorted=ranked).indices)
    valid = None
    if plan.read_valid is not None:
        valid = plan.read_valid[:, None].expand_as(best)
    choice = Choice(
        pieces=best + plan.first_piece,
        valid=valid,
        estimates=only_valid(estimates, plan.piece_valid),
        by_anchors=only_valid(by_anchors, plan.block_valid),
    )
    return choice if config.coverage is None else _cut_to_coverage(choice, tokens, plan, config)


def _pieces_of(blocks: torch.Tensor, parts: int) -> torch.Tensor:
    """The pieces of blocks, ``[B, H, C]`` -> ``[B, H, parts C]``."""
    offsets = torch.arange(parts, device=blocks.device)
    return (blocks.unsqueeze(-1) * parts + offsets).flatten(2)


def _refined(index, tokens, plan: StepPlan, blocks, centres) -> torch.Tensor:
    """Log mass of the pieces ``[B, H_r, g, parts C]`` of blocks ``[B, H_r, C]``, or of a run of
    blocks for every head, from their tokens' sketches or, as a control, from the keys."""
    if index.config.refine == "sketch":
        return index.score_sketches(tokens.query, blocks, centres, plan.piece, tokens.softcap)
    if isinstance(blocks, slice):
        blocks = torch.arange(blocks.start, blocks.stop, device=centres.device)
        blocks = blocks.expand(*centres.shape[:2], -1)
    return tokens.log_mass(token_positions(_pieces_of(blocks, plan.parts), plan))


def _cut_to_coverage(choice: Choice, tokens, plan: StepPlan, config) -> Choice:
    """Keep the fewest pieces that hold, with sinks and window, the wanted share of the mass."""
    estimates = choice.estimates
    fixed = fixed_log_mass(tokens, plan, estimates.shape[1])
    total = torch.logaddexp(fixed, estimates.logsumexp(-1))
    places = (choice.pieces - plan.first_piece).unsqueeze(2).expand(-1, -1, fixed.shape[2], -1)
    held = (estimates.gather(3, places) - total.unsqueeze(-1)).exp().cumsum(-1)
    held = torch.nn.functional.pad(held, (1, 0)) + (fixed - total).exp().unsqueeze(-1)
    held = held.mean(2)  # over the query heads that share a selection
    if config.selection_heads == "layer":
        held = held.mean(1, keepdim=True).expand_as(held)
    needed = held[..., :-1] < config.coverage
    # Rows that alone would be dense are read whole.
    whole = [row.is_whole for row in plan.rows]
    if any(whole):
        needed |= torch.tensor(whole, device=needed.device)[:, None, None]
    valid = needed if choice.valid is None else needed & choice.valid
    pieces = choice.pieces
    if pieces.device.type == "cpu":  # elsewhere it would have to wait for the device
        width = max(int(valid.sum(-1).max()), 1)
        pieces, valid = pieces[..., :width], valid[..., :width]
    return choice._replace(pieces=pieces, valid=valid)
