"""The choice of pieces by the compiled library (``csrc/best_candidates.h``)."""

from __future__ import annotations

import struct

import torch

from .dispatch import Implementation
from .native_calls import address, call, why_not_tensors
from .native_scores import score_sketches


def _why_not_choose(
    query, by_anchors, centres, bits, scales, proposals, pieces, piece, softcap=None
) -> str | None:
    reason = why_not_tensors(by_anchors)
    if reason is not None:
        return reason
    if by_anchors.dtype != torch.float32 or not by_anchors.is_contiguous():
        return "masses are to be fp32 and dense"
    n_blocks, size = by_anchors.shape[3], scales.shape[3]
    if not 0 < proposals <= n_blocks or not 0 < pieces * piece <= proposals * size:
        return "there are not so many to choose from"
    return score_sketches.why_not(query, bits, scales, centres, None, piece, False, softcap)


_CANDIDATES = struct.Struct("=5q6q")


def _best(
    masses: torch.Tensor,
    wanted: int,
    others: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    parts: int = 1,
    left: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best candidates of each selection, ``[B, H_r, wanted]``, by masses ``[B, H_r, g, C]``;
    the mass of those left goes to ``left``, ``[B, H_r, g]``."""
    b, selections, group, count = masses.shape
    places = masses.new_empty((b, selections, wanted), dtype=torch.int64)
    arguments = _CANDIDATES.pack(
        masses.data_ptr(),
        address(others),
        address(blocks),
        places.data_ptr(),
        address(left),
        b * selections,
        group,
        count,
        wanted,
        parts,
        torch.get_num_threads(),
    )
    call("anchor_best_candidates", arguments)
    return places


def _choose_pieces(
    query, by_anchors, centres, bits, scales, proposals, pieces, piece, softcap=None
) -> torch.Tensor:
    n_blocks = by_anchors.shape[3]
    if proposals == n_blocks:
        refined = score_sketches.run(query, bits, scales, centres, None, piece, False, softcap)
        return _best(refined, pieces)
    others = torch.empty_like(by_anchors[..., 0])
    blocks = _best(by_anchors, proposals, left=others)
    places = blocks.unsqueeze(2).expand(-1, -1, centres.shape[2], -1)
    centres = centres.gather(3, places)
    refined = score_sketches.run(query, bits, scales, centres, blocks, piece, False, softcap)
    return _best(refined, pieces, others, blocks, scales.shape[3] // piece)


choose_pieces = Implementation("native", _why_not_choose, _choose_pieces)
