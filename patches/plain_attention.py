"""Attention of one query token per row without extras, by the library's own operation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..kernels import ops

_BLOCK_SIZE = 64  # in which everything is read


def is_plain(attend: Callable, kwargs: dict) -> bool:
    """Whether an attention function, called with ``kwargs``, computes plain attention and no more.

    Of transformers' functions only sdpa's is known to: eager ones belong to their models.
    """
    extras = (kwargs.get("softcap"), kwargs.get("position_bias"), kwargs.get("dropout") or None)
    return attend is sdpa_attention_forward and extras == (None, None, None)


def attend_to_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    block_size: int,
    scaling: float | None,
    shifts: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Attention ``[B, 1, H, D_v]`` of queries ``[B, H, 1, D]``; otherwise as
    :func:`kernels.ops.attend_blocks`. None where nothing faster than torch's attention can run, or
    gradients are wanted."""
    if query.requires_grad and torch.is_grad_enabled():
        return None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    arguments = (query[:, :, 0], keys, values, blocks, block_size, scaling, shifts, visible)
    attend = ops.attend_blocks.fast_for(*arguments)
    return None if attend is None else attend(*arguments)[0].unsqueeze(1)


def attend_to_all(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor | None:
    """The same over all keys that a boolean mask ``[B or 1, 1, 1, L]``, if any, lets the query see;
    None for other masks alone.

    On a CPU torch's own attention of one query token takes 1.5 to 2.5 x as long in bfloat16.
    """
    (b, heads, _, dim), (_, n_kv_heads, length, _) = query.shape, keys.shape
    visible = None
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape[1:] != (1, 1, length):
            return None
        visible = mask[:, 0, 0].expand(b, -1)
    # A cache of Python's has no place in a compiled graph.
    numbers = torch.arange if torch.compiler.is_compiling() else _numbers
    blocks = numbers(-(-length // _BLOCK_SIZE), device=keys.device).expand(b, n_kv_heads, -1)
    output = attend_to_blocks(query, keys, values, blocks, _BLOCK_SIZE, scaling, None, visible)
    if output is not None:
        return output
    # A group's query heads as rows: torch's way to share key heads takes 6 to 12 x as long.
    rows = query.reshape(b, n_kv_heads, -1, dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(rows, keys, values, mask, scale=scaling).reshape(b, 1, heads, -1)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)
