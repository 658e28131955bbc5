"""An AnchorLayer whose keys and values are not on the model's device."""

from __future__ import annotations

import torch

from .anchor_layer import AnchorLayer, identity
from .patches.attention import Reading, hand_over


class OffloadedAnchorLayer(AnchorLayer):
    """Copies everything to the model's device only for steps that turn out to be dense.

    Whether a step is sparse is known when its query comes, after ``update`` has returned. So a
    decoding step gets stand-ins of the right shape, and attention gets the real ones when it calls
    :meth:`read`; but only after that method was called for real ones, which shows that the model's
    attention passes through it and takes keys as they come from the cache. Should that ever not
    hold, the stand-ins are nan.
    """

    _attention_reads = False
    _stands_in = False

    def _to_attend(self, new_tokens: int):
        self._stands_in = (
            self._keys.is_remote
            and new_tokens == 1
            and self._attention_reads
            and not self.config.audit_every  # an audit needs all keys
        )
        if not self._stands_in:
            return super()._to_attend(new_tokens)
        keys, values = (_stand_in(states) for states in (self._keys, self._values))
        # Layers that share this one's keys are not handed the layer in any other way.
        hand_over(self, keys, {})
        return keys, values

    def read(self, module, query, keys, values, mask, kwargs) -> Reading | None:
        reading = super().read(module, query, keys, values, mask, kwargs)
        untouched = (identity(keys), identity(values)) == self._given
        if not self._stands_in:
            self._attention_reads = untouched
            return reading
        if not untouched:
            raise NotImplementedError(
                f"layer {self.module_idx} changes its keys or values after the cache in some "
                f"steps and not in others; use offload=None, not {self.config.offload!r}"
            )
        return reading or Reading(self._keys.states, self._values.states, mask)

    def _forget(self) -> None:
        super()._forget()
        self._attention_reads = self._stands_in = False


def _stand_in(states) -> torch.Tensor:
    dtype, device = states.stored.dtype, states.model_device
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(states.shape)
