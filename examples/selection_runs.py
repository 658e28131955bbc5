"""One prompt, one way to choose what is read, and what the model then says: the runs of
evaluate_selection.py."""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch
from evaluation_metrics import kl
from retrieval_tasks import RetrievalPrompt
from streaming_llm import SINKS, SinksAndNewest
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache

# With the default sinks and window, the smallest budgets would hold nothing else.
COMMON = dict(sink_size=SINKS, window_size=64, dense_below=0, dense_above=1.0)


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
    cache = AnchorDynamicCache(model.config, builder="tangent", **COMMON)
    ids = torch.tensor([prompt.ids + prompt.target], device=model.device)
    length = len(prompt.ids) - 1
    model(ids[:, :length], past_key_values=cache, logits_to_keep=1)
    logits = model(ids[:, length:-1], past_key_values=cache).logits[0]
    cache.crop(length - cache.get_seq_length())
    return Place(
        prompt, cache, ids[:, length:-1], ids[0, length + 1 :], logits.float().log_softmax(-1)
    )


@torch.no_grad()
def decode(model, place: Place, settings: dict):
    """Teacher-forced steps over the answer.

    Returns:
        Log-probabilities ``[T, vocabulary]``, the cache, and the seconds of each step.
    """
    settings = dict(settings)
    start = place.cache.get_seq_length()
    evicts = settings.pop("evict", False)
    if evicts:
        stored = DynamicCache(config=model.config)
        for i, layer in enumerate(place.cache.layers):
            stored.update(layer.keys, layer.values, i)
        cache = SinksAndNewest(stored, settings["budget"])
    else:
        cache = AnchorDynamicCache.from_cache(place.cache, **{**COMMON, **settings})
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


def _cost(cache, length: int) -> dict:
    """What was read of so many tokens, what the index takes, and what audits say."""
    if not isinstance(cache, AnchorDynamicCache):
        return dict(index=0.0, read=cache.layers[0].keys.shape[2] / length)
    keys = sum(layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)
    layers = cache.anchor_layers.values()
    index = [layer.index.nbytes for layer in layers if layer.index is not None]
    audits = [audit for layer in layers for audit in layer.record.audits]
    report = cache.report()
    read = report.tokens_attended if report.sparse_steps else length
    figures = dict(index=sum(index) / keys, read=read / length)
    for field, name in AUDITED.items():
        values = [getattr(audit, field).nanmean().item() for audit in audits]
        figures[name] = statistics.mean(values) if values else None
    return figures


AUDITED = {"mass": "mass", "estimated": "believed", "recall": "recall", "output_error": "error"}
