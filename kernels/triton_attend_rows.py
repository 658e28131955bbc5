"""Attention of rows at any positions, tile by tile (FlashAttention), over the keys that they see.

The query heads of a key/value head are packed into one tile, head after head within a row, so that
a key is read once for all of them and a tile spans few positions. Every tile goes over the keys
from the first that one of its rows sees to the last, and only where not all of them see a tile of
keys does it look at single keys. Where there are too few rows to fill the device, the keys are cut
into spans whose results are joined in a fixed order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .triton_row_tiles import (
    LOG2_E,
    Tiles,
    hide,
    load_queries,
    load_tile,
    logits_of,
    mask_arguments,
    most_channels,
    tile_of_rows,
    why_not_look,
)

_SMALLEST_SPAN = 512  # keys


def why_not(
    query,
    keys,
    values,
    mask=None,
    scaling=None,
    positions=None,
    window=None,
    visible=None,
    softcap=None,
    sinks=None,
) -> str | None:
    """Why the kernel cannot attend for these rows."""
    if values.stride(-1) != 1:
        return "values whose channels are not dense"
    if values.shape[-1] > most_channels(values.dtype):
        return f"{values.dtype} values of {values.shape[-1]} channels do not fit into registers"
    if not query.dtype == keys.dtype == values.dtype:
        return f"{query.dtype} queries, {keys.dtype} keys and {values.dtype} values"
    return why_not_look(query, keys, mask, positions, window)


def run(
    query,
    keys,
    values,
    mask=None,
    scaling=None,
    positions=None,
    window=None,
    visible=None,
    softcap=None,
    sinks=None,
) -> torch.Tensor:
    """As :func:`reference_attention.attend_rows`; a row that sees no key gives 0."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = (mask, positions, window, visible)
    partial, mass = attend_in_spans(query, keys, values, scaling, seen, softcap, sinks)
    if len(partial) == 1:
        return partial[0]
    shares = (mass - mass.amax(0)).exp2()  # nan for a row that sees nothing
    shares = (shares / shares.sum(0)).nan_to_num(0.0)
    return (shares.unsqueeze(-1) * partial).sum(0).to(query.dtype)


def attend_in_spans(
    query, keys, values, scaling, seen, softcap, sinks
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Attention over each of S spans of the keys.

    Args:
        values: None if only the masses are wanted.
        seen: mask, positions, window and visible, as :func:`run` takes them.

    Returns:
        The output ``[S, B, H, R, D_v]``, in the query's dtype if S is 1 and in fp32 otherwise, and
        the base-2 logarithm of each span's attention mass ``[S, B, H, R]`` in fp32.
    """
    b, heads, n_rows, _ = query.shape
    n_kv_heads, length = keys.shape[1:3]
    mask, positions, window, visible = seen
    dim_v = 1 if values is None else values.shape[3]
    tiles = Tiles(query, keys, dim_v)
    idle = _processors(query.device) // max(tiles.n_rows * b * n_kv_heads, 1)
    n_spans = max(min(idle, length // _SMALLEST_SPAN), 1)
    span = triton.cdiv(triton.cdiv(length, n_spans), tiles.keys) * tiles.keys
    mass = torch.empty((n_spans, b, heads, n_rows), dtype=torch.float32, device=query.device)
    output = None
    if values is not None:
        dtype = query.dtype if n_spans == 1 else torch.float32
        output = torch.empty((*mass.shape, dim_v), dtype=dtype, device=query.device)
    if mass.numel():
        _attend[(tiles.n_rows, b * n_kv_heads, n_spans)](
            query,
            keys,
            values,
            *mask_arguments(mask, positions, visible),
            sinks,
            output,
            mass,
            *query.stride()[:3],
            *keys.stride()[:3],
            *((0, 0, 0) if values is None else values.stride()[:3]),
            n_rows,
            length,
            n_kv_heads,
            span,
            window,
            scaling,
            softcap,
            DIM_V=dim_v,
            CHANNELS_V=tiles.channels_v,
            **tiles.arguments(query),
        )
    return output, mass


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 8  # the interpreter has none; so many exercise the spans
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _go_over(
    first, end, sum_v, largest, total, q, keys, values, stride_key, stride_value,
    row, last, mask, stride_mask, visible, n_rows, length, window, scaling, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
    CHANNELS_V: tl.constexpr, MASKED: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Keys ``first`` to ``end`` added to the running sums; ``first`` is a multiple of KEYS. Unless
    MASKED, every row sees all of them, and ``end`` is one, too."""
    for start in range(first, end, KEYS):
        k = load_tile(keys, start, stride_key, length, DIM, KEYS, CHANNELS, MASKED, OPERAND)
        logits = logits_of(q, tl.trans(k), scaling, softcap)
        if MASKED:
            key = start + tl.arange(0, KEYS)
            logits = hide(
                logits, key, row, last, mask, stride_mask, visible, n_rows, length, window
            )
        higher = tl.maximum(largest, tl.max(logits, 1))
        base = higher
        if MASKED:  # rows that have seen nothing so far
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - base[:, None])
        fading = tl.exp2(largest - base)
        total = total * fading + tl.sum(weights, 1)
        largest = higher
        if values is not None:
            v = load_tile(
                values, start, stride_value, length, DIM_V, KEYS, CHANNELS_V, MASKED, OPERAND
            )
            sum_v = tl.dot(
                weights.to(v.dtype), v, sum_v * fading[:, None], input_precision="tf32x3"
            )
    return sum_v, largest, total


