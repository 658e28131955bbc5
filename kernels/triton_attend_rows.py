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

from .lazy_triton import is_interpreting

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Packed rows, keys, warps and stages that spill hardly a register on Hopper, by channels (padded);
# in fp32, where every product is three, 256 channels never fit.
_SHORT = {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 4, 3), 128: (128, 64, 8, 3)}
_TILES = {
    False: {**_SHORT, 256: (64, 32, 8, 2)},
    True: {16: (64, 32, 8, 2), 32: (64, 32, 8, 2), 64: (64, 32, 8, 2), 128: (32, 32, 8, 2)},
}
_SMALLEST_SPAN = 512  # keys
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


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
    if values.shape[-1] > max(_TILES[values.dtype == torch.float32]):
        return f"{values.dtype} values of {values.shape[-1]} channels do not fit into registers"
    if not query.dtype == keys.dtype == values.dtype:
        return f"{query.dtype} queries, {keys.dtype} keys and {values.dtype} values"
    return why_not_look(query, keys, mask, scaling, positions, window)


def why_not_look(query, keys, mask, scaling, positions, window) -> str | None:
    """Why tiles of logits cannot be computed, whatever is then done with them."""
    if query.dtype not in _DTYPES or keys.dtype != query.dtype:
        return f"{query.dtype} queries and {keys.dtype} keys"
    if query.stride(-1) != 1 or keys.stride(-1) != 1:
        return "queries or keys whose channels are not dense"
    if query.shape[-1] > max(_TILES[query.dtype == torch.float32]):
        return f"{query.dtype} keys of {query.shape[-1]} channels do not fit into registers"
    if scaling is not None and scaling <= 0:
        return f"scaling={scaling}"
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1 or mask.stride(-1) != 1):
        return f"a mask {list(mask.shape)} that is not one for all heads, or whose rows have gaps"
    if window is not None and positions is None:
        return "a window without positions"
    return None


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


class Tiles:
    """Sizes of tiles of packed query rows and of keys, for one shape and dtype."""

    def __init__(self, query: torch.Tensor, keys: torch.Tensor, dim_v: int) -> None:
        self.group = query.shape[1] // keys.shape[1]
        self.n_packed = query.shape[2] * self.group
        self.channels = max(triton.next_power_of_2(query.shape[3]), 16)
        self.channels_v = max(triton.next_power_of_2(dim_v), 16)
        sizes = _TILES[query.dtype == torch.float32][max(self.channels, self.channels_v)]
        self.rows, self.keys, self.warps, self.stages = sizes
        fewest = max(triton.next_power_of_2(self.n_packed), 16)
        if fewest < min(self.rows, 64):  # too few rows for the matrix unit of four warps
            self.rows, self.warps = fewest, 4
        self.n_rows = triton.cdiv(self.n_packed, self.rows)

    def launch(self, query: torch.Tensor) -> dict:
        """The arguments of a kernel that follow from this."""
        return dict(
            GROUP=self.group,
            DIM=query.shape[3],
            ROWS=self.rows,
            KEYS=self.keys,
            CHANNELS=self.channels,
            # The interpreter does not know how to multiply numbers in bfloat16.
            UPCAST=is_interpreting() and query.dtype == torch.bfloat16,
            num_warps=self.warps,
            num_stages=self.stages,
        )


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
            **tiles.launch(query),
        )
    return output, mass


