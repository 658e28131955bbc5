"""Putting fresh states in the place of old ones and measuring how far apart they are, in one pass:
the deviation of a token is summed up where its states go through the registers anyway."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_dtypes import FLOATS

_AT_ONCE = 2048  # channels that a program holds


def why_not(states, fresh, rows) -> str | None:
    """Why the kernel cannot replace these tokens."""
    if states.dtype not in FLOATS or fresh.dtype != states.dtype:
        return f"fresh states in {fresh.dtype} for old ones in {states.dtype}"
    if states.stride(-1) != 1 or fresh.stride(-1) != 1:
        return "states whose channels are not dense"
    return None


def run(states, fresh, rows) -> torch.Tensor:
    """As :func:`reference.replace_tokens`."""
    b, heads, n_rows, dim = fresh.shape
    deviation = torch.empty((b, n_rows), dtype=torch.float32, device=states.device)
    channels = triton.next_power_of_2(dim)
    if deviation.numel():
        _replace[(n_rows, b)](
            states,
            fresh,
            rows.contiguous(),
            deviation,
            *states.stride()[:3],
            *fresh.stride()[:3],
            n_rows,
            HEADS=heads,
            DIM=dim,
            AT_ONCE=min(max(_AT_ONCE // channels, 1), triton.next_power_of_2(heads)),
            CHANNELS=channels,
        )
    return deviation


@triton.jit(do_not_specialize=["n_rows"])
def _replace(
    states, fresh, rows, deviation, stride_states_batch, stride_states_head, stride_states,
    stride_fresh_batch, stride_fresh_head, stride_fresh, n_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    states += batch * stride_states_batch + tl.load(rows + row).to(tl.int64) * stride_states
    fresh += batch * stride_fresh_batch + row * stride_fresh
    squares = tl.zeros([AT_ONCE, CHANNELS], tl.float32)
    for start in range(0, HEADS, AT_ONCE):
        head = (start + tl.arange(0, AT_ONCE)).to(tl.int64)
        inside = (head < HEADS)[:, None] & (channel < DIM)[None, :]
        place = states + (head * stride_states_head)[:, None] + channel[None, :]
        new = tl.load(
            fresh + (head * stride_fresh_head)[:, None] + channel[None, :], mask=inside, other=0.0
        )
        apart = new.to(tl.float32) - tl.load(place, mask=inside, other=0.0).to(tl.float32)
        squares += apart * apart
        tl.store(place, new, mask=inside)
    total = tl.sum(tl.sum(squares, 1), 0)
    tl.store(deviation + batch * n_rows + row, tl.sqrt_rn(total))
