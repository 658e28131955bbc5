"""Anchors of blocks in one pass over their keys.

Each program holds a few whole blocks in registers and goes through the perspectives, so that every
key is read from memory once, where the buffer of the cache has it: softmax weights and logits never
leave the chip. Everything is computed in fp32; with the few perspectives there are, that takes no
longer than reading the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_dtypes import FLOATS

_LARGEST = 32768  # numbers of a block, padded: 64 for each of 512 threads


def why_not(keys, perspectives=None, valid=None) -> str | None:
    """Why the kernel cannot summarise these blocks."""
    if keys.dtype not in FLOATS:
        return f"keys in {keys.dtype}"
    if keys.stride(-1) != 1:
        return "keys whose channels are not dense"
    size, dim = keys.shape[3:]
    if triton.next_power_of_2(size) * triton.next_power_of_2(dim) > _LARGEST:
        return f"blocks of {size} tokens of {dim} channels do not fit into registers"
    return None


def run(keys, perspectives=None, valid=None) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference.tangent_anchors`."""
    b, heads, n_blocks, size, dim = keys.shape
    n_anchors = 1 if perspectives is None else perspectives.shape[2]
    anchors = keys.new_empty((b, heads, n_blocks, n_anchors, dim))
    offsets = torch.empty(anchors.shape[:-1], dtype=torch.float32, device=keys.device)
    if anchors.numel() == 0:
        return anchors, offsets
    padded = triton.next_power_of_2(size) * triton.next_power_of_2(dim)
    at_once = max(4096 // padded, 1)
    n_tiles = triton.cdiv(n_blocks, at_once)
    _summarise[(n_tiles * b * heads,)](
        keys,
        None if perspectives is None else perspectives.float().contiguous(),
        None if valid is None else valid.contiguous().view(torch.uint8),
        anchors,
        offsets,
        *keys.stride()[:4],
        n_blocks,
        n_tiles,
        heads,
        n_anchors,
        SIZE=size,
        DIM=dim,
        BLOCKS=at_once,
        TOKENS=triton.next_power_of_2(size),
        CHANNELS=triton.next_power_of_2(dim),
        num_warps=4 if padded <= 8192 else padded // 2048,
    )
    return anchors, offsets


@triton.jit(do_not_specialize=["n_blocks", "n_tiles"])
def _summarise(
    keys,
    perspectives,
    valid,
    anchors,
    offsets,
    stride_batch,
    stride_head,
    stride_block,
    stride_token,
    n_blocks,
    n_tiles,
    n_heads,
    n_anchors,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    pid = tl.program_id(0)
    row = (pid // n_tiles).to(tl.int64)  # of [B, H_kv]
    batch = row // n_heads
    block = ((pid % n_tiles) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
    token, channel = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    is_block, is_channel = block < n_blocks, channel < DIM

    seen = is_block[:, None] & (token < SIZE)[None, :]
    if valid is not None:
        place = (batch * n_blocks + block)[:, None] * SIZE + token[None, :]
        seen = seen & (tl.load(valid + place, mask=seen, other=0) != 0)
    head = keys + batch * stride_batch + (row % n_heads) * stride_head
    place = (block * stride_block)[:, None] + (token * stride_token.to(tl.int64))[None, :]
    k = tl.load(
        head + place[:, :, None] + channel[None, None, :],
        mask=seen[:, :, None] & is_channel[None, None, :],
        other=0.0,
    ).to(tl.float32)

    first = (row * n_blocks + block) * n_anchors  # of [B, H_kv, N, P]
    inside = is_block[:, None] & is_channel[None, :]
    if perspectives is None:
        count = tl.sum(seen.to(tl.float32), axis=1)
        anchor = tl.sum(k, axis=1) / tl.maximum(count, 1.0)[:, None]
        offset = tl.where(count > 0, tl.log(tl.maximum(count, 1.0)), float("-inf"))
        place = (first * DIM)[:, None] + channel[None, :]
        tl.store(anchors + place, anchor.to(anchors.dtype.element_ty), mask=inside)
        tl.store(offsets + first, offset, mask=is_block)
    else:
        for p in range(n_anchors):
            own = perspectives + (row * n_anchors + p) * DIM
            c = tl.load(own + channel, mask=is_channel, other=0.0)
            logits = tl.sum(k * c[None, None, :], axis=2)
            logits = tl.where(seen, logits, float("-inf"))
            largest = tl.max(logits, axis=1)
            largest = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.exp(logits - largest[:, None])
            total = tl.sum(weights, axis=1)
            is_real = total > 0
            total = tl.where(is_real, total, 1.0)
            weights = weights / total[:, None]
            # The entropy from the logits: no logarithm of a weight that may have become 0.
            surprise = (largest + tl.log(total))[:, None] - logits
            entropy = tl.sum(weights * tl.where(weights > 0, surprise, 0.0), axis=1)
            anchor = tl.sum(k * weights[:, :, None], axis=1)
            to = ((first + p) * DIM)[:, None] + channel[None, :]
            tl.store(anchors + to, anchor.to(anchors.dtype.element_ty), mask=inside)
            offset = tl.where(is_real, entropy, float("-inf"))
            tl.store(offsets + first + p, offset, mask=is_block)
