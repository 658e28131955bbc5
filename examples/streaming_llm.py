"""StreamingLLM's cache, a rival in the evaluations: the first tokens and the newest ones."""

from __future__ import annotations

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from anchor_cache.anchor_layer import AnchorLayer

SINKS = 16


class SinksAndNewest(DynamicCache):
    """StreamingLLM: forgets all but the first tokens and the newest ones.

    Tokens keep the positions that they had; no later step can see a forgotten token again.

    Args:
        cache: a filled cache, used up.
        budget: share of the tokens so far that a step attends to, itself included.

    Raises:
        ValueError: a layer is not one of full attention.
    """

    def __init__(self, cache: DynamicCache, budget: float) -> None:
        super().__init__()
        for i, layer in enumerate(cache.layers):
            if type(layer) not in (DynamicLayer, AnchorLayer):
                raise ValueError(f"layer {i} is a {type(layer).__name__}")
            self.update(layer.keys, layer.values, i)
        self.budget = budget

    def forget(self, tokens: int) -> int:
        """Forget before the token after these ``tokens`` is fed; how many it will attend to."""
        kept = max(int(self.budget * (tokens + 1)), SINKS + 2) - 1
        for layer in self.layers:
            if layer.keys.shape[2] > kept:
                for name in ("keys", "values"):
                    old = getattr(layer, name)
                    parts = old[:, :, :SINKS], old[:, :, SINKS - kept :]
                    setattr(layer, name, torch.cat(parts, 2))
        return self.get_seq_length() + 1
