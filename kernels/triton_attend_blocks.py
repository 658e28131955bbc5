"""Attention of one query token over chosen blocks in Triton, split over programs (flash decoding).

All query heads that share a choice are rows of one tile, so that every chosen key and value is read
once; their tokens are found through the block numbers and read from the cache where they lie. The
splits are as many as fill the GPU.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .triton_dtypes import FLOATS, operand_dtype
from .triton_merge_splits import MOST_SPLITS, merged_splits
from .triton_softcap import softcapped

_LARGEST_HEAD = 256
_LARGEST_QUERIES = 2**16  # bytes of those that share a choice, of some 160 KiB of shared memory
_MOST_ROWS = 65535  # of a grid, beyond its first axis
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453


# What changes from step to step, and would be compiled for anew without any gain.
@triton.jit(
    do_not_specialize=[
        "n_tokens",
        "tokens_per_split",
        "capacity",
        "blocks_b",
        "blocks_h",
        "visible_b",
        "window",
    ]
)
def _attend_split_kernel(
    query,
    keys,
    values,
    blocks,
    shifts,
    visible,
    length,
    outputs,
    masses,
    n_tokens,
    tokens_per_split,
    block_size,
    capacity,
    scaling,
    window,
    softcap,
    n_heads,
    heads_per_kv,
    group,
    keys_b,
    keys_h,
    keys_t,
    values_b,
    values_h,
    values_t,
    blocks_b,
    blocks_h,
    blocks_n,
    shifts_b,
    visible_b,
    visible_t,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    OPERAND: tl.constexpr,
    LOG2_E: tl.constexpr,
    LN_2: tl.constexpr,
):
    split, n_splits = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1)
    batch, head = (row // n_heads).to(tl.int64), row % n_heads
    head_kv, head = (head // heads_per_kv).to(tl.int64), head.to(tl.int64)

    member = row.to(tl.int64) * group + tl.arange(0, GROUP_PADDED)
    in_group = tl.arange(0, GROUP_PADDED) < group
    channel, value_channel = tl.arange(0, DIM_PADDED), tl.arange(0, VALUE_DIM_PADDED)
    inside, value_inside = channel < DIM, value_channel < VALUE_DIM
    own = tl.load(
        query + member[:, None] * DIM + channel[None, :],
        mask=in_group[:, None] & inside[None, :],
        other=0.0,
    ).to(OPERAND)

    keys += batch * keys_b + head_kv * keys_h
    values += batch * values_b + head_kv * values_h
    blocks += batch * blocks_b + head * blocks_h
    end = capacity
    if length is not None:
        end = tl.minimum(tl.load(length), capacity)
    begin = 0
    if window is not None:
        begin = end - window
    shift = 0
    if shifts is not None:
        shift = tl.load(shifts + batch * shifts_b)

    largest = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    output = tl.zeros((GROUP_PADDED, VALUE_DIM_PADDED), tl.float32)
    first = split * tokens_per_split
    for start in tl.range(first, tl.minimum(first + tokens_per_split, n_tokens), TOKENS):
        place = start + tl.arange(0, TOKENS)
        number = place // block_size
        block = tl.load(blocks + number * blocks_n, mask=place < n_tokens, other=-1).to(tl.int64)
        token = shift + block * block_size + place % block_size
        seen = (block >= 0) & (token >= begin) & (token < end)
        if visible is not None:
            at = visible + batch * visible_b + token * visible_t
            seen = seen & (tl.load(at, mask=seen, other=0) != 0)
        # Both loads are on their way before the first product waits for one of them.
        key = tl.load(
            keys + token[:, None] * keys_t + channel[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        )
        value = tl.load(
            values + token[:, None] * values_t + value_channel[None, :],
            mask=seen[:, None] & value_inside[None, :],
            other=0.0,
        )
        logits = tl.dot(own, tl.trans(key.to(OPERAND)), input_precision="ieee") * scaling
        logits = softcapped(logits, softcap) * LOG2_E
        logits = tl.where(seen[None, :], logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        # While nothing is seen the largest is -inf, and no weight may become exp(-inf + inf).
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(logits - reference[:, None])
        keep = tl.exp2(largest - reference)
        total = total * keep + tl.sum(weights, 1)
        output = tl.dot(
            weights.to(OPERAND),
            value.to(OPERAND),
            output * keep[:, None],
            input_precision="ieee",
        )
        largest = new_largest

    place = member * n_splits + split
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(masses + place, (largest + tl.log2(total)) * LN_2, mask=in_group)
    tl.store(
        outputs + place[:, None] * VALUE_DIM + value_channel[None, :],
        output,
        mask=in_group[:, None] & value_inside[None, :],
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """How many there are; the interpreter is given a few, so that there is something to merge."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _splits(rows: int, n_tokens: int, tile: int, multiprocessors: int) -> tuple[int, int]:
    """Into how many splits the tokens of each of so many rows go, and how many tokens a split has:
    whole tiles, and two programs to every multiprocessor where there are tiles enough, so that one
    computes while the other one waits. Follows from shapes alone."""
    tiles = max(triton.cdiv(n_tokens, tile), 1)
    wanted = min(max(2 * multiprocessors // rows, 1), tiles, MOST_SPLITS)
    tiles_per_split = triton.cdiv(tiles, wanted)
    return triton.cdiv(tiles, tiles_per_split), tiles_per_split * tile


def why_not(
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
    b, heads, dim = query.shape
    if query.dtype not in FLOATS or query.dtype != keys.dtype or keys.dtype != values.dtype:
        return f"a query in {query.dtype}, keys in {keys.dtype}, values in {values.dtype}"
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        return "keys or values whose channels do not lie side by side"
    if max(dim, values.shape[-1]) > _LARGEST_HEAD:
        return f"heads of {max(dim, values.shape[-1])} channels, more than {_LARGEST_HEAD}"
    shared = triton.next_power_of_2(heads // blocks.shape[1])
    if shared * triton.next_power_of_2(dim) * query.element_size() > _LARGEST_QUERIES:
        return f"more than {_LARGEST_QUERIES} bytes of queries that share a choice"
    if b * blocks.shape[1] > _MOST_ROWS:
        return f"more than {_MOST_ROWS} rows and heads"
    return None


def run(
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
):
    b, heads, dim = query.shape
    n_heads, value_dim = blocks.shape[1], values.shape[-1]
    dim_padded = max(triton.next_power_of_2(dim), 16)
    value_dim_padded = max(triton.next_power_of_2(value_dim), 16)
    group_padded = max(triton.next_power_of_2(heads // n_heads), 16)
    # 16 KiB of keys and as many of values: one such tile on its way to each of two programs, let
    # alone the next ones, is more than the 25 KiB to a multiprocessor that 4.8 TB/s at a latency of
    # 0.7 us ask for; and at a usual budget of 2048 tokens there still are tiles for all of them.
    widest = max(dim_padded, value_dim_padded) * keys.element_size()
    tile = min(max(2**14 // widest, 16), 128)
    n_tokens = blocks.shape[2] * block_size
    rows = b * n_heads
    n_splits, tokens_per_split = _splits(rows, n_tokens, tile, _multiprocessors(query.device))
    fp32 = {"dtype": torch.float32, "device": query.device}
    outputs = torch.empty((b, heads, n_splits, value_dim), **fp32)
    masses = torch.empty((b, heads, n_splits), **fp32)
    _attend_split_kernel[(n_splits, rows)](
        query.contiguous(),
        keys,
        values,
        blocks,
        shifts,
        None if visible is None else visible.view(torch.uint8),
        length,
        outputs,
        masses,
        n_tokens,
        tokens_per_split,
        block_size,
        keys.shape[2],
        float(scaling),
        window,
        None if softcap is None else float(softcap),
        n_heads,
        n_heads // keys.shape[1],
        heads // n_heads,
        *keys.stride()[:3],
        *values.stride()[:3],
        *blocks.stride(),
        0 if shifts is None else shifts.stride(0),
        *((0, 0) if visible is None else visible.stride()),
        DIM=dim,
        DIM_PADDED=dim_padded,
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=value_dim_padded,
        GROUP_PADDED=group_padded,
        TOKENS=tile,
        OPERAND=operand_dtype(query.dtype),
        LOG2_E=_LOG2_E,
        LN_2=_LN_2,
        num_warps=4 if group_padded < 64 else 8,
        # Two stages for block numbers and two for the tiles that they lead to, so that one tile is
        # copied to shared memory while another one is computed with.
        num_stages=5,
    )
    return merged_splits(outputs, masses, sinks, query.dtype)
