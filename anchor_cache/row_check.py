"""What blending rests on, tried out: that layers run in turn are the model, and that a layer
computes a few tokens as it computes them among all."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from .patches.compat import model_cache_keyword
from .patches.partial_forward import PartialForward

# Of what the layer adds to the hidden states. A layer that takes the rows for others, or reads
# their mask wrongly, is far beyond; kernels that differ with the number of rows are far below.
_TOLERANCE = {torch.float32: 1e-2}
_TOLERANCE_16_BIT = 5e-2
_ROUNDINGS = 0.5  # of the sum with the hidden states, in units of the last place


class _Replay:
    """A cache that holds the keys and values of a full pass, with the rows written over."""

    def __init__(self, kv: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        self._kv, self._rows = kv, rows

    def update(self, key_states, value_states, *args, **kwargs):
        fresh = (key_states, value_states)
        return tuple(
            held.index_copy(2, self._rows, own) for held, own in zip(self._kv, fresh, strict=True)
        )


def rows_agree(
    forward: PartialForward,
    layer: int,
    hidden: torch.Tensor,
    output: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
) -> bool:
    """Run every other token of a full pass once more, alone, over its keys and values.

    One row may differ: the rounding of other kernels can send a token to another expert.

    Args:
        forward: of the tokens of the full pass.
        layer: which.
        hidden, output: what went into the layer and came out, ``[1, T, D]``.
        kv: the layer's keys and values, ``[1, H_kv, T, D]``.
    """
    rows = torch.arange(1, forward.tokens, 2, device=hidden.device)
    alone = forward.run(layer, hidden[:, rows], rows, _Replay(kv, rows)).float()
    before, among = hidden[:, rows].float(), output[:, rows].float()
    tolerance = _TOLERANCE.get(output.dtype, _TOLERANCE_16_BIT) * _length(among - before)
    tolerance += _ROUNDINGS * torch.finfo(output.dtype).eps * _length(among)
    return bool((_length(alone - among) > tolerance).sum() <= 1)


def prefill_agrees(
    model: PreTrainedModel, ids: torch.Tensor, filled: list[tuple[torch.Tensor, torch.Tensor]]
) -> bool:
    """Whether the model's own prefill of ``ids`` ``[1, T]`` caches the keys and values in
    ``filled``, one ``[1, H_kv, T, D]`` pair per layer, and no more."""
    cache = DynamicCache(config=model.config)
    depth = len(cache.layers)
    model.get_decoder()(input_ids=ids, use_cache=True, **{model_cache_keyword(model): cache})
    own = [(layer.keys, layer.values) for layer in cache.layers if layer.keys is not None]
    if len(cache.layers) != depth or len(own) != len(filled):
        return False
    both = zip(own, filled, strict=True)
    return all(_near(k, keys) and _near(v, values) for (k, v), (keys, values) in both)


def _near(kept: torch.Tensor, states: torch.Tensor) -> bool:
    states = states[:, :, -kept.shape[2] :].float()  # sliding layers keep the newest tokens
    tolerance = _TOLERANCE.get(kept.dtype, _TOLERANCE_16_BIT)
    return bool((kept.float() - states).norm() <= tolerance * states.norm())


def _length(states: torch.Tensor) -> torch.Tensor:
    """Euclidean, of each token's states ``[1, T, ...]`` -> ``[T]``."""
    return states[0].flatten(1).norm(dim=1)
