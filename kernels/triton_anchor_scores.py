"""Scores of anchors in Triton: every anchor is read once, for all query heads that share it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_dtypes import FLOATS, operand_dtype
from .triton_softcap import softcapped

_LARGEST_HEAD = 1024
_LARGEST_GROUP = 128
_MOST_ROWS = 65535  # of a grid, beyond its first axis


# What changes with the length of the context, and would be compiled for anew without any gain.
@triton.jit(do_not_specialize=["n_blocks", "offsets_b", "offsets_h", "scales_b", "scales_h"])
def _score_anchors_kernel(
    query,
    anchors,
    offsets,
    scales,
    scores,
    means,
    n_blocks,
    n_anchors,
    n_kv_heads,
    group,
    anchors_b,
    anchors_h,
    anchors_n,
    anchors_p,
    offsets_b,
    offsets_h,
    offsets_n,
    offsets_p,
    scales_b,
    scales_h,
    scales_n,
    scales_p,
    softcap,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    row = tl.program_id(1)
    batch, head = (row // n_kv_heads).to(tl.int64), (row % n_kv_heads).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    channel = tl.arange(0, DIM_PADDED)
    member = tl.arange(0, GROUP_PADDED)
    here, inside, in_group = block < n_blocks, channel < DIM, member < group
    block, row = block.to(tl.int64), row.to(tl.int64)

    rows = (row * group + member)[:, None] * DIM + channel[None, :]
    own = tl.load(query + rows, mask=in_group[:, None] & inside[None, :], other=0.0).to(OPERAND)

    anchors += batch * anchors_b + head * anchors_h
    offsets += batch * offsets_b + head * offsets_h
    if scales is not None:
        scales += batch * scales_b + head * scales_h
    tile = anchors + block[:, None] * anchors_n + channel[None, :]
    tile_mask = here[:, None] & inside[None, :]

    best = tl.full((GROUP_PADDED, BLOCKS), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED, BLOCKS), tl.float32)
    for p in range(n_anchors):
        # All loads first: none is moved up across the barriers of the product.
        states = tl.load(tile + p * anchors_p, mask=tile_mask, other=0)
        offset = tl.load(offsets + block * offsets_n + p * offsets_p, mask=here, other=0.0)
        if scales is not None:
            scale = tl.load(scales + block * scales_n + p * scales_p, mask=here, other=0.0)
        logits = tl.dot(own, tl.trans(states.to(OPERAND)), input_precision="ieee")
        if scales is not None:
            logits *= scale[None, :]
        bound = softcapped(logits, softcap) + offset[None, :]
        best = tl.maximum(best, bound, propagate_nan=tl.PropagateNan.ALL)
        total += logits

    places = (row * group + member)[:, None] * n_blocks + block[None, :]
    mask = in_group[:, None] & here[None, :]
    tl.store(scores + places, best, mask=mask)
    tl.store(means + places, total / n_anchors, mask=mask)


def why_not(query, anchors, offsets, scales=None, softcap=None) -> str | None:
    b, h_kv, n_blocks, n_anchors, dim = anchors.shape
    if query.dtype not in FLOATS:
        return f"queries in {query.dtype}"
    if anchors.dtype not in (*FLOATS, torch.int8):
        return f"anchors in {anchors.dtype}"
    if anchors.stride(-1) != 1:
        return "anchors whose channels do not lie side by side"
    if dim > _LARGEST_HEAD:
        return f"anchors of {dim} channels, more than {_LARGEST_HEAD}"
    if query.shape[1] > _LARGEST_GROUP * h_kv:
        return f"more than {_LARGEST_GROUP} query heads to a key/value head"
    if b * h_kv > _MOST_ROWS:
        return f"more than {_MOST_ROWS} rows and heads"
    return None


def run(query, anchors, offsets, scales=None, softcap=None):
    b, h_kv, n_blocks, n_anchors, dim = anchors.shape
    group = query.shape[1] // h_kv
    shape = (b, h_kv, group, n_blocks)
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    means = torch.empty_like(scores)
    dim_padded = max(triton.next_power_of_2(dim), 16)
    # 8 to 16 KiB of anchors to a program of 4 warps: each thread has four to eight loads of 16
    # bytes on their way, and even an index of a few MiB gives every multiprocessor some programs.
    # Fixed, for nothing but the bandwidth counts: tensor cores, of which a row of 16 queries uses a
    # sixteenth at the least, keep up with int8, where multiplying query by query would not.
    channels = 4096 if torch.float32 in (query.dtype, anchors.dtype) else 8192
    blocks = min(max(channels // dim_padded, 16), 128)
    _score_anchors_kernel[(triton.cdiv(n_blocks, blocks), b * h_kv)](
        query.contiguous(),
        anchors,
        offsets,
        scales,
        scores,
        means,
        n_blocks,
        n_anchors,
        h_kv,
        group,
        *anchors.stride()[:4],
        *offsets.stride(),
        *((0, 0, 0, 0) if scales is None else scales.stride()),
        None if softcap is None else float(softcap),
        DIM=dim,
        DIM_PADDED=dim_padded,
        GROUP_PADDED=max(triton.next_power_of_2(group), 16),
        BLOCKS=blocks,
        OPERAND=operand_dtype(query.dtype),
        num_warps=4,
        num_stages=3,
    )
    return scores, means
