"""Noticing tokens that are fed to a model although its cache holds them already.

``generate`` does so, without a word, when its ids are as long as a filled cache, when it gets
``use_cache=False`` with a cache, and when assisted or prompt-lookup decoding gets a filled cache
and the whole ids. Every such token would then be read twice.

In the first layer keys and values follow from the token and its position alone, so a token that
is fed again at its old position brings the keys and values that are stored. An honest append never
does, unless the layer knows nothing of positions; there the positions themselves decide or, where
the model does not hand them over, whether the layer tells equal tokens apart.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from .patches.compat import attention_kwargs

# Without positions, and without a token that occurs twice, this many equal ones are no accident.
_CERTAIN_RUN = 4
_SAMPLE = 256  # tokens, at least, that show how large a channel is
_NEIGHBOURHOOD = 256  # tokens on either side where such a token is looked for


@torch.compiler.disable
@torch.no_grad()
def refuse_refed_tokens(
    first_layer: CacheLayerMixin,
    keys: torch.Tensor,
    values: torch.Tensor,
    update_kwargs: dict,
) -> None:
    """Check what is about to be appended to the first layer of a model's cache.

    Single tokens are not checked: ``generate`` feeds those right.

    Args:
        first_layer: the layer with index 0.
        keys, values: ``[B, H_kv, T, D]``, not appended yet.
        update_kwargs: what ``Cache.update`` got by keyword.

    Raises:
        ValueError: the cache holds these tokens already; the message says what to do.
    """
    if keys.shape[2] < 2:
        return
    stored = getattr(first_layer, "keys", None), getattr(first_layer, "values", None)
    if stored[0] is None or stored[0].dim() != 4:
        return
    length = first_layer.get_seq_length()
    positions = (attention_kwargs(update_kwargs) or {}).get("position_ids")
    start = length - stored[0].shape[2]
    again = refed_from(stored, (keys, values), start, positions)
    if again is not None:
        raise ValueError(
            f"input_ids: of the {keys.shape[2]} tokens that were fed now, those from token {again} "
            f"on are among the {length} in the cache already and would be read twice. Ids as long "
            "as the cache: cache.crop(-1) first. use_cache=False: leave it out, or the cache. "
            "Assisted or prompt-lookup decoding on a filled cache: pass the new ids alone, with an "
            "attention_mask over all tokens. An earlier or another prompt: cache.reset() first"
        )


def refed_from(
    stored: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    start: int = 0,
    positions: torch.Tensor | None = None,
) -> int | None:
    """Where in the cache the tokens ``new`` stand already, by the states of the first layer.

    Args:
        stored: keys and values ``[B, H_kv, S, D]`` of the newest S tokens.
        new: the same of the T tokens to append ``[B, H_kv, T, D]``.
        start: tokens of the cache before the S (a sliding window dropped them).
        positions: ``[..., T]`` of the new tokens, where they are known.

    Returns:
        The first token of the cache that is fed again; None if there is none, or if this layer
        cannot tell.
    """
    for s, n in zip(stored, new, strict=True):
        if (s.shape[:2], s.shape[3], s.device) != (n.shape[:2], n.shape[3], n.device):
            return None
        if s.shape[2] == 0 or s.device.type == "meta":
            return None
    tolerance = max(0.01, *(8 * torch.finfo(s.dtype).eps for s in (*stored, *new)))
    if positions is not None and positions.shape[-1] != new[0].shape[2]:
        positions = None
    lowest = 0 if positions is None else int(positions[..., 0].max()) - start
    found = _first_alike(stored, new, max(lowest, 0), tolerance)
    if found is not None:
        old, fed = found, 0
    elif start > 0 and (fed := _first_alike(new, stored, 0, tolerance)) is not None:
        old = 0
        if positions is not None and int(positions[..., fed].max()) > start:
            return None
    else:
        return None
    run = min(stored[0].shape[2] - old, new[0].shape[2] - fed)
    for s, n in zip(stored, new, strict=True):
        s, n = s[:, :, old : old + run], n[:, :, fed : fed + run]
        # By channel: a few of them are often so large that they would hide all others.
        if ((s - n).abs().amax((0, 2)) > tolerance * s.abs().amax((0, 2))).any():
            return None
    if positions is None and not _tells_positions(stored, old, run, tolerance):
        return None
    return start + old


def _first_alike(where, what, lowest: int, tolerance: float) -> int | None:
    """The first token of ``where``, from ``lowest`` on, that looks in all rows like the first one
    of ``what``. One head is enough to find it, and a few channels rule most tokens out."""
    lowest = min(lowest, where[0].shape[2])
    tokens = torch.arange(lowest, where[0].shape[2], device=where[0].device)
    dims = [states.shape[3] for states in where]
    for few in (True, False):
        for states, others, dim in zip(where, what, dims, strict=True):
            channels = slice(None, None, max(dim // 4, 1) if few else 1)
            states, one = states[:, 0, :, channels], others[:, 0, :1, channels]
            sample = states[:, :: states.shape[1] // _SAMPLE + 1]
            scale = torch.maximum(sample.abs().amax((0, 1)), one.abs().amax((0, 1)))
            # All tokens in a row, mostly: a view costs less than picking them.
            whole = len(tokens) == states.shape[1] - lowest
            states = states[:, lowest:] if whole else states[:, tokens]
            tokens = tokens[((states - one).abs() <= tolerance * scale).all(-1).all(0)]
            if len(tokens) == 0:
                return None
    return int(tokens[0])


def _tells_positions(stored, token: int, run: int, tolerance: float) -> bool:
    """Whether equal tokens near ``token`` have different keys (or, with latent attention, values)
    at different positions. Where no token occurs twice, a long ``run`` of equal ones must do."""
    near = slice(max(token - _NEIGHBOURHOOD, 0), token + _NEIGHBOURHOOD)
    same = []
    for states in stored:
        states = states[:, 0, near].float()
        scale = states.abs().amax((0, 1)).clamp_min(torch.finfo(torch.float32).tiny)
        same.append(torch.cdist(states / scale, states / scale, p=float("inf")) <= tolerance)
    both, either = same[0] & same[1], same[0] ^ same[1]
    # Padding tokens share one position: tokens that look like the first, up to the first that does
    # not, prove nothing.
    after = ~both[:, 0].cumprod(1).bool()
    pairs = after[:, :, None] & after[:, None]
    if not pairs.any() or (both & pairs).triu(1).any():
        return False
    return bool((either & pairs).any()) or run >= _CERTAIN_RUN
