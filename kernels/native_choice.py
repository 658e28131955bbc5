"""The choice of pieces by the compiled library (``csrc/best_candidates.h``)."""

from __future__ import annotations

import struct

import torch

from . import native
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


def _why_not_largest(numbers, count) -> str | None:
    reason = why_not_tensors(numbers)
    if reason is not None:
        return reason
    if numbers.dtype != torch.float32 or not numbers.is_contiguous():
        return "numbers are to be fp32 and dense"
    if not 0 < count <= numbers.shape[-1]:
        return "there are not so many to choose from"
    return native.why_unavailable()


_NUMBERS = struct.Struct("=5q")


def _largest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    places = numbers.new_empty((*numbers.shape[:-1], count), dtype=torch.int64)
    rows, among = numbers.shape[:-1].numel(), numbers.shape[-1]
    call(
        "anchor_largest",
        _NUMBERS.pack(numbers.data_ptr(), places.data_ptr(), rows, among, count),
    )
    best_first = numbers.gather(-1, places).sort(dim=-1, descending=True, stable=True).indices
    return places.gather(-1, best_first)


largest = Implementation("native", _why_not_largest, _largest)


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
