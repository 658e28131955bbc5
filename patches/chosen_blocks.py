"""Attention of one query token over chosen blocks, by whichever attention function a model has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..kernels import ops
from .plain_attention import is_plain


class ChosenBlocks(NamedTuple):
    """Blocks of tokens that a step reads, where nothing is known of them but on the device.

    blocks: ``[B, H_kv, K]`` int64, distinct; -1 for none.
    block_size: tokens per block.
    shifts: ``[B]``, the token at which block 0 of each row starts.
    visible: ``[B, L]``, False for tokens that nobody sees.
    length: tokens of the cache, int64 ``[]``.
    mask: the attention call's, ``[B or 1, 1, 1, L]``, boolean or additive.
    """

    blocks: torch.Tensor
    block_size: int
    shifts: torch.Tensor
    visible: torch.Tensor
    length: torch.Tensor
    mask: torch.Tensor

    def attend(self, attend: Callable, module, query, key, value, kwargs: dict) -> tuple:
        """What the attention function ``attend`` returns, outputs ``[B, 1, H, D_v]`` first."""
        if is_plain(attend, kwargs):
            scaling = kwargs.get("scaling")
            output = ops.attend_blocks(
                query[:, :, 0],
                key,
                value,
                self.blocks,
                self.block_size,
                query.shape[-1] ** -0.5 if scaling is None else scaling,
                self.shifts,
                self.visible,
                self.length,
            )[0]
            return output.unsqueeze(1), None
        return self._through(attend, module, query, key, value, kwargs)

    def _through(self, attend, module, query, key, value, kwargs):
        """The model's own function, which alone knows its soft-caps and sinks, over a copy."""
        tokens = (self.blocks * self.block_size + self.shifts[:, None, None]).unsqueeze(-1)
        tokens = tokens + torch.arange(self.block_size, device=tokens.device)
        seen = ((self.blocks >= 0).unsqueeze(-1) & (tokens < self.length)).flatten(2)
        tokens = tokens.flatten(2).clamp(0, key.shape[2] - 1)
        seen = seen & self.visible[:, None].expand(-1, tokens.shape[1], -1).gather(2, tokens)
        key, value = (
            states.gather(2, tokens.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1]))
            for states in (key, value)
        )
        group = query.shape[1] // seen.shape[1]
        mask = seen.repeat_interleave(group, 1).unsqueeze(2)
        if self.mask.dtype != torch.bool:
            row = self.mask[:, :, -1].expand(*tokens.shape[:2], -1).gather(2, tokens)
            row = row.repeat_interleave(group, 1).unsqueeze(2)
            mask = row.masked_fill(~mask, torch.finfo(row.dtype).min)
        return attend(module, query, key, value, mask, **kwargs)
