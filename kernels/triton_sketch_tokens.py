"""Sketches of keys in one pass: what is left of a key without its block's centre is turned by the
fixed rotation in registers, and its signs are packed into bytes before they leave the chip.

The matrix product runs on the tensor cores with every fp32 number in three tf32 products, which is
as exact as fp32: only the sign of a channel within its rounding of 0 may differ from PyTorch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .reference_sketch import sketch_rotation
from .triton_dtypes import FLOATS

_TOKENS = 64
_LARGEST = 256  # channels, padded


def why_not(residuals, n_bits=1, centres=None) -> str | None:
    """Why the kernel cannot sketch these tokens."""
    if residuals.dtype not in FLOATS:
        return f"keys in {residuals.dtype}"
    if residuals.stride(-1) != 1:
        return "keys whose channels are not dense"
    if residuals.dim() > 5:
        return f"keys of {residuals.dim()} dimensions"
    if triton.next_power_of_2(residuals.shape[-1]) > _LARGEST:
        return f"keys of {residuals.shape[-1]} channels do not fit into registers"
    return None


def run(residuals, n_bits=1, centres=None) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_sketch.sketch_tokens`."""
    keys = residuals[(None,) * (5 - residuals.dim())]
    b, heads, n_blocks, size, dim = keys.shape
    width = -(-dim // 8)
    shape = residuals.shape[:-1]
    bits = torch.empty((*shape, n_bits * width), dtype=torch.uint8, device=keys.device)
    scales = torch.empty((*shape, 1), dtype=torch.float16, device=keys.device)
    if scales.numel() == 0:
        return bits, scales
    n_tiles = triton.cdiv(n_blocks * size, _TOKENS)
    channels = max(triton.next_power_of_2(dim), 16)
    _sketch[(n_tiles * b * heads,)](
        keys,
        None if centres is None else centres.float().contiguous(),
        sketch_rotation(dim, keys.device),
        bits,
        scales,
        *keys.stride()[:4],
        n_blocks * size,
        n_tiles,
        heads,
        SIZE=size,
        DIM=dim,
        WIDTH=width,
        N_BITS=n_bits,
        TOKENS=_TOKENS,
        CHANNELS=channels,
        STEP=min(channels, 32 if channels <= 128 else 16),
        num_warps=8 if channels > 128 else 4,
    )
    return bits, scales


@triton.jit(do_not_specialize=["n_tokens", "n_tiles"])
def _sketch(
    keys,
    centres,
    rotation,
    bits,
    scales,
    stride_batch,
    stride_head,
    stride_block,
    stride_token,
    n_tokens,
    n_tiles,
    n_heads,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    N_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
):
    pid = tl.program_id(0)
    row = (pid // n_tiles).to(tl.int64)  # of [B, H_kv]
    token = (pid % n_tiles) * TOKENS + tl.arange(0, TOKENS)  # of the head's blocks, in order
    is_token = token < n_tokens
    block, channel = (token // SIZE).to(tl.int64), tl.arange(0, CHANNELS)
    own = keys + (row // n_heads) * stride_batch + (row % n_heads) * stride_head
    own += block * stride_block + (token % SIZE).to(tl.int64) * stride_token
    centre = (row * (n_tokens // SIZE) + block) * DIM

    rotated = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for start in range(0, DIM, STEP):
        part = start + tl.arange(0, STEP)
        inside = is_token[:, None] & (part < DIM)[None, :]
        x = tl.load(own[:, None] + part[None, :], mask=inside, other=0.0).to(tl.float32)
        if centres is not None:
            x -= tl.load(centres + centre[:, None] + part[None, :], mask=inside, other=0.0)
        turn = tl.load(
            rotation + part[:, None] * DIM + channel[None, :],
            mask=(part < DIM)[:, None] & (channel < DIM)[None, :],
            other=0.0,
        )
        rotated = tl.dot(x, turn, rotated, input_precision="tf32x3")

    size = tl.abs(rotated)
    square = tl.sum(rotated * rotated, axis=1)
    place = (row * n_tokens + token) * (N_BITS * WIDTH)
    positive = (rotated > 0) & (channel < DIM)[None, :]
    _store_plane(bits, place, positive, is_token, WIDTH, TOKENS, CHANNELS)
    levels = size
    if N_BITS == 2:
        large = size > tl.sqrt(square / DIM)[:, None]
        levels = tl.where(large, 3 * size, size)
        plane = (large == (rotated > 0)) & (channel < DIM)[None, :]
        _store_plane(bits, place + WIDTH, plane, is_token, WIDTH, TOKENS, CHANNELS)
    scale = square / tl.maximum(tl.sum(levels, axis=1), 1e-12)
    tl.store(scales + row * n_tokens + token, scale.to(tl.float16), mask=is_token)


@triton.jit
def _store_plane(
    bits, place, plane, is_token, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    byte = tl.arange(0, CHANNELS // 8)
    eights = tl.reshape(plane.to(tl.int32), [TOKENS, CHANNELS // 8, 8])
    packed = tl.sum(eights << tl.arange(0, 8)[None, None, :], axis=2)
    tl.store(
        bits + place[:, None] + byte[None, :],
        packed.to(tl.uint8),
        mask=is_token[:, None] & (byte < WIDTH)[None, :],
    )
