"""One prompt, and the ways to fill its cache: shared by the evaluations of BlendedCache."""

from __future__ import annotations

import functools
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmark_timing import synchronize
from blend_answers import prefilled
from blend_tasks import BlendPrompt
from transformers import DynamicCache

from anchor_cache import BlendedCache, ChunkStore


class Stores:
    """Chunk stores in a folder, one per encoding and prefix, filled when they are needed.

    Args:
        folder: emptied by :meth:`clear`.
        model: the model.
        **options: of ChunkStore.
    """

    def __init__(self, folder: str | Path, model, **options) -> None:
        self.folder, self.model, self.options = Path(folder), model, options

    def fill(
        self, encoding: str, prompt: BlendPrompt, dtype: str | None = None
    ) -> tuple[ChunkStore, list]:
        """A store that holds the prompt's chunks, encoded and stored so, and the segments."""
        prefix, *chunks, question = prompt.segments
        segments = [prefix, *chunks, question]
        # The prompt's first token as a segment of its own keeps the rest of the prefix exact.
        if encoding == "sink" and len(prefix) > 1:
            segments = [prefix[:1], prefix[1:], *chunks, question]
        before = {"prefix": prefix, "prefix only": prefix, "sink": prefix[:1], "alone": None}
        store = ChunkStore(
            self.folder / encoding,
            self.model,
            prefix=before[encoding],
            dtype=dtype,
            **self.options,
        )
        store.add(segments[:1] if encoding == "prefix only" else segments[:-1], progress=False)
        return store, segments

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def encoded_alone(model, prompt: BlendPrompt) -> list[DynamicCache]:
    """The caches of the prompt's prefix and chunks, each encoded from position 0 on."""
    caches = []
    for segment in prompt.segments[:-1]:
        caches.append(DynamicCache())
        ids = torch.tensor([segment], device=model.device)
        model(ids, past_key_values=caches[-1], logits_to_keep=1)
    return caches


def unmoved(model, prompt: BlendPrompt, caches: list[DynamicCache]) -> DynamicCache:
    """Full reuse without position repair: keys stay rotated as they were when the chunk was
    encoded alone, from position 0 on."""
    joined = DynamicCache()
    for own in caches:
        for i, layer in enumerate(own.layers):
            joined.update(layer.keys, layer.values, i)
    question = torch.tensor([prompt.segments[-1][:-1]], device=model.device)
    if question.shape[1]:
        model(question, past_key_values=joined, logits_to_keep=1)
    return joined


def way_to_fill(
    model, prompt: BlendPrompt, settings: dict | None, stores: Stores
) -> Callable[[], DynamicCache]:
    """What fills the prompt's cache, all tokens but the last, after its chunks were encoded and
    stored; None: full prefill."""
    if settings is None:
        return functools.partial(prefilled, model, prompt)
    settings = dict(settings)
    encoding = settings.pop("encoding", "prefix")
    if encoding == "unmoved":
        return functools.partial(unmoved, model, prompt, encoded_alone(model, prompt))
    store, segments = stores.fill(encoding, prompt, settings.pop("stored", None))
    return functools.partial(BlendedCache.blend, model, store, segments, **settings)


def filled(model, prompt: BlendPrompt, settings: dict | None, stores: Stores) -> DynamicCache:
    """The prompt's cache, all tokens but the last in it; None: by full prefill."""
    return way_to_fill(model, prompt, settings, stores)()


def filled_and_timed(model, prompt: BlendPrompt, settings: dict | None, stores: Stores):
    """:func:`filled`, and what it cost.

    Returns:
        The cache, and as figures the ``seconds`` in which it was filled from what was stored, and
        ``recomputed``: the share of the reused tokens, exact ones aside, that a layer computed
        again, on average; None where nothing inexact was reused.
    """
    fill = way_to_fill(model, prompt, settings, stores)
    synchronize(model.device)
    started = time.perf_counter()
    cache = fill()
    synchronize(model.device)
    seconds, recomputed = time.perf_counter() - started, None
    if isinstance(cache, BlendedCache):
        report = cache.report()
        inexact = report.reused_tokens - report.exact_prefix_tokens
        if inexact:
            recomputed = statistics.mean(report.recomputed_tokens) / inexact
    elif settings is not None:
        recomputed = 0.0
    return cache, dict(seconds=seconds, recomputed=recomputed)
