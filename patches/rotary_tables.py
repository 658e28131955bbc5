"""Rotary tables in the forms that models hand to their layers."""

from __future__ import annotations

from typing import Any

import torch


def no_rotation(tables: Any) -> Any:
    """Tables of the same form that turn nothing."""
    if isinstance(tables, torch.Tensor):
        return torch.ones_like(tables)
    cos, _ = cos_sin(tables)
    return tuple(torch.ones_like(t) if t is cos else torch.zeros_like(t) for t in tables)


def cos_sin(tables: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A pair of tables in this order: models have both. The first token's last channel, which
    turns slowest, has a cos near 1 and a sin near 0."""
    one, other = tables
    swapped = one[0, 0, -1].abs() < other[0, 0, -1].abs()
    return (other, one) if swapped else (one, other)
