"""Rows of different lengths as one batch, padded on the left as ``generate`` wants it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def stacked(rows: Sequence[torch.Tensor], padding: int, dim: int = 1) -> torch.Tensor:
    """Rows of different lengths one upon the other, padded on the left."""
    if len(rows) == 1:
        return rows[0]
    length = max(row.shape[dim] for row in rows)
    sides = [(0, 0) * (row.dim() - 1 - dim) + (length - row.shape[dim], 0) for row in rows]
    padded = [F.pad(row, side, value=padding) for row, side in zip(rows, sides, strict=True)]
    return torch.cat(padded)


def spread(states: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Rows of zeros where ``where`` is False."""
    spread = states.new_zeros((len(where), *states.shape[1:]))
    spread[where] = states
    return spread
