"""The largest attention weight that each key gets, without the matrix of weights: one pass over the
keys finds every row's attention mass, a second one the largest weight in every column of tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_attend_rows import attend_in_spans
from .triton_row_tiles import (
    Tiles,
    hide,
    load_queries,
    load_tile,
    logits_of,
    mask_arguments,
    tile_of_rows,
    why_not_look,
)

_LN_2 = 0.6931471805599453


def why_not(
    query,
    keys,
    scaling,
    mask=None,
    softcap=None,
    positions=None,
    window=None,
    visible=None,
) -> str | None:
    """Why the kernel cannot look at these rows."""
    if query.shape[0] != 1:
        return f"a batch of {query.shape[0]}"
    return why_not_look(query, keys, mask, positions, window)


def run(
    query,
    keys,
    scaling,
    mask=None,
    softcap=None,
    positions=None,
    window=None,
    visible=None,
) -> torch.Tensor:
    """As :func:`reference_attention.attention_received`; a row that sees no key pays nothing."""
    seen = (mask, positions, window, visible)
    n_kv_heads, length = keys.shape[1:3]
    received = torch.zeros((n_kv_heads, length), dtype=torch.float32, device=keys.device)
    if query.numel() and length:
        _, masses = attend_in_spans(query, keys, None, scaling, seen, softcap, None)
        mass = masses[0] if len(masses) == 1 else torch.logsumexp(masses * _LN_2, 0) / _LN_2
        tiles = Tiles(query, keys, 1)
        _receive[(triton.cdiv(length, tiles.keys), n_kv_heads)](
            query,
            keys,
            *mask_arguments(mask, positions, visible),
            mass,
            received,
            *query.stride()[1:3],
            *keys.stride()[1:3],
            query.shape[2],
            length,
            window,
            scaling,
            softcap,
            **{
                **tiles.arguments(query),
                "num_stages": 2,
            },  # of rows: larger tiles than those of keys
        )
    return received.amax(0)


@triton.jit(do_not_specialize=["n_rows", "length"])
def _receive(
    query, keys, mask, stride_mask_batch, stride_mask, positions, visible, mass, received,
    stride_query_head, stride_query, stride_key_head, stride_key,
    n_rows, length, window, scaling, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHANNELS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    start, kv_head = tl.program_id(0) * KEYS, tl.program_id(1).to(tl.int64)
    keys += kv_head * stride_key_head
    k = load_tile(keys, start, stride_key, length, DIM, KEYS, CHANNELS, True, OPERAND)
    key = start + tl.arange(0, KEYS)
    most = tl.zeros([KEYS], tl.float32)
    for tile in range(tl.cdiv(n_rows * GROUP, ROWS)):
        row, member, last = tile_of_rows(tile, positions, n_rows, length, GROUP, ROWS)
        is_row, head = row < n_rows, kv_head * GROUP + member
        q = load_queries(
            query, head, row, is_row, stride_query_head, stride_query, DIM, CHANNELS, OPERAND
        )
        logits = logits_of(q, tl.trans(k), scaling, softcap)
        logits = hide(logits, key, row, last, mask, stride_mask, visible, n_rows, length, window)
        # Rows that see nothing, for which any mass will do.
        own = tl.load(mass + head * n_rows + row, mask=is_row, other=0.0)
        own = tl.where(own == float("-inf"), 0.0, own)
        most = tl.maximum(most, tl.max(tl.exp2(logits - own[:, None]), 0))
    tl.store(received + kv_head * length + key, most, mask=key < length)
