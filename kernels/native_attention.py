"""Attention over chosen blocks by the compiled library (``csrc/attend_blocks.h``)."""

from __future__ import annotations

import struct

import torch

from . import native
from .dispatch import Implementation
from .native_calls import FLOATS, TYPES, address, call, why_not_tensors

_NO_WINDOW = 2**62


def _why_not_attend(
    query,
    keys,
    values,
    blocks,
    block_size,
    scaling,
    shifts=None,
    visible=None,
    length=None,
    window=None,
    softcap=None,
    sinks=None,
) -> str | None:
    reason = why_not_tensors(query, keys, values, blocks, shifts, visible, length, sinks)
    if reason is not None:
        return reason
    if query.dtype not in FLOATS or keys.dtype not in FLOATS or values.dtype != keys.dtype:
        return f"queries of {query.dtype}, keys of {keys.dtype}, values of {values.dtype}"
    if blocks.dtype != torch.int64:
        return f"blocks of {blocks.dtype}"
    if query.stride(2) != 1 or keys.stride(3) != 1 or values.stride(3) != 1:
        return "the last dimension is not dense"
    b, heads, dim = query.shape
    selections, n_kv_heads = blocks.shape[1], keys.shape[1]
    if heads % selections or selections % n_kv_heads:
        return f"{heads} query heads, {selections} selections, {n_kv_heads} key/value heads"
    if (
        blocks.shape[0] != b
        or keys.shape != (b, n_kv_heads, keys.shape[2], dim)
        or values.shape[:3] != keys.shape[:3]
        or (visible is not None and visible.shape != (b, keys.shape[2]))
        or (shifts is not None and shifts.shape != (b,))
        or (sinks is not None and sinks.shape != (heads,))
    ):
        return "the shapes do not fit each other"
    if (shifts is not None and shifts.dtype != torch.int64) or (
        length is not None and length.dtype != torch.int64
    ):
        return "shifts and length are to be int64"
    if visible is not None and visible.dtype != torch.bool:
        return f"visible is {visible.dtype}, not boolean"
    return native.why_unavailable()


_ATTENTION = struct.Struct("=10q7q3q2q3q3q3q2q3q2d")


def _attend(
    query,
    keys,
    values,
    blocks,
    block_size,
    scaling,
    shifts=None,
    visible=None,
    length=None,
    window=None,
    softcap=None,
    sinks=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    b, heads, dim = query.shape
    _, n_kv_heads, capacity, value_dim = values.shape
    _, selections, n_blocks = blocks.shape
    output = query.new_empty((b, heads, value_dim))
    mass = query.new_empty((b, heads), dtype=torch.float32)
    if shifts is not None:
        shifts = shifts.contiguous()
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    arguments = _ATTENTION.pack(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        blocks.data_ptr(),
        address(shifts),
        address(visible),
        address(length),
        address(sinks),
        output.data_ptr(),
        mass.data_ptr(),
        b,
        heads,
        selections,
        n_kv_heads,
        capacity,
        dim,
        value_dim,
        n_blocks,
        block_size,
        _NO_WINDOW if window is None else window,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *blocks.stride(),
        *((0, 0) if visible is None else visible.stride()),
        TYPES[query.dtype],
        TYPES[keys.dtype],
        torch.get_num_threads(),
        scaling,
        softcap or 0.0,
    )
    call("anchor_attend_blocks", arguments)
    return output, mass


attend_blocks = Implementation("native", _why_not_attend, _attend)
