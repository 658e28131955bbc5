"""Scores of anchors and sketches, and the best of them, by the compiled library."""

from __future__ import annotations

import struct

import torch

from . import native
from .dispatch import Implementation
from .native_calls import FLOATS, TYPES, address, call, why_not_tensors
from .reference_sketch import sketch_rotation


def _why_not_anchors(query, anchors, offsets, scales=None, softcap=None) -> str | None:
    reason = why_not_tensors(query, anchors, offsets, scales)
    if reason is not None:
        return reason
    if query.dtype not in FLOATS or anchors.dtype not in TYPES:
        return f"queries of {query.dtype}, anchors of {anchors.dtype}"
    if offsets.dtype != torch.float32 or (scales is not None and scales.dtype != torch.float32):
        return "offsets and scales are to be fp32"
    if query.stride(2) != 1 or anchors.stride(4) != 1:
        return "the last dimension is not dense"
    b, n_kv_heads, n_blocks, n_anchors, dim = anchors.shape
    if (
        query.shape != (b, query.shape[1], dim)
        or query.shape[1] % n_kv_heads
        or offsets.shape != anchors.shape[:4]
        or (scales is not None and scales.shape != anchors.shape[:4])
    ):
        return "the shapes do not fit each other"
    if 0 in anchors.shape:
        return "there are no anchors"
    return native.why_unavailable()


_ANCHORS = struct.Struct("=6q6q2q4q4q4q3qd")


def _score_anchors(
    query, anchors, offsets, scales=None, softcap=None
) -> tuple[torch.Tensor, torch.Tensor]:
    b, n_kv_heads, n_blocks, n_anchors, dim = anchors.shape
    heads = query.shape[1]
    shape = (b, n_kv_heads, heads // n_kv_heads, n_blocks)
    scores = query.new_empty(shape, dtype=torch.float32)
    means = query.new_empty(shape, dtype=torch.float32)
    arguments = _ANCHORS.pack(
        query.data_ptr(),
        anchors.data_ptr(),
        offsets.data_ptr(),
        address(scales),
        scores.data_ptr(),
        means.data_ptr(),
        b,
        heads,
        n_kv_heads,
        n_blocks,
        n_anchors,
        dim,
        *query.stride()[:2],
        *anchors.stride()[:4],
        *offsets.stride(),
        *((0, 0, 0, 0) if scales is None else scales.stride()),
        TYPES[query.dtype],
        TYPES[anchors.dtype],
        torch.get_num_threads(),
        softcap or 0.0,
    )
    call("anchor_score_anchors", arguments)
    return scores, means


score_anchors = Implementation("native", _why_not_anchors, _score_anchors)


def _why_not_sketches(
    query, bits, scales, centres, slots=None, piece=None, padded=False, softcap=None
) -> str | None:
    reason = why_not_tensors(query, bits, scales, centres, slots)
    if reason is not None:
        return reason
    if bits.dtype != torch.uint8 or scales.dtype not in (torch.float16, torch.float32):
        return f"bits of {bits.dtype}, scales of {scales.dtype}"
    if centres.dtype != torch.float32 or (slots is not None and slots.dtype != torch.int64):
        return "centres are to be fp32, slots int64"
    if bits.stride(3) != 1 or scales.stride(3) != 1:
        return "the last dimension is not dense"
    b, heads, dim = query.shape
    _, n_kv_heads, n_stored, size = scales.shape
    _, selections, group, n_blocks = centres.shape
    planes, rest = divmod(bits.shape[3], max(size * -(-dim // 8), 1))
    if (
        bits.shape[:3] != scales.shape[:3]
        or centres.shape != (b, selections, group, n_blocks)
        or selections * group != heads
        or selections % n_kv_heads
        or rest
        or not 1 <= planes <= 8
        or size % (size if piece is None else piece)
        or (slots is None and n_stored != n_blocks)
        or (slots is not None and slots.shape != (b, selections, n_blocks))
    ):
        return "the shapes do not fit each other"
    return native.why_unavailable()


_SKETCHES = struct.Struct("=6q10q2q3q3q4q3q2qd")


def _score_sketches(
    query, bits, scales, centres, slots=None, piece=None, padded=False, softcap=None
) -> torch.Tensor:
    b, heads, dim = query.shape
    _, n_kv_heads, n_stored, size = scales.shape
    _, selections, group, n_blocks = centres.shape
    piece = size if piece is None else piece
    width = bits.shape[3] // size
    scores = query.new_empty(
        (b, selections, group, n_blocks * (size // piece)), dtype=torch.float32
    )
    rotated = (query.float() @ sketch_rotation(dim, query.device)).contiguous()
    arguments = _SKETCHES.pack(
        rotated.data_ptr(),
        bits.data_ptr(),
        scales.data_ptr(),
        centres.data_ptr(),
        address(slots),
        scores.data_ptr(),
        b,
        heads,
        selections,
        n_kv_heads,
        dim,
        n_stored,
        n_blocks,
        size,
        width,
        width // -(-dim // 8),
        piece,
        padded,
        *bits.stride()[:3],
        *scales.stride()[:3],
        *centres.stride(),
        *((0, 0, 0) if slots is None else slots.stride()),
        TYPES[scales.dtype],
        torch.get_num_threads(),
        softcap or 0.0,
    )
    call("anchor_score_sketches", arguments)
    return scores


score_sketches = Implementation("native", _why_not_sketches, _score_sketches)


def _why_not_top(shares, n_best) -> str | None:
    reason = why_not_tensors(shares)
    if reason is not None:
        return reason
    if shares.dtype != torch.float32 or shares.dim() != 3 or shares.stride(2) != 1:
        return "shares are to be fp32, of three dimensions, the last one dense"
    if not 0 < n_best <= shares.shape[2]:
        return f"n_best={n_best} of {shares.shape[2]}"
    return native.why_unavailable()


_TOP = struct.Struct("=2q4q2qq")


def _top_pieces(shares, n_best) -> torch.Tensor:
    b, heads, n_pieces = shares.shape
    chosen = shares.new_empty((b, heads, n_best), dtype=torch.int64)
    arguments = _TOP.pack(
        shares.data_ptr(),
        chosen.data_ptr(),
        b,
        heads,
        n_pieces,
        n_best,
        *shares.stride()[:2],
        torch.get_num_threads(),
    )
    call("anchor_top_pieces", arguments)
    return chosen


top_pieces = Implementation("native", _why_not_top, _top_pieces)
