"""Tiles of logits in Triton, for rows at any positions: the query heads of a key/value head are
packed into one tile, head after head within a row, so that a key is read once for all of them and a
tile spans few positions."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .triton_dtypes import FLOATS, operand_dtype
from .triton_softcap import softcapped

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_MOST_HEADS = 65535  # of a grid, beyond its first axis
# Packed rows, keys and warps that spill hardly a register on Hopper, by channels (padded); in fp32,
# where every product is three, 256 channels never fit.
_TILES = {
    False: {16: (128, 64, 4), 32: (128, 64, 4), 64: (128, 64, 4), 128: (128, 64, 8)},
    True: {16: (64, 32, 8), 32: (64, 32, 8), 64: (64, 32, 8), 128: (32, 32, 8)},
}
_TILES[False][256] = (64, 32, 8)
_ROOM_FOR_STAGES = 160 * 2**10  # bytes of shared memory


def most_channels(dtype: torch.dtype) -> int:
    """Of a head whose tiles fit into registers."""
    return max(_TILES[dtype == torch.float32])


def why_not_look(query, keys, mask, positions, window) -> str | None:
    """Why tiles of logits cannot be computed, whatever is then done with them."""
    if query.dtype not in FLOATS or keys.dtype != query.dtype:
        return f"{query.dtype} queries and {keys.dtype} keys"
    if query.stride(-1) != 1 or keys.stride(-1) != 1:
        return "queries or keys whose channels are not dense"
    if query.shape[-1] > most_channels(query.dtype):
        return f"{query.dtype} keys of {query.shape[-1]} channels do not fit into registers"
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1 or mask.stride(-1) != 1):
        return f"a mask {list(mask.shape)} that is not one for all heads, or whose rows have gaps"
    if window is not None and positions is None:
        return "a window without positions"  # the specification raises the error
    if keys.shape[0] * keys.shape[1] > _MOST_HEADS:
        return f"more than {_MOST_HEADS} rows and heads"
    return None


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


class Tiles:
    """Sizes of tiles of packed query rows and of keys, for one shape and dtype."""

    def __init__(self, query: torch.Tensor, keys: torch.Tensor, dim_v: int) -> None:
        self.group = query.shape[1] // keys.shape[1]
        self.n_packed = query.shape[2] * self.group
        self.channels = max(triton.next_power_of_2(query.shape[3]), 16)
        self.channels_v = max(triton.next_power_of_2(dim_v), 16)
        sizes = _TILES[query.dtype == torch.float32][max(self.channels, self.channels_v)]
        self.rows, self.keys, self.warps = sizes
        self.stages = 3 if _shared_memory(query.device) >= _ROOM_FOR_STAGES else 2
        fewest = max(triton.next_power_of_2(self.n_packed), 16)
        if fewest < min(self.rows, 64):  # too few rows for the matrix unit of four warps
            self.rows, self.warps = fewest, 4
        self.n_rows = triton.cdiv(self.n_packed, self.rows)

    def arguments(self, query: torch.Tensor) -> dict:
        """The arguments of a kernel that follow from this."""
        return dict(
            GROUP=self.group,
            DIM=query.shape[3],
            ROWS=self.rows,
            KEYS=self.keys,
            CHANNELS=self.channels,
            OPERAND=operand_dtype(query.dtype),
            num_warps=self.warps,
            num_stages=self.stages,
        )


def mask_arguments(mask, positions, visible) -> tuple:
    """The mask with its strides over batch and rows, positions, and what is visible."""
    strides = (0, 0)
    if mask is not None:
        strides = (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    positions = None if positions is None else positions.contiguous()
    visible = None if visible is None else visible.contiguous().view(torch.uint8)
    return mask, *strides, positions, visible


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
            logits += tl.load(mask + place, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def logits_of(q, k, scaling, softcap):
    """In base 2."""
    logits = tl.dot(q, k, input_precision="tf32x3")
    if softcap is None:
        logits *= scaling * LOG2_E
    else:
        logits = softcapped(logits * scaling, softcap) * LOG2_E
    return logits


@triton.jit
def load_tile(
    states, start, stride, length, DIM: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    MASKED: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``[TOKENS, CHANNELS]`` from token ``start`` on; 0 outside."""
    token, channel = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    place = states + (start + token).to(tl.int64)[:, None] * stride + channel[None, :]
    if MASKED:
        inside = (start + token < length)[:, None] & (channel < DIM)[None, :]
        tile = tl.load(place, mask=inside, other=0.0)
    elif DIM == CHANNELS:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(channel < DIM)[None, :], other=0.0)
    return tile.to(OPERAND)


@triton.jit
def load_queries(
    query, head, row, is_row, stride_head, stride_row, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """A packed tile ``[ROWS, CHANNELS]``."""
    channel = tl.arange(0, CHANNELS)
    place = head.to(tl.int64) * stride_head + row.to(tl.int64) * stride_row
    inside = is_row[:, None] & (channel < DIM)[None, :]
    q = tl.load(query + place[:, None] + channel[None, :], mask=inside, other=0.0)
    return q.to(OPERAND)
