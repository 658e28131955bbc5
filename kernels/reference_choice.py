"""From estimated masses to the pieces that a step reads, in plain PyTorch.

Shapes: H_r heads make a selection each, H_kv key/value heads or, with one selection per query
head, all H query heads; g = H / H_r query heads share one.
"""

from __future__ import annotations

import functools

import torch

from .dispatch import Implementation
from .reference_sketch import score_sketches


def group_shares(estimates: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """Each query head's share of the mass, summed over the heads that choose together.

    Args:
        estimates: log mass ``[B, H_r, g, C]``, fp32.
        total: log mass of all candidates, ``[B, H_r, g, 1]``; None if ``estimates`` are of all.

    Returns:
        ``[B, H_r, C]``; 0 for a head whose candidates have no mass at all.
    """
    shares = estimates.softmax(-1) if total is None else (estimates - total).exp_()
    return shares.nan_to_num_(0.0).sum(2)


def largest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the largest numbers stand, the largest first: ``[..., C]`` -> ``[..., count]`` int64.

    Of equal ones the first; on accelerators, where that takes longer, any.
    """
    if numbers.device.type != "cpu":
        return numbers.topk(count).indices
    return numbers.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def pieces_of(blocks: torch.Tensor, parts: int) -> torch.Tensor:
    """The pieces of blocks, ``[B, H, C]`` -> ``[B, H, parts C]``."""
    if parts == 1:
        return blocks
    offsets = torch.arange(parts, device=blocks.device)
    return (blocks.unsqueeze(-1) * parts + offsets).flatten(2)


def mass_with_refined(
    by_anchors: torch.Tensor, blocks: torch.Tensor, refined: torch.Tensor
) -> torch.Tensor:
    """Log mass of all candidates when ``blocks`` ``[B, H_r, C]`` of them have finer estimates,
    ``[B, H_r, g, parts C]``, than ``by_anchors``, ``[B, H_r, g, N]``: ``[B, H_r, g, 1]``."""
    places = blocks.unsqueeze(2).expand(-1, -1, by_anchors.shape[2], -1)
    others = by_anchors.scatter(3, places, float("-inf"))
    return torch.cat((others, refined), 3).logsumexp(-1, keepdim=True)


def choose_pieces(
    query: torch.Tensor,
    by_anchors: torch.Tensor,
    centres: torch.Tensor,
    bits: torch.Tensor,
    scales: torch.Tensor,
    proposals: int,
    pieces: int,
    piece: int,
    softcap: float | None = None,
) -> torch.Tensor:
    """Choose pieces of candidate blocks: anchors propose blocks, sketches rank their pieces.

    Args:
        query: ``[B, H, D]``, times the softmax scale.
        by_anchors: log mass of the candidate blocks by their anchors, ``[B, H_r, g, N]``, fp32.
        centres: logits of their centres, likewise.
        bits, scales: sketches of the candidates, as :func:`score_sketches` takes them.
        proposals: how many blocks are ranked by their sketches, at most N.
        pieces: how many pieces are chosen, at most those of the proposals.
        piece: tokens per piece.
        softcap: of the logits, if the model has one.

    Returns:
        The chosen pieces, numbered from the first candidate's first one, ``[B, H_r, pieces]``
        int64, in no order.
    """
    arguments = (query, by_anchors, centres, bits, scales, proposals, pieces, piece, softcap)
    return _choose(score_sketches, *arguments)


def _choose(
    score, query, by_anchors, centres, bits, scales, proposals, pieces, piece, softcap=None
) -> torch.Tensor:
    if proposals == by_anchors.shape[3]:
        refined = score(query, bits, scales, centres, None, piece, softcap=softcap)
        return largest(group_shares(refined), pieces)
    blocks = largest(group_shares(by_anchors), proposals)
    places = blocks.unsqueeze(2).expand(-1, -1, centres.shape[2], -1)
    centres = centres.gather(3, places)
    refined = score(query, bits, scales, centres, blocks, piece, softcap=softcap)
    shares = group_shares(refined, mass_with_refined(by_anchors, blocks, refined))
    return pieces_of(blocks, scales.shape[3] // piece).gather(2, largest(shares, pieces))


def choosing_by(sketches: Implementation) -> Implementation:
    """:func:`choose_pieces` with a faster :func:`score_sketches`."""

    def why_not(
        query, by_anchors, centres, bits, scales, proposals, pieces, piece, softcap=None
    ) -> str | None:
        return sketches.why_not(query, bits, scales, centres, None, piece, False, softcap)

    return Implementation(sketches.name, why_not, functools.partial(_choose, sketches.run))


def no_pieces(query, by_anchors, centres, bits, scales, proposals, pieces, *_, **__):
    """A tensor of the shape that :func:`choose_pieces` gives, for tracing."""
    return by_anchors.new_empty((*by_anchors.shape[:2], pieces), dtype=torch.int64)
