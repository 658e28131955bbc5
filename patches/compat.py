"""Every difference between the supported transformers versions (5.17 and newer)."""

from __future__ import annotations

import torch

# `past_key_values` became `cache` in 5.24 (the old keyword goes with 5.40); GPT-NeoX and its kin
# say `layer_past`. The keyword that a layer was really called with is the one to answer with.
CACHE_KEYWORDS = ("cache", "past_key_values", "layer_past")


def cache_keyword(kwargs: dict) -> str | None:
    """The keyword under which a module was handed its cache, if any."""
    return next((name for name in CACHE_KEYWORDS if name in kwargs), None)


def attention_kwargs(update_kwargs: dict) -> dict | None:
    """The keyword arguments of the attention call that ``Cache.update`` belongs to.

    From 5.24 they are handed over by reference; before, and in GPT-NeoX, they are not.
    """
    kwargs = update_kwargs.get("kwargs")
    return kwargs if isinstance(kwargs, dict) else None


def tokens_to_keep(length: int, crop_argument: int) -> int:
    """Read ``crop``'s argument: negative = tokens to remove (5.18 and newer), positive = the
    length to keep (older), 0 = nothing to remove."""
    if crop_argument > 0:
        return min(crop_argument, length)
    return max(length + crop_argument, 0)


def visible_keys(mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Which of the ``length`` cached tokens the last query sees: boolean ``[B, length]``, or None
    for all. Understands the boolean masks of sdpa, the additive ones of eager and the
    two-dimensional ones of flash attention."""
    if mask is None:
        return None
    row = mask if mask.dim() == 2 else mask[:, 0, -1]
    row = row[:, :length]
    return row > torch.finfo(row.dtype).min / 2 if row.is_floating_point() else row.bool()
