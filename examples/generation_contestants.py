"""Who generates in evaluate_generation.py, and greedy generation over any of their caches."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time

import torch
from benchmark_timing import synchronize
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from anchor_cache import AnchorDynamicCache

SINKS = 16
# With the default sinks and window, the smallest budgets would hold nothing else.
SPARSE = dict(sink_size=SINKS, window_size=64, dense_below=0, dense_above=1.0)
CONTESTANTS = {
    "AnchorDynamicCache": {},
    "Quest": dict(builder="minmax", refine=None, anchor_dtype=None, block_size=16),
    "StreamingLLM": None,
}


@dataclasses.dataclass
class Generated:
    """A greedy continuation and what it cost."""

    tokens: list[int]
    read: float  # tokens attended per step, layer and head, mean
    seconds: float  # per token, median
    dense_steps: int


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
            if type(layer) is not DynamicLayer:
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


def cache_of(filled: DynamicCache, name: str, budget: float | None) -> DynamicCache:
    """A contestant's own copy of a prefilled cache; without a budget, the dense one.

    Raises:
        ValueError: the contestant cannot take this model's cache.
    """
    own = copy.deepcopy(filled)
    if budget is None:
        return own
    settings = CONTESTANTS[name]
    if settings is None:
        return SinksAndNewest(own, budget)
    return AnchorDynamicCache.from_cache(own, budget=budget, **SPARSE, **settings)


@torch.no_grad()
def generate(model, cache, ids: torch.Tensor, tokens: int, end: int | None) -> Generated:
    """Greedy decoding of so many ``tokens``.

    Args:
        model: the model.
        cache: all of ``ids`` but the last.
        ids: the prompt, ``[1, T]``.
        tokens: how many.
        end: a token that is never chosen, so that all texts are equally long.
    """
    token, said, seconds, attended = ids[:, -1:], [], [], []
    for position in range(ids.shape[1] - 1, ids.shape[1] - 1 + tokens):
        place = torch.tensor([[position]], device=ids.device)
        synchronize(ids.device)
        started = time.perf_counter()
        streaming = isinstance(cache, SinksAndNewest)
        attended.append(cache.forget(position) if streaming else position + 1)
        logits = model(token, past_key_values=cache, position_ids=place).logits[0, -1]
        if end is not None:
            logits[end] = -torch.inf
        token = logits.argmax().view(1, 1)
        said.append(token.item())
        seconds.append(time.perf_counter() - started)
    read, dense_steps = statistics.fmean(attended), 0
    if isinstance(cache, AnchorDynamicCache):
        report = cache.report()
        dense_steps = report.dense_steps
        sparse = report.tokens_attended * report.sparse_steps
        read = (sparse + read * dense_steps) / (report.sparse_steps + dense_steps)
    return Generated(said, read, statistics.median(seconds), dense_steps)
