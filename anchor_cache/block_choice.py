"""From a query to the blocks that it reads: anchors propose, sketches rank, coverage cuts.

Shapes as in :mod:`estimates`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .anchor_config import AnchorConfig
from .anchor_index import AnchorIndex
from .block_storage import GrowingStates
from .estimates import (
    Estimates,
    in_equal_pieces,
    only_valid,
    shares_to_choose_by,
    valid_shares,
)
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
    estimates: what the index believes about all candidates; None where nobody asks for it.
    """

    pieces: torch.Tensor
    valid: torch.Tensor | None
    estimates: Estimates | None

    def ranks(self) -> torch.Tensor:
        """:attr:`valid`, also where that is None."""
        if self.valid is None:
            return torch.ones_like(self.pieces, dtype=torch.bool)
        return self.valid

    def is_read(self, plan: StepPlan) -> torch.Tensor:
        """Which of the candidate pieces are read, ``[B, H_r, N]``."""
        candidates = plan.parts * (plan.last_block - plan.first_block)
        shape = (*self.pieces.shape[:2], candidates)
        read = torch.zeros(shape, dtype=torch.bool, device=self.pieces.device)
        return read.scatter_(2, self.pieces - plan.first_piece, self.ranks())

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Choice:
        """The same for changed batch rows or another device."""
        valid = None if self.valid is None else change(self.valid)
        estimates = None if self.estimates is None else self.estimates.map(change)
        return Choice(change(self.pieces), valid, estimates)


def fixed_log_mass(tokens: CachedTokens, plan: StepPlan, heads: int) -> torch.Tensor:
    """True log mass of the sinks and the window, ``[B, H_r, g]``."""
    fixed = plan.fixed_index[:, None, None].expand(tokens.query.shape[0], heads, 1, -1)
    valid = None if plan.fixed_valid is None else plan.fixed_valid[:, None, None]
    return tokens.log_mass(fixed, valid)[..., 0]


def choose_pieces(index: AnchorIndex, tokens: CachedTokens, plan: StepPlan) -> Choice:
    """What a query reads."""
    config = index.config
    whole_layer = config.selection_heads == "layer"
    by_anchors, centres = index.score(
        tokens.query, plan.first_block, plan.last_block, tokens.softcap
    )
    if config.selection_heads == "query":
        by_anchors, centres = (x.flatten(1, 2).unsqueeze(2) for x in (by_anchors, centres))
    if _asks_for_pieces_alone(config, plan) and not index.padded:
        pieces = index.choose(tokens.query, by_anchors, centres, plan, tokens.softcap)
        return Choice(pieces + plan.first_piece, None, None)
    by_anchors = only_valid(by_anchors, plan.block_valid)
    if config.refine is None:
        estimates = Estimates(by_anchors)
    elif plan.proposes_all:
        every = slice(plan.first_block, plan.last_block)
        refined = _refined(index, tokens, plan, every, centres)
        estimates = Estimates(by_anchors, None, only_valid(refined, plan.piece_valid))
    else:
        shares = valid_shares(by_anchors, plan.block_valid, whole_layer)
        blocks = ops.largest(shares, plan.proposals)
        chosen = blocks.unsqueeze(2).expand(-1, -1, centres.shape[2], -1)
        refined = _refined(
            index, tokens, plan, blocks + plan.first_block, centres.gather(3, chosen)
        )
        if plan.proposal_valid is not None:
            unrefined = in_equal_pieces(by_anchors.gather(3, chosen), plan.parts)
            own = plan.proposal_valid.repeat_interleave(plan.parts, 1)[:, None, None]
            refined = torch.where(own, refined, unrefined)
        estimates = Estimates(by_anchors, blocks, refined)
    shares, among = shares_to_choose_by(estimates, plan, whole_layer)
    best = ops.largest(shares, plan.pieces)
    best = best if among is None else among.gather(2, best)
    valid = None
    if plan.read_valid is not None:
        valid = plan.read_valid[:, None].expand_as(best)
    choice = Choice(best + plan.first_piece, valid, estimates)
    return choice if config.coverage is None else _cut_to_coverage(choice, tokens, plan, config)


def _asks_for_pieces_alone(config: AnchorConfig, plan: StepPlan) -> bool:
    """Whether all rows read the same number of pieces by their sketches, and that is all."""
    for_more = (config.coverage, config.tolerance, config.skipped)
    return (
        config.refine == "sketch"
        and config.selection_heads != "layer"
        and for_more == (None, None, None)
        and not config.audit_every
        and (plan.block_valid, plan.proposal_valid, plan.read_valid) == (None, None, None)
    )


def _refined(index, tokens, plan: StepPlan, blocks, centres) -> torch.Tensor:
    """Log mass of the pieces ``[B, H_r, g, parts C]`` of blocks ``[B, H_r, C]``, or of a run of
    blocks for every head, from their tokens' sketches or, as a control, from the keys."""
    if index.config.refine == "sketch":
        return index.score_sketches(tokens.query, blocks, centres, plan.piece, tokens.softcap)
    if isinstance(blocks, slice):
        blocks = torch.arange(blocks.start, blocks.stop, device=centres.device)
        blocks = blocks.expand(*centres.shape[:2], -1)
    return tokens.log_mass(token_positions(ops.pieces_of(blocks, plan.parts), plan))


def _cut_to_coverage(choice: Choice, tokens, plan: StepPlan, config) -> Choice:
    """Keep the fewest pieces that hold, with sinks and window, the wanted share of the mass."""
    estimates = choice.estimates.of_pieces(plan.parts)
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
