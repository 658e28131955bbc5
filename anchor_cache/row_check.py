"""Whether a layer computes a few tokens as it computes them among all: blending rests on it."""

from __future__ import annotations

import torch

from .patches.partial_forward import PartialForward

# Of what the layer adds to the hidden states. A layer that takes the rows for others, or reads
# their mask wrongly, is far beyond; kernels that differ with the number of rows are far below.
_TOLERANCE = {torch.float32: 1e-2}
_TOLERANCE_16_BIT = 5e-2
_ROUNDINGS = 2  # of the sum with the hidden states, in units of the last place


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


def _length(states: torch.Tensor) -> torch.Tensor:
    """Euclidean, of each token's states ``[1, T, ...]`` -> ``[T]``."""
    return states[0].flatten(1).norm(dim=1)
