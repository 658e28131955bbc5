"""One prompt, one way to fill its cache, and what the model then says: shared by the evaluations
of BlendedCache."""

from __future__ import annotations

import copy
import functools
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmark_timing import synchronize
from blend_tasks import BlendPrompt
from evaluation_metrics import kl
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


def prefilled(model, prompt: BlendPrompt) -> DynamicCache:
    """Full prefill of all tokens but the last."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompt.ids[:-1]], device=model.device)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


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


def distributions(model, cache, prompt: BlendPrompt) -> torch.Tensor:
    """Log-probabilities before each gold token and after the last ``[G + 1, vocabulary]``."""
    ids = torch.tensor([[prompt.ids[-1], *prompt.gold]], device=model.device)
    return model(ids, past_key_values=cache).logits[0].float().log_softmax(-1)


def greedy_line(model, tokenizer, cache, prompt: BlendPrompt, tokens: int) -> str:
    """Greedy decoding up to the end of the line, ``tokens`` at most."""
    last, said = prompt.ids[-1], []
    for _ in range(tokens):
        ids = torch.tensor([[last]], device=model.device)
        last = model(ids, past_key_values=cache).logits[0, -1].argmax().item()
        if last == tokenizer.eos_token_id or "\n" in tokenizer.decode([last]):
            break
        said.append(last)
    return tokenizer.decode(said, skip_special_tokens=True).strip()


def compare(model, tokenizer, cache, prompt: BlendPrompt, truth, answer_tokens: int):
    """What the model says over this cache, and how far that is from ``truth``.

    Args:
        truth: :func:`distributions` over full prefill's cache; None if ``cache`` is that cache.
        answer_tokens: how long a decoded answer may be; only prompts with answers decode one.

    Returns:
        The figures, and the distributions.
    """
    decoding = copy.deepcopy(cache) if prompt.answers else None
    own = distributions(model, cache, prompt)
    gold = torch.tensor(prompt.gold, device=own.device)
    follows = tokenizer.decode(own[-1].argmax().item())
    figures = dict(
        kl=kl(own if truth is None else truth, own)[:-1].tolist(),
        nll=-own[:-1].gather(1, gold[:, None]).mean().item(),
        # Greedy decoding gives these tokens exactly if each is the most likely one. A digit that
        # follows would make another number of them.
        right=bool((own[:-1].argmax(-1) == gold).all()) and not follows[:1].isdigit(),
    )
    if decoding is not None:
        figures["answer"] = greedy_line(model, tokenizer, decoding, prompt, answer_tokens)
    return figures, own