def mask_arguments(mask, positions, visible) -> tuple:
    """The mask with its strides over batch and rows, positions, and what is visible."""
    strides = (0, 0)
    if mask is not None:
        strides = (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    positions = None if positions is None else positions.contiguous()
    visible = None if visible is None else visible.contiguous().view(torch.uint8)
    return mask, *strides, positions, visible


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 8  # the interpreter has none; so many exercise the spans
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def tile_of_rows(tile, positions, n_rows, length, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Row and query head (of the group) of every packed row, and how far it may look."""
    packed = tile * ROWS + tl.arange(0, ROWS)
    row = packed // GROUP
    last = tl.where(row < n_rows, length - 1, -1)
    if positions is not None:
        last = tl.load(positions + row, mask=row < n_rows, other=-1).to(tl.int32)
    return row, packed % GROUP, last


@triton.jit
def hide(logits, key, row, last, mask, stride_mask, visible, n_rows, length, window):
    """Logits in base 2, -inf for what a row may not see."""
    seen = (key[None, :] <= last[:, None]) & (key < length)[None, :]
    if window is not None:
        seen = seen & (key[None, :] > last[:, None] - window)
    if visible is not None:
        seen = seen & (tl.load(visible + key, mask=key < length, other=0) != 0)[None, :]
    if mask is not None:
        place = (row.to(tl.int64) * stride_mask)[:, None] + key[None, :]
        inside = (row < n_rows)[:, None] & (key < length)[None, :]
        if mask.dtype.element_ty == tl.uint8:
            seen = seen & (tl.load(mask + place, mask=inside, other=0) != 0)
        else:
            logits += tl.load(mask + place, mask=inside, other=0.0).to(tl.float32) * _LOG2_E
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def logits_of(q, k, scaling, softcap):
    """In base 2."""
    logits = tl.dot(q, k, input_precision="tf32x3") * scaling
    if softcap is not None:
        # tanh(x) = 2 sigmoid(2 x) - 1
        logits = softcap * (2.0 / (1.0 + tl.exp2(logits * (-2.0 * _LOG2_E / softcap))) - 1.0)
    return logits * _LOG2_E


@triton.jit
def load_tile(
    states, start, stride, length, DIM: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``[TOKENS, CHANNELS]`` from token ``start`` on; 0 outside."""
    token, channel = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    place = states + tl.cast(start, tl.int64) * stride + token[:, None] * stride + channel[None, :]
    if MASKED:
        inside = (start + token < length)[:, None] & (channel < DIM)[None, :]
        tile = tl.load(place, mask=inside, other=0.0)
    elif DIM == CHANNELS:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(channel < DIM)[None, :], other=0.0)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def _go_over(
    first, end, sum_v, largest, total, q, keys, values, stride_key, stride_value,
    row, last, mask, stride_mask, visible, n_rows, length, window, scaling, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
    CHANNELS_V: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Keys ``first`` to ``end`` added to the running sums; ``first`` is a multiple of KEYS. Unless
    MASKED, every row sees all of them, and ``end`` is one, too."""
    for start in range(first, end, KEYS):
        k = load_tile(keys, start, stride_key, length, DIM, KEYS, CHANNELS, MASKED, UPCAST)
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
                values, start, stride_value, length, DIM_V, KEYS, CHANNELS_V, MASKED, UPCAST
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
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, UPCAST: tl.constexpr,
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
        DIM, CHANNELS, UPCAST,
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
            largest = sink * _LOG2_E
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
                scaling, softcap, DIM, DIM_V, KEYS, CHANNELS, CHANNELS_V, True, UPCAST,
            )  # fmt: skip
        sum_v, largest, total = _go_over(
            whole, whole_end, sum_v, largest, total, q, keys, values, stride_key, stride_value,
            row, last, mask, stride_mask, visible, n_rows, length, window,
            scaling, softcap, DIM, DIM_V, KEYS, CHANNELS, CHANNELS_V, False, UPCAST,
        )  # fmt: skip
        begin = whole_end
    sum_v, largest, total = _go_over(
        begin, end, sum_v, largest, total, q, keys, values, stride_key, stride_value,
        row, last, mask, stride_mask, visible, n_rows, length, window,
        scaling, softcap, DIM, DIM_V, KEYS, CHANNELS, CHANNELS_V, True, UPCAST,
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


@triton.jit
def load_queries(
    query, head, row, is_row, stride_head, stride_row, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """A packed tile ``[ROWS, CHANNELS]``."""
    channel = tl.arange(0, CHANNELS)
    place = head.to(tl.int64) * stride_head + row.to(tl.int64) * stride_row
    inside = is_row[:, None] & (channel < DIM)[None, :]
    q = tl.load(query + place[:, None] + channel[None, :], mask=inside, other=0.0)
    return q.to(tl.float32) if UPCAST else q
