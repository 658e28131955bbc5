"""Whole decoding steps of a model: transformers' caches and AnchorDynamicCache.

The caches are filled with the same random keys and values: only the time is of interest here, and
it does not depend on them. What must be right is looked at first, layer by layer: a sum over a
layer's attention that is wrong would hardly be seen in the logits of a random context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from benchmark_machine import free_memory, peak_memory
from benchmark_timing import (
    PACE,
    Pace,
    alternate,
    distance,
    require_close,
    require_that,
    shown,
    spread,
)
from evaluation_metrics import markdown
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from anchor_cache import AnchorDynamicCache

OURS, DYNAMIC, STATIC = "AnchorDynamicCache", "DynamicCache", "StaticCache"
TOKEN = 5
# By how much of its norm a layer's attention may be off.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def fill(cache: Cache, model: PreTrainedModel, length: int) -> Cache:
    """The same random keys and values for every cache of this length."""
    text = model.config.get_text_config(decoder=True)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    generator = torch.Generator(model.device).manual_seed(length)
    shape = (1, text.num_key_value_heads, length, dim)
    make = dict(generator=generator, device=model.device)
    states = [torch.randn(shape, **make).to(model.dtype) for _ in "kv"]
    for layer in range(text.num_hidden_layers):
        # Another one's keys for each layer, without making new ones: heads change places.
        cache.update(*(x.roll(layer, 1) if layer else x for x in states), layer)
    return cache


def makers(model: PreTrainedModel, length: int, room: int, **fields) -> dict[str, Callable]:
    """Functions that make each contestant's cache.

    Args:
        model: the model.
        length: tokens that each is filled with.
        room: steps that are to follow.
        **fields: of AnchorConfig.
    """
    kinds = {
        OURS: lambda: AnchorDynamicCache(model.config, **fields),
        DYNAMIC: lambda: DynamicCache(config=model.config),
        STATIC: lambda: StaticCache(config=model.config, max_cache_len=length + room),
    }
    return {name: lambda make=make: fill(make(), model, length) for name, make in kinds.items()}


def decode(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """One step; its logits."""
    token = torch.full((1, 1), TOKEN, device=model.device)
    return model(token, past_key_values=cache).logits


@contextlib.contextmanager
def watched_attention(model: PreTrainedModel, given: list | None = None) -> Iterator[list]:
    """Collects what goes into every attention module and comes out of it: pairs of ``[1, T,
    hidden]``, in a list.

    Args:
        model: the model.
        given: pairs of an earlier run, whose inputs the modules then get instead of their own, so
            that no layer answers for the rounding of those before it.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replace(module, args, kwargs):
        if given is None:
            return None
        hidden = given[len(pairs)][0]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": hidden}
        return (hidden, *args[1:]), kwargs

    def note(module, args, kwargs, output):
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        pairs.append((hidden, output[0]))

    modules = [m for name, m in model.named_modules() if name.endswith(("attn", "attention"))]
    hooks = [m.register_forward_pre_hook(replace, with_kwargs=True) for m in modules]
    hooks += [m.register_forward_hook(note, with_kwargs=True) for m in modules]
    try:
        yield pairs
    finally:
        for hook in hooks:
            hook.remove()


def attended(model: PreTrainedModel, make: Callable[[], Cache], given: list | None = None):
    """Every layer's attention in one step over a new cache, as :func:`watched_attention` gives it,
    and the cache."""
    cache = make()
    with watched_attention(model, given) as pairs:
        decode(model, cache)
    require_that(bool(pairs), "no attention module was found by its name")
    return pairs, cache


def check(model: PreTrainedModel, contestants: dict[str, Callable], budget: int, whole) -> dict:
    """Every contestant's first step beside DynamicCache's, layer by layer.

    Args:
        model: the model.
        contestants: as of :func:`makers`.
        budget: tokens that ours may read.
        whole: makes our cache with a budget of the whole context.

    Returns:
        By how much each is off, the worst layer; of ours, with its own budget, this is what the
        selection leaves out.

    Raises:
        WrongResult: a stock cache, or ours with everything read, is off; ours read too much.
    """
    limit = LIMITS[model.dtype]
    truth, _ = attended(model, contestants[DYNAMIC])
    off = {DYNAMIC: 0.0}

    def compare(name: str, make: Callable[[], Cache], limit: float | None) -> Cache:
        pairs, cache = attended(model, make, truth)
        distances = []
        for i, ((_, output), (_, expected)) in enumerate(zip(pairs, truth, strict=True)):
            if limit is not None:
                require_close(f"{name}, layer {i}", output, expected, limit)
            distances.append(distance(output, expected))
        off[name] = max(distances)
        return cache

    for name, make in contestants.items():
        if name not in (OURS, DYNAMIC):
            compare(name, make, limit)
    compare(f"{OURS}, budget=1.0", whole, limit)
    report = compare(OURS, contestants[OURS], None).report()
    most = report.max_tokens_attended
    require_that(most <= budget, f"{OURS}: read {most} tokens, may read {budget}")
    require_that(
        report.sparse_steps > 0 or off[OURS] <= limit,
        f"{OURS}: a dense step is off by {off[OURS]:.2g}",
    )
    return off


