"""Audits: a sparse step beside the true attention of the same query."""

from __future__ import annotations

import dataclasses

import torch

from .anchor_config import AnchorConfig
from .block_choice import CachedTokens, fixed_log_mass
from .estimates import valid_shares
from .kernels import ops
from .selection import token_positions
from .token_reading import Selection


@dataclasses.dataclass
class Audit:
    """One sparse step of one layer beside its true attention.

    H_r selections are made: one per key/value head, or per query head.

    mass: share of the true attention mass that was read, ``[B, H]``.
    estimated: the share that the index believed to read, ``[B, H]``.
    recall: share of the chosen pieces that the oracle, which knows the true mass, chooses too,
        ``[B, H_r]``.
    output_error: distance of the attention output from the true one, over the latter's norm,
        ``[B, H]``; nan until attention was computed.
    starts: first tokens of the chosen pieces ``[B, H_r, k]``. piece: tokens of each.
    """

    mass: torch.Tensor
    estimated: torch.Tensor
    recall: torch.Tensor
    output_error: torch.Tensor
    starts: torch.Tensor
    piece: int

    def compare(self, sparse: torch.Tensor, dense: torch.Tensor) -> None:
        """Note the attention outputs ``[B, 1, H, D_v]`` of the selection and of everything."""
        sparse, dense = sparse.detach().float()[:, 0], dense.detach().float()[:, 0]
        norm = dense.norm(dim=-1).clamp(min=1e-12)
        self.output_error = ((sparse - dense).norm(dim=-1) / norm).cpu()


def audit_step(selection: Selection, tokens: CachedTokens, config: AnchorConfig) -> Audit:
    """Compare what a step reads with the true attention.

    Args:
        selection: what is read.
        tokens: the cache and the query.
        config: who selects.
    """
    plan = selection.plan
    query, keys = tokens.query, tokens.keys.states
    b, n_heads, _ = query.shape
    mass = ops.attention_mass(query, keys, tokens.scaling, tokens.visible, tokens.softcap)
    read = mass.gather(2, selection.positions.repeat_interleave(n_heads // keys.shape[1], 1))
    if selection.attended is not None:
        attended = selection.attended
        read = read * attended.repeat_interleave(n_heads // attended.shape[1], 1)

    choice = selection.choice
    estimates = choice.estimates.of_pieces(plan.parts)
    every = plan.first_piece + torch.arange(estimates.shape[3], device=query.device)
    positions = token_positions(every.expand(b, n_heads, -1), plan)
    last = mass.shape[2] - 1  # a row's last candidates may lie beyond the cache
    true = mass.gather(2, positions.flatten(2).clamp(max=last)).view(positions.shape).sum(-1)
    true = true.reshape(estimates.shape)
    shares = valid_shares(true.log(), plan.piece_valid, config.selection_heads == "layer")
    chosen = choice.is_read(plan)
    count = chosen.sum(-1, keepdim=True)
    rank = shares.argsort(-1, descending=True).argsort(-1)
    recall = (chosen & (rank < count)).sum(-1) / count.squeeze(-1)  # nan if none was chosen

    fixed = fixed_log_mass(tokens, plan, chosen.shape[1])
    total = torch.logaddexp(fixed, estimates.logsumexp(-1))
    held = estimates.masked_fill(~chosen.unsqueeze(2), float("-inf")).logsumexp(-1)
    estimated = (torch.logaddexp(fixed, held) - total).exp()
    starts = token_positions(choice.pieces, plan)[..., 0]
    return Audit(
        mass=read.sum(-1).cpu(),
        estimated=estimated.flatten(1).cpu(),
        recall=recall.cpu(),
        output_error=torch.full((b, n_heads), float("nan")),
        starts=starts.cpu(),
        piece=plan.piece,
    )
