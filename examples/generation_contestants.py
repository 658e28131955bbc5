"""Who generates in evaluate_generation.py, and greedy generation over any of their caches."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time

import torch
from benchmark_timing import synchronize
from contestants import ORACLE, QUEST
from selection_runs import COMMON
from streaming_llm import SinksAndNewest
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache

CONTESTANTS = {
    "AnchorDynamicCache": {},
    "AnchorDynamicCache, 1 bit": dict(sketch_bits=1),
    "Quest": QUEST,
    "StreamingLLM": None,
    "oracle": ORACLE,
}


@dataclasses.dataclass
class Generated:
    """A greedy continuation and what it cost."""

    tokens: list[int]
    read: float  # tokens attended per step, layer and head, mean
    seconds: float  # per token, median
    dense_steps: int


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
    return AnchorDynamicCache.from_cache(own, budget=budget, **COMMON, **settings)


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
