"""Tokens per second of a slice of a large model: caches step by step, and compiled ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmark_decode import TOKEN, attended, fill, measure_decode
from benchmark_machine import peak_memory
from benchmark_slice import slice_config, slice_model
from benchmark_timing import distance, require_close, require_that
from gpu_notes import Incomplete, Notes
from gpu_sizes import Sizes
from gpu_timing import device_seconds
from transformers import Cache, DynamicCache, StaticCache

import anchor_cache

OURS, STATIC = "AnchorStaticCache", "StaticCache"
ABSENT = f"{OURS}: not in this checkout"
_ALWAYS = dict(dense_below=0, dense_above=1.0)
_PROMPT = 16  # tokens that run through the model after the others are put into the cache
_ROOM, _CHECKED, _RUN = 160, 3, 16  # further tokens; steps that are compared; steps timed at once
_GRAPHS = 3  # how often a decoding loop may be traced at most
# Logits of a compiled step may be off by so much of their norm.
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def model_of(sizes: Sizes, **fields):
    """The slice on the device."""
    return slice_model(slice_config(**{**sizes.slice_fields, **fields}), sizes.dtype, sizes.device)


def filled(model, cache: Cache, length: int) -> Cache:
    """The cache with ``length`` tokens. The last few run through the model: only attention shows a
    static cache what it is to index."""
    fill(cache, model, length - _PROMPT)
    ids = torch.full((1, _PROMPT), TOKEN, device=model.device)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def makers(model, length: int, budget: int, room: int = _ROOM) -> dict[str, Callable[[], Cache]]:
    """Functions that make each static contestant's cache, filled; ours only if it is there."""
    config, capacity = model.config, length + room
    kinds = {STATIC: lambda: StaticCache(config=config, max_cache_len=capacity)}
    if hasattr(anchor_cache, OURS):
        static = getattr(anchor_cache, OURS)
        kinds = {OURS: lambda: static(config, capacity, budget=budget, **_ALWAYS), **kinds}
    return {name: lambda make=make: filled(model, make(), length) for name, make in kinds.items()}


