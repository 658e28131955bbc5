"""Every difference between the supported transformers versions (5.17 and newer)."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils

# `past_key_values` became `cache` in 5.24 (the old keyword goes with 5.40); GPT-NeoX and its kin
# say `layer_past`. The keyword that a layer was really called with is the one to answer with.
CACHE_KEYWORDS = ("cache", "past_key_values", "layer_past")

_VISIBLE = "anchor_visible"


def cache_keyword(kwargs: dict) -> str | None:
    """The keyword under which a module was handed its cache, if any."""
    return next((name for name in CACHE_KEYWORDS if name in kwargs), None)


def model_cache_keyword(model: PreTrainedModel) -> str:
    """The keyword under which a model takes its cache."""
    return cache_keyword(inspect.signature(model.get_decoder().forward).parameters)


def layers_with_keys(config: PreTrainedConfig) -> int:
    """How many of a model's layers, from the first one on, keep keys and values of their own.

    The last ones may read those of another layer: newer versions give these a dummy cache layer,
    older ones none.
    """
    layers = DynamicCache(config=config).layers
    dummy = getattr(cache_utils, "DummyLayer", ())
    while layers and isinstance(layers[-1], dummy):
        layers = layers[:-1]
    return len(layers)


def attention_kwargs(update_kwargs: dict) -> dict | None:
    """The keyword arguments of the attention call that ``Cache.update`` belongs to.

    From 5.24 they are handed over by reference; before, and in GPT-NeoX, they are not.
    """
    kwargs = update_kwargs.get("kwargs")
    return kwargs if isinstance(kwargs, dict) else None


def tokens_to_keep(length: int, crop_argument: int) -> int:
    """Read ``crop``'s argument: negative = tokens to remove (5.18 and newer), positive = the
    length to keep (older), 0 = nothing to remove. ``generate`` of 5.17 hands over a tensor."""
    crop_argument = int(crop_argument)
    if crop_argument > 0:
        return min(crop_argument, length)
    return max(length + crop_argument, 0)


class Visible(NamedTuple):
    """What the last query of every row sees of the cached tokens.

    tokens: boolean ``[B, L]``. first: the first visible one per row, a single entry when all rows
    have the same (left padding, mostly).
    """

    tokens: torch.Tensor
    first: tuple[int, ...]


def visible_row(mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Which of ``length`` cached tokens the last query sees, ``[B, L]``, by a mask ``[B or 1, 1 or
    H, T, L]``: boolean as for sdpa, or additive as for eager attention."""
    row = mask[:, 0, -1, :length].expand(batch, -1)
    return row > torch.finfo(row.dtype).min / 2 if row.is_floating_point() else row


def visible_keys(mask: torch.Tensor | None, batch: int, length: int) -> Visible | None:
    """Which of the ``length`` cached tokens the last query sees; None for all.

    Understands the boolean masks of sdpa and the additive ones of eager. All layers of a step get
    the same mask object, which keeps the answer for the next one.
    """
    if mask is None:
        return None
    known = getattr(mask, _VISIBLE, None)
    if known is None or known.tokens.shape != (batch, length):
        row = visible_row(mask, batch, length)
        first = row.to(torch.uint8).argmax(1).tolist()
        known = Visible(row, tuple(first) if len(set(first)) > 1 else (first[0],))
        setattr(mask, _VISIBLE, known)
    return known
