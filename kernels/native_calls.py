"""The operations on a CPU by the compiled library: what it can take, and the calls.

A call hands over one packed struct of 8-byte numbers (``csrc/*.h``), which costs a few
microseconds where ctypes' conversion of as many arguments would cost more than the smaller
operations themselves.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

import torch

from . import native
from .dispatch import Implementation

# As numbered in csrc/vectors.h.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NO_WINDOW = 2**62


@functools.cache
def _function(name: str) -> Callable[[bytes], int]:
    function = getattr(native.library(), name)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def _call(name: str, arguments: bytes) -> int:
    status = _function(name)(arguments)
    if status == 1:
        raise MemoryError(f"{name}: no memory for intermediate results")
    return status


def _why_not_tensors(*tensors: torch.Tensor | None) -> str | None:
    """Reasons that hold for every operation."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return f"a tensor lies on {tensor.device}, not on the CPU"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "it has no gradients"
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return f"a tensor is a {type(tensor).__name__}"
    return None


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
    reason = _why_not_tensors(query, keys, values, blocks, shifts, visible, length, sinks)
    if reason is not None:
        return reason
    if query.dtype not in _FLOATS or keys.dtype not in _FLOATS or values.dtype != keys.dtype:
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
        _address(shifts),
        _address(visible),
        _address(length),
        _address(sinks),
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
        _TYPES[query.dtype],
        _TYPES[keys.dtype],
        torch.get_num_threads(),
        scaling,
        softcap or 0.0,
    )
    _call("anchor_attend_blocks", arguments)
    return output, mass


attend_blocks = Implementation("native", _why_not_attend, _attend)
