"""StreamingLLM's cache, a rival in the evaluations: the first tokens and the newest ones."""

from __future__ import annotations

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from anchor_cache.anchor_layer import AnchorLayer

SINKS = 16


class SinksAndNewest(DynamicCache):
    """StreamingLLM: forgets all but the first tokens and the newest ones.

    Tokens keep the positions that they had; no later step can see a forgotten token again. Layers
    that see a sliding window forget by themselves and stay as they are.

    Args:
        cache: a filled cache, used up.
        budget: share of the tokens so far that a step attends to, itself included.

    Raises:
        ValueError: a layer is neither of full attention nor one with a sliding window, or only
            later ones than the first have one.

    Attributes:
        whole: the layers of full attention.
    """

    def __init__(self, cache: DynamicCache, budget: float) -> None:
        super().__init__()
        self.budget, self.whole = budget, []
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                if self.whole and self.layers[0] is self.whole[0]:
                    # Masks of all layers are made for the length of the first one.
                    raise ValueError(f"layer {i} has a sliding window, and layer 0 has none")
                self.layers.append(layer)
                continue
            if type(layer) not in (DynamicLayer, AnchorLayer):
                raise ValueError(f"layer {i} is a {type(layer).__name__}")
            self.layers.append(DynamicLayer())
            self.update(layer.keys, layer.values, i)
            self.whole.append(self.layers[-1])

    def forget(self, tokens: int) -> int:
        """Forget before the token after these ``tokens`` is fed; how many it will attend to."""
        kept = max(int(self.budget * (tokens + 1)), SINKS + 2) - 1
        for layer in self.whole:
            if layer.keys.shape[2] > kept:
                for name in ("keys", "values"):
                    old = getattr(layer, name)
                    parts = old[:, :, :SINKS], old[:, :, SINKS - kept :]
                    setattr(layer, name, torch.cat(parts, 2))
        return self.whole[0].get_seq_length() + 1 if self.whole else tokens + 1
