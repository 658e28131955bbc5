"""One prompt, one way to choose what is read, and what the model then says: the runs of
evaluate_selection.py."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time

import torch
from evaluation_metrics import kl
from retrieval_tasks import RetrievalPrompt
from streaming_llm import SINKS, SinksAndNewest

from anchor_cache import AnchorConfig, AnchorDynamicCache

# Fewer sinks and a smaller window than by default: contexts are short here, and budgets small.
COMMON = dict(sink_size=SINKS, window_size=64, dense_below=0, dense_above=1.0)
AUDITED = ("mass", "estimated", "recall", "output_error")
LEAST = AnchorConfig(**COMMON).smallest_budget  # tokens of a step, however small the budget


@dataclasses.dataclass
class Place:
    """A prefilled context and the tokens that come after it."""

    prompt: RetrievalPrompt
    cache: AnchorDynamicCache
    fed: torch.Tensor  # the context's last token, not in the cache yet, and all targets but one
    target: torch.Tensor  # [T]
    truth: torch.Tensor  # dense log-probabilities [T, vocabulary], each before its token


@torch.no_grad()
def prefill(model, prompt: RetrievalPrompt) -> Place:
    """Prefill all of the prompt but its last token, and run the answer densely."""
    # A builder that looks at queries, so that they are kept for the contestants.
    cache = AnchorDynamicCache(model.config, builder="tangent", **COMMON, budget=1.0)
    ids = torch.tensor([prompt.ids + prompt.target], device=model.device)
    length = len(prompt.ids) - 1
    model(ids[:, :length], past_key_values=cache, logits_to_keep=1)
    dense = copy.deepcopy(cache)  # layers with a sliding window could not be cropped again
    logits = model(ids[:, length:-1], past_key_values=dense).logits[0]
    return Place(
        prompt, cache, ids[:, length:-1], ids[0, length + 1 :], logits.float().log_softmax(-1)
    )


@torch.no_grad()
def decode(model, place: Place, settings: dict):
    """Teacher-forced steps over the answer.

    Returns:
        Log-probabilities ``[T, vocabulary]``, the cache, and the seconds of each step.

    Raises:
        ValueError: the contestant cannot take this model's cache.
    """
    settings = dict(settings)
    start = place.cache.get_seq_length()
    evicts = settings.pop("evict", False)
    filled = copy.deepcopy(place.cache)  # layers with a sliding window are taken over as they are
    if evicts:
        # As much as the others, which cannot hold less than their sinks, window and one block.
        cache = SinksAndNewest(filled, max(settings["budget"], LEAST / start))
    else:
        cache = AnchorDynamicCache.from_cache(filled, **{**COMMON, **settings})
    logits, seconds = [], []
    for i, token in enumerate(place.fed.split(1, 1)):
        position = torch.tensor([[start + i]], device=token.device)
        started = time.perf_counter()
        if evicts:
            cache.forget(start + i)
        output = model(token, past_key_values=cache, position_ids=position)
        logits.append(output.logits[0, -1].float().log_softmax(-1))
        logits[-1].argmax().item()  # so that an accelerator has finished, as a user would wait
        seconds.append(time.perf_counter() - started)
    return torch.stack(logits), cache, seconds


def score(prompt: RetrievalPrompt, best: list[bool]) -> float | None:
    """Share of the answer's items whose tokens all are the most likely ones; None without any."""
    items = [float(all(best[start:stop])) for start, stop in prompt.items]
    return statistics.fmean(items) if items else None


def compare(model, place: Place, settings: dict) -> dict:
    """All figures of one contestant at one place."""
    logits, cache, seconds = decode(model, place, settings)
    figures = dict(
        kl=kl(place.truth, logits).tolist(),
        score=score(place.prompt, (logits.argmax(-1) == place.target).tolist()),
        nll=-logits.gather(1, place.target[:, None]).mean().item(),
        seconds=statistics.median(seconds[1:] or seconds),  # the first builds the index
    )
    return figures | _cost(cache, place.cache.get_seq_length() + len(place.target))


def share_read(cache: AnchorDynamicCache) -> float:
    """Of the cache, by its layers that can be sparse; a step that had to be dense reads it all."""
    tokens = cache.get_seq_length()
    layers = cache.report().records.values()
    read = sum(layer.attended + layer.dense_steps * tokens for layer in layers)
    steps = sum(layer.sparse_steps + layer.dense_steps for layer in layers)
    return read / (steps * tokens) if steps else 1.0


def _cost(cache, length: int) -> dict:
    """What was read of so many tokens, what the index takes, and what audits say."""
    if not isinstance(cache, AnchorDynamicCache):
        return dict(index=0.0, read=cache.whole[0].get_seq_length() / length)
    layers = cache.anchor_layers.values()
    keys = sum(layer.keys.numel() * layer.keys.element_size() for layer in layers)
    index = [layer.index.nbytes for layer in layers if layer.index is not None]
    audits = [audit for layer in layers for audit in layer.record.audits]
    figures = dict(index=sum(index) / max(keys, 1), read=share_read(cache))
    for name in AUDITED:
        values = [getattr(audit, name).nanmean().item() for audit in audits]
        values = [value for value in values if value == value]  # a step may have had no choice
        figures[name] = statistics.fmean(values) if values else None
    return figures
