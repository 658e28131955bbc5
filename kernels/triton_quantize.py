"""Rounding vectors to int8 in one pass: largest channel, scale and rounding of a row stay on the
chip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_dtypes import FLOATS

_LARGEST = 32768  # channels, padded


def why_not(vectors) -> str | None:
    """Why the kernel cannot round these vectors."""
    if vectors.dtype not in FLOATS:
        return f"vectors in {vectors.dtype}"
    if triton.next_power_of_2(vectors.shape[-1]) > _LARGEST:
        return f"vectors of {vectors.shape[-1]} channels do not fit into registers"
    return None


def run(vectors) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference.quantize_int8`, to the bit."""
    vectors = vectors.contiguous()
    rounded = torch.empty_like(vectors, dtype=torch.int8)
    scales = torch.empty(vectors.shape[:-1], dtype=torch.float32, device=vectors.device)
    dim = vectors.shape[-1]
    if rounded.numel():
        channels = triton.next_power_of_2(dim)
        at_once = max(4096 // channels, 1)
        _quantize[(triton.cdiv(scales.numel(), at_once),)](
            vectors, rounded, scales, scales.numel(), DIM=dim, ROWS=at_once, CHANNELS=channels
        )
    return rounded, scales


@triton.jit(do_not_specialize=["n_rows"])
def _quantize(
    vectors,
    rounded,
    scales,
    n_rows,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    place = (row * DIM)[:, None] + channel[None, :]
    inside = (row < n_rows)[:, None] & (channel < DIM)[None, :]
    x = tl.load(vectors + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), axis=1) * (1 / 127)
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    # Divided as IEEE says, or some numbers would round the other way than in PyTorch.
    steps = tl.div_rn(x, tl.broadcast_to(scale[:, None], [ROWS, CHANNELS]))
    # Adding 1.5 * 2^23 leaves no room for a fraction: rounded, ties to even.
    steps = (steps + 12582912.0) - 12582912.0
    tl.store(rounded + place, steps.to(tl.int8), mask=inside)
    tl.store(scales + row, scale, mask=row < n_rows)