def stored_bytes(cache: Cache) -> dict:
    """Bytes of keys and values, room to grow left out where the cache tells, and of the index."""
    if isinstance(cache, AnchorDynamicCache):
        report = cache.report()
        return {"kv_bytes": report.kv_bytes, "index_bytes": report.index_bytes}
    states = (x for layer in cache.layers for x in (layer.keys, layer.values))
    return {"kv_bytes": sum(x.numel() * x.element_size() for x in states), "index_bytes": 0}


def memory(model: PreTrainedModel, make: Callable[[], Cache]) -> dict:
    """What a cache keeps, and by how much filling it and decoding two tokens raises the memory in
    use at the peak (None where the system does not tell)."""
    kept = {}

    def work() -> None:
        cache = make()
        for _ in range(2):
            decode(model, cache)
        kept.update(stored_bytes(cache))

    return {"peak_bytes": peak_memory(work, model.device), **kept}


def _timed(model, contestants: dict[str, Callable], pace: Pace, together: bool, label: str):
    """Seconds per step, all caches in memory at once or, in turns of several steps, one."""
    if together:
        caches = {name: make() for name, make in contestants.items()}
        steps = {n: lambda turn, cache=c: decode(model, cache) for n, c in caches.items()}
        return alternate(steps, pace, model.device, label)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    visits, share = 2, Pace(-(-pace.rounds // 2), pace.warm_up, pace.seconds / len(contestants) / 2)
    for visit in range(visits):
        for name, make in contestants.items():
            cache = make()
            steps = {name: lambda turn, cache=cache: decode(model, cache)}
            one = alternate(steps, share, model.device, f"{label}, {name}, {visit + 1}/{visits}")
            seconds[name] += one[name]
            del cache, steps
    return seconds


@torch.no_grad()
def measure_decode(
    model: PreTrainedModel,
    length: int,
    budget: int = 2048,
    pace: Pace = PACE,
    more: dict[str, Callable] | None = None,
    **fields,
) -> dict:
    """Seconds per token of every contestant after ``length`` tokens.

    Args:
        model: on whatever device, in whatever precision.
        length: tokens in the caches before the first step.
        budget: tokens that ours reads per step.
        pace: how many rounds.
        more: contestants of your own that read everything: functions that make an empty cache.
        **fields: other fields of AnchorConfig.

    Raises:
        WrongResult: a contestant's step is wrong; nothing is timed then.
    """
    contestants = makers(model, length, pace.rounds + pace.warm_up, budget=budget, **fields)
    for name, make in (more or {}).items():
        contestants[name] = lambda make=make: fill(make(), model, length)
    whole = makers(model, length, 1, **{**fields, "budget": 1.0})[OURS]
    off = check(model, contestants, budget, whole)
    rows = {name: memory(model, make) for name, make in contestants.items()}
    # DynamicCache needs its largest layer a second time; ours, room to grow.
    needed = 1.3 * sum(row["kv_bytes"] + row["index_bytes"] for row in rows.values())
    together = needed < free_memory(model.device)
    label = f"{type(model).__name__}, {length:,}"
    timed = _timed(model, contestants, pace, together, label)
    for name, row in rows.items():
        row |= spread(timed[name])
        row |= {"off": off[name], "tokens_per_second": 1 / row["median"]}
        row["sparse"] = name == OURS and row["index_bytes"] > 0
    for row in rows.values():
        row["speed"] = {n: rows[n]["median"] / row["median"] for n in (DYNAMIC, STATIC)}
    return {
        "tokens": length,
        "dtype": str(model.dtype)[6:],
        "budget": budget,
        "model": type(model).__name__,
        "layers": model.config.get_text_config(decoder=True).num_hidden_layers,
        "caches_at_once": len(rows) if together else 1,
        "off_at_whole_budget": off[f"{OURS}, budget=1.0"],
        "contestants": rows,
    }


def table(results: list[dict]) -> str:
    """Markdown: a row per length and contestant."""
    header = ["tokens", "dtype", "contestant", "tokens / s", "s / token (quartiles)"]
    header += ["vs Dynamic", "vs Static", "K/V", "index", "peak memory"]
    rows = []
    for result in results:
        for name, row in result["contestants"].items():
            dense = name == OURS and not row["sparse"]
            cells = [f"{result['tokens']:,}", result["dtype"], name + (" (dense)" if dense else "")]
            cells += [f"{row['tokens_per_second']:.2f}", shown(row, "s")]
            cells += [f"{row['speed'][other]:.2f} x" for other in (DYNAMIC, STATIC)]
            sizes = (row["kv_bytes"], row["index_bytes"], row["peak_bytes"])
            cells += ["-" if size is None else f"{size / 2**20:,.0f} MiB" for size in sizes]
            rows.append(cells)
    return markdown(header, rows)
