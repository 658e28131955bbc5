"""Warning of appended tokens that do not stand where the cache ends.

A warning, not an error: position ids and masks of one's own may well be meant. Where tokens are
certainly wrong, ``refed_tokens`` refuses them.
"""

from __future__ import annotations

import warnings

import torch

from .patches.compat import visible_keys

_CHECKED = "anchor_places_checked"


def warn_of_misplaced_tokens(
    mask: torch.Tensor | None, positions: torch.Tensor | None, batch: int, fed: int, length: int
) -> None:
    """Check the ``fed`` newest of ``length`` tokens, once for all layers.

    Args:
        mask: the attention call's, ``[B or 1, 1 or H, T, L]``, or None.
        positions: ``[B or 1, T]``, or None where the model does not hand them over.
        batch: rows of the batch.
        fed: T, the tokens appended by this forward pass, to a cache that was not empty.
        length: L, all tokens in the cache.
    """
    shared = mask if positions is None else positions
    if shared is None or getattr(shared, _CHECKED, False):
        return
    setattr(shared, _CHECKED, True)
    visible = visible_keys(mask, batch, length)
    if visible is not None:
        newest = mask[:, 0, -fed:, length - fed : length].diagonal(dim1=-2, dim2=-1)
        if newest.is_floating_point():
            newest = newest > torch.finfo(newest.dtype).min / 2
        if not newest.any():
            warnings.warn(
                "the attention_mask hides every new token from itself: it ends before the cache "
                "does. Another prompt needs an empty cache (cache.reset()), new ids alone need an "
                "attention_mask over all tokens; where transformers itself cuts the mask (5.17 in "
                "assisted and prompt-lookup decoding and prefill_chunk_size on a filled cache), "
                "begin with an empty cache",
                stacklevel=2,
            )
            return
    if positions is None or positions.dim() != 2:
        return
    last = positions[:, -1].expand(batch)
    if visible is None:
        behind = last + 1 < length
    else:
        behind = visible.tokens[:, -1] & (last + 1 < visible.tokens.sum(-1))
    if behind.any():
        warnings.warn(
            "tokens were appended at positions that older tokens of the cache have. Unless such "
            "position_ids are meant: another prompt needs an empty cache (cache.reset()), and new "
            "ids alone need an attention_mask over all tokens",
            stacklevel=2,
        )