def compiled(model, sizes: Sizes) -> Callable[[Cache], torch.Tensor]:
    """A decoding step, compiled: the logits of one token, which the next step may overwrite."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False, **sizes.compiled)
    token = torch.full((1, 1), TOKEN, device=model.device)

    def step(cache: Cache) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(token, past_key_values=cache).logits

    return step


def eager_step(model, cache: Cache) -> torch.Tensor:
    """The same, not compiled."""
    return model(torch.full((1, 1), TOKEN, device=model.device), past_key_values=cache).logits


def counts() -> dict:
    """What torch.compile has counted since :func:`compiled`."""
    counters = torch._dynamo.utils.counters
    skips = counters["inductor"].get("cudagraph_skips", 0)
    return dict(graphs=counters["stats"].get("unique_graphs", 0), cudagraph_skips=skips)


def checked_steps(model, make, step, count: int) -> tuple[Cache, float]:
    """The cache after ``count`` compiled steps, and by how much the worst logits are off from those
    of steps that are not compiled."""
    cache = make()
    expected = [eager_step(model, cache).clone() for _ in range(count)]
    del cache  # or the peak of memory would be that of two
    cache = make()
    off = [distance(step(cache).clone(), logits) for logits in expected]
    return cache, max(off, key=lambda x: (x != x, x))  # what is not a number is the worst


def faults(model, off: float, counted: dict) -> list[str]:
    """What is wrong with compiled steps: their logits, or how often they were traced."""
    wrong, limit = [], _LIMITS[model.dtype]
    if not off <= limit:
        wrong.append(f"compiled logits off by {off:.2g} of the norm, allowed {limit:g}")
    if counted["graphs"] > _GRAPHS:
        wrong.append(f"traced {counted['graphs']} times, allowed {_GRAPHS}")
    return wrong


@torch.no_grad()
def measure_compiled(model, name: str, length: int, sizes: Sizes) -> dict:
    """Tokens per second of compiled steps.

    Raises:
        Incomplete: their logits are not those of steps that are not compiled, or they were traced
            more often than allowed.
    """
    step, kept = compiled(model, sizes), {}
    make = makers(model, length, sizes.budget)[name]

    def work() -> None:
        kept["cache"], kept["off"] = checked_steps(model, make, step, _CHECKED)

    peak = peak_memory(work, model.device)
    cache = kept.pop("cache")

    def several() -> None:
        for _ in range(_RUN):
            step(cache)

    rounds = (_ROOM - _CHECKED) // _RUN - 4
    timed = device_seconds(several, sizes.device, min(rounds, sizes.rounds))
    counted, per_token = counts(), timed["median"] / _RUN
    result = dict(tokens=length, seconds=per_token, tokens_per_second=1 / per_token, timed=timed)
    result |= dict(peak_bytes=peak, **kept, **counted)
    if name == OURS:
        report = cache.report()
        result |= dict(index_bytes=report.index_bytes, sparse_steps=report.sparse_steps)
    wrong = faults(model, kept["off"], counted)
    if wrong:
        raise Incomplete("; ".join(wrong), result)
    return result


@torch.no_grad()
def check_static(model, length: int) -> dict:
    """Ours with a budget that holds the whole context, by the way compiled steps read: every
    layer's attention beside DynamicCache's.

    Raises:
        WrongResult: a layer's is off.
    """
    static = getattr(anchor_cache, OURS)
    options = dict(max_cache_len=length * 5 // 4, budget=length + _PROMPT, **_ALWAYS)
    truth, _ = attended(model, lambda: filled(model, DynamicCache(config=model.config), length))
    pairs, cache = attended(
        model, lambda: filled(model, static(model.config, **options), length), truth
    )
    require_that(cache.report().index_bytes > 0, f"{OURS}: has no index")
    limit = {torch.float32: 1e-4}.get(model.dtype, 2e-2)
    return {
        "off": max(
            require_close(f"{OURS}, layer {i}", output, expected, limit)
            for i, ((_, output), (_, expected)) in enumerate(zip(pairs, truth, strict=True))
        )
    }


def run(notes: Notes, sizes: Sizes) -> None:
    """All caches step by step, then the static ones compiled."""
    model = model_of(sizes)
    for length in sizes.decoding:
        fields = _ALWAYS if length <= 4 * sizes.budget else {}

        def steps(length=length, fields=fields) -> dict:
            return measure_decode(model, length, sizes.budget, sizes.step, **fields)

        notes.attempt(f"steps, {length}", steps)
    if not hasattr(anchor_cache, OURS):
        notes.omitted[OURS] = ABSENT
    else:
        notes.attempt(f"{OURS}, whole budget", lambda: check_static(model, min(sizes.decoding)))
    for length in sizes.decoding:
        for name in makers(model, length, sizes.budget):

            def work(name=name, length=length) -> dict:
                return measure_compiled(model, name, length, sizes)

            notes.attempt(f"compiled {name}, {length}", work, needs=sizes.compiling)


@torch.no_grad()
def count_graphs(sizes: Sizes) -> dict:
    """Many compiled steps of ours over two layers, each beside the same step not compiled.

    Raises:
        Incomplete: they were traced more often than allowed, or were dense, or the logits differ.
    """
    model, length, count = model_of(sizes, layers=2), sizes.graph_context, sizes.graph_steps
    make = makers(model, length, sizes.budget, room=count + 1)[OURS]
    cache, off = checked_steps(model, make, compiled(model, sizes), count)
    counted, sparse = counts(), cache.report().sparse_steps
    result = dict(steps=count, off=off, sparse_steps=sparse, **counted)
    wrong = faults(model, off, counted)
    if sparse != count:
        wrong.append(f"{sparse} of {count} steps were sparse")
    if wrong:
        raise Incomplete("; ".join(wrong), result)
    return result


def run_graphs(notes: Notes, sizes: Sizes) -> None:
    """Whether compiled steps stay compiled."""
    if not hasattr(anchor_cache, OURS):
        notes.omitted[OURS] = ABSENT
        return
    notes.attempt(f"{sizes.graph_steps} steps", lambda: count_graphs(sizes))
