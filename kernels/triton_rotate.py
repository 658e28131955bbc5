"""Rotating stored keys while they are copied to their place in the fused cache.

Every product and sum is rounded as PyTorch rounds it when a model rotates its own keys: to the
dtype in which the model computes, and never fused into one instruction. Only so are the keys of a
chunk at its own place, bit for bit, those of an ordinary cache. It costs nothing, since the kernel
waits for memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_AT_ONCE = 2048  # channels of a program
_MOST_HEADS = 65535  # of a grid, beyond its first axis


def why_not(out, x, cos, sin, start, pairing, table) -> str | None:
    """Why the kernel cannot rotate these states."""
    if x.dtype not in _DTYPES or out.dtype != x.dtype:
        return f"states in {x.dtype} for a cache in {out.dtype}"
    if cos.dtype not in _DTYPES or sin.dtype != cos.dtype:
        return f"tables in {cos.dtype} and {sin.dtype}"
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        return "states whose channels are not dense"
    if _pairs(cos, table) * 2 > x.shape[-1]:
        return "tables that do not fit the states"  # the specification raises the error
    if not 0 <= start <= out.shape[2] - x.shape[2] or cos.shape[1] < start + x.shape[2]:
        return "positions outside the cache or the tables"
    if x.shape[0] * x.shape[1] > _MOST_HEADS:
        return f"more than {_MOST_HEADS} rows and heads"
    return None


def _pairs(cos, table) -> int:
    return cos.shape[-1] if table == "compact" else cos.shape[-1] // 2


def run(out, x, cos, sin, start, pairing, table) -> None:
    """As :func:`reference.rotate_into`, to the bit."""
    b, heads, n_tokens, dim = x.shape
    if x.numel() == 0:
        return
    pairs = _pairs(cos, table)
    padded = triton.next_power_of_2(max(pairs, 1))
    padded_rest = triton.next_power_of_2(max(dim - 2 * pairs, 1))
    tokens = max(_AT_ONCE // max(2 * padded, padded_rest), 1)
    step = 2 if table == "repeated" else 1
    _rotate[(triton.cdiv(n_tokens, tokens), b * heads)](
        out,
        x,
        cos,
        sin,
        *out.stride()[:3],
        *x.stride()[:3],
        *(n for t in (cos, sin) for n in (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1))),
        cos.stride(2) * step,
        sin.stride(2) * step,
        start,
        n_tokens,
        heads,
        DIM=dim,
        PAIRS=pairs,
        INTERLEAVED=pairing == "interleaved",
        ROUND=_DTYPES[torch.promote_types(x.dtype, cos.dtype)],
        TOKENS=tokens,
        PAIRS_PADDED=padded,
        REST_PADDED=padded_rest,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["start", "n_tokens"])
def _rotate(
    out, x, cos, sin, stride_out_batch, stride_out_head, stride_out, stride_x_batch, stride_x_head,
    stride_x, stride_cos_batch, stride_cos, stride_sin_batch, stride_sin, stride_cos_pair,
    stride_sin_pair, start, n_tokens, n_heads,
    DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // n_heads).to(tl.int64)
    head = (tl.program_id(1) % n_heads).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < n_tokens
    own = x + batch * stride_x_batch + head * stride_x_head + token * stride_x
    to = out + batch * stride_out_batch + head * stride_out_head + (start + token) * stride_out
    if PAIRS > 0:
        pair = tl.arange(0, PAIRS_PADDED)
        inside = is_token[:, None] & (pair < PAIRS)[None, :]
        place = cos + batch * stride_cos_batch + (start + token)[:, None] * stride_cos
        c = tl.load(place + pair[None, :] * stride_cos_pair, mask=inside, other=0.0).to(tl.float32)
        place = sin + batch * stride_sin_batch + (start + token)[:, None] * stride_sin
        s = tl.load(place + pair[None, :] * stride_sin_pair, mask=inside, other=0.0).to(tl.float32)
        if INTERLEAVED:
            # Loaded as whole rows, since pairs of channels would be narrow accesses.
            channel = tl.arange(0, 2 * PAIRS_PADDED)[None, :]
            inside = is_token[:, None] & (channel < 2 * PAIRS)
            states = tl.load(own[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(states, [TOKENS, PAIRS_PADDED, 2]))
        else:
            channel = pair[None, :]
            first = tl.load(own[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(own[:, None] + channel + PAIRS, mask=inside, other=0.0)
            second = second.to(tl.float32)
        turned = _rounded(first * c, ROUND) - _rounded(second * s, ROUND)
        other = _rounded(second * c, ROUND) + _rounded(first * s, ROUND)
        turned = _rounded(turned, ROUND).to(out.dtype.element_ty)
        other = _rounded(other, ROUND).to(out.dtype.element_ty)
        if INTERLEAVED:
            states = tl.reshape(tl.join(turned, other), [TOKENS, 2 * PAIRS_PADDED])
            tl.store(to[:, None] + channel, states, mask=inside)
        else:
            tl.store(to[:, None] + channel, turned, mask=inside)
            tl.store(to[:, None] + channel + PAIRS, other, mask=inside)
    if 2 * PAIRS < DIM:
        channel = 2 * PAIRS + tl.arange(0, REST_PADDED)[None, :]
        inside = is_token[:, None] & (channel < DIM)
        tl.store(to[:, None] + channel, tl.load(own[:, None] + channel, mask=inside), mask=inside)


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    return x.to(ROUND).to(tl.float32)