@triton.jit(do_not_specialize=["n_rows", "length", "span"])
def _attend(
    query, keys, values, mask, stride_mask_batch, stride_mask, positions, visible, sinks,
    output, mass, stride_query_batch, stride_query_head, stride_query, stride_key_batch,
    stride_key_head, stride_key, stride_value_batch, stride_value_head, stride_value,
    n_rows, length, n_kv_heads, span, window, scaling, softcap,
    DIM_V: tl.constexpr, CHANNELS_V: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    # The last tiles have the most keys before them, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // n_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % n_kv_heads).to(tl.int64)
    span_begin = tl.program_id(2) * span
    row, member, last = tile_of_rows(tile, positions, n_rows, length, GROUP, ROWS)
    is_row, head = row < n_rows, kv_head * GROUP + member
    q = load_queries(
        query + batch * stride_query_batch, head, row, is_row, stride_query_head, stride_query,
        DIM, CHANNELS, OPERAND,
    )  # fmt: skip
    keys += batch * stride_key_batch + kv_head * stride_key_head
    if values is not None:
        values += batch * stride_value_batch + kv_head * stride_value_head
    if mask is not None:
        mask += batch * stride_mask_batch

    sum_v = tl.zeros([ROWS, CHANNELS_V], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        if span_begin == 0:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            largest = sink * LOG2_E
            total = tl.full([ROWS], 1.0, tl.float32)

    # From `begin` to `end` some row sees something, from `whole` to `whole_end` every row does.
    nearest = tl.min(tl.where(is_row, last, length - 1), 0)
    farthest = tl.minimum(tl.max(last, 0), length - 1)
    begin, whole = span_begin, span_begin
    if window is not None:
        begin = tl.maximum(begin, (nearest - window + 1) // KEYS * KEYS)
        whole = tl.maximum(whole, (farthest - window + KEYS) // KEYS * KEYS)
    end = tl.minimum(span_begin + span, farthest + 1)
    if (mask is None) and (visible is None):
        whole_end = tl.minimum(span_begin + span, nearest + 1) // KEYS * KEYS
        whole = tl.minimum(whole, tl.cdiv(tl.maximum(end, begin), KEYS) * KEYS)
        whole_end = tl.maximum(whole, whole_end)
        if window is not None:
            sum_v, largest, total = _go_over(
                begin, tl.minimum(whole, end), sum_v, largest, total, q, keys, values, stride_key,
                stride_value, row, last, mask, stride_mask, visible, n_rows, length, window,
                scaling, softcap, DIM, DIM_V, KEYS, CHANNELS, CHANNELS_V, True, OPERAND,
            )  # fmt: skip
        sum_v, largest, total = _go_over(
            whole, whole_end, sum_v, largest, total, q, keys, values, stride_key, stride_value,
            row, last, mask, stride_mask, visible, n_rows, length, window,
            scaling, softcap, DIM, DIM_V, KEYS, CHANNELS, CHANNELS_V, False, OPERAND,
        )  # fmt: skip
        begin = whole_end
    sum_v, largest, total = _go_over(
        begin, end, sum_v, largest, total, q, keys, values, stride_key, stride_value,
        row, last, mask, stride_mask, visible, n_rows, length, window,
        scaling, softcap, DIM, DIM_V, KEYS, CHANNELS, CHANNELS_V, True, OPERAND,
    )  # fmt: skip

    place = (batch * n_kv_heads * GROUP + head) * n_rows + row  # of [B, H, R]
    place += tl.program_id(2) * (tl.num_programs(1).to(tl.int64) * GROUP * n_rows)
    tl.store(mass + place, largest + tl.log2(tl.where(total > 0, total, 1.0)), mask=is_row)
    if values is not None:
        sum_v = sum_v / tl.where(total > 0, total, 1.0)[:, None]
        channel = tl.arange(0, CHANNELS_V)
        tl.store(
            output + place[:, None] * DIM_V + channel[None, :],
            sum_v.to(output.dtype.element_ty),
            mask=is_row[:, None] & (channel < DIM_V)[None, :],
        )
