"""Attention of chosen rows of a prompt, over no more keys than they may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..kernels import ops
from .plain_attention import is_plain


class RowGroups(NamedTuple):
    """Queries at ascending positions that see no key behind their own: attention computes one
    group after the other, each over the keys that its last row may see.

    groups: first row, end of the rows, number of keys, the mask of these rows and keys.
    """

    groups: Sequence[tuple[int, int, int, torch.Tensor]]

    @classmethod
    def of(cls, positions: Sequence[int], size: int, mask: torch.Tensor) -> RowGroups:
        """Groups of at most ``size`` rows at ``positions``, with a mask ``[..., R, L]``."""
        starts = range(0, len(positions), size)
        ends = [min(start + size, len(positions)) for start in starts]
        return cls(
            [
                (first, end, seen, mask[..., first:end, :seen].contiguous())
                for first, end in zip(starts, ends, strict=True)
                for seen in [positions[end - 1] + 1]
            ]
        )

    def attend(self, attend: Callable, module, query, key, value, kwargs: dict) -> torch.Tensor:
        """The rows' attention outputs ``[B, R, H, D]`` by the attention function ``attend``."""
        plain = is_plain(attend, kwargs)
        outputs = []
        for first, end, seen, mask in self.groups:
            states = query[:, :, first:end], key[:, :, :seen], value[:, :, :seen]
            if plain:
                # The same without copies of the key heads for every query head, group by group.
                output = ops.attend_rows(*states, mask, kwargs.get("scaling")).transpose(1, 2)
            else:
                output = attend(module, *states, mask, **kwargs)[0]
            outputs.append(output)
        return torch.cat(outputs, 1)


class RowsInPlace(NamedTuple):
    """Queries that attend at once, by an operation that knows itself which keys each of them sees.

    limits: what they see, as arguments of :func:`ops.attend_rows`.
    mask: the same, for attention functions that do more than that.
    """

    limits: dict
    mask: torch.Tensor

    def attend(self, attend: Callable, module, query, key, value, kwargs: dict) -> torch.Tensor:
        """The rows' attention outputs ``[B, R, H, D]`` by the attention function ``attend``."""
        if not is_plain(attend, kwargs):
            return attend(module, query, key, value, self.mask, **kwargs)[0]
        scaling = kwargs.get("scaling")
        output = ops.attend_rows(query, key, value, scaling=scaling, **self.limits)
        return output.transpose(1, 2).contiguous()
