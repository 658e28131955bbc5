"""Time to the first token of a blended prompt, beside full prefill and prefix caching.

The same prompts and counts as `evaluate_blend.py --tasks prefill`; what is added are stores in
memory and on disk side by side, prefix caching, and the checks before anything is timed.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from benchmark_timing import PACE, Pace, WrongResult, alternate, require_that, shown, spread
from blend_answers import distributions, prefilled
from blend_contestants import FULL
from blend_operations import blend_operations, prefill_operations
from blend_prefill import first_token, forget, store_options
from blend_runs import Stores
from blend_tasks import BlendPrompt
from evaluation_metrics import kl, markdown
from transformers import DynamicCache, PreTrainedModel

from anchor_cache import BlendedCache

PREFIX_CACHING = "prefix caching"
RATIOS = (0.0, 0.05, 0.15, 0.3)
STORES = ("memory", "disk")
# KL, in nats, that different orders of summation may leave between distributions that are the same
# in exact arithmetic.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 1e-3}


def _beginning(model: PreTrainedModel, segment: tuple[int, ...]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(torch.tensor([segment], device=model.device), past_key_values=cache, logits_to_keep=1)
    return cache


def _extended(model: PreTrainedModel, cache, prompt: BlendPrompt):
    """The cache with all tokens of the prompt but the last."""
    rest = torch.tensor([prompt.ids[cache.get_seq_length() : -1]], device=model.device)
    if rest.shape[1]:
        model(rest, past_key_values=cache, logits_to_keep=1)
    return cache


def difference(model: PreTrainedModel, cache, prompt: BlendPrompt, truth: torch.Tensor) -> float:
    """Mean KL of full prefill's next-token distributions and those over this cache, extended."""
    own = distributions(model, _extended(model, cache, prompt), prompt)
    return kl(truth, own)[:-1].mean().item()


def require_same(what: str, off: float, dtype: torch.dtype) -> float:
    """``off``, a KL, if it is small enough for distributions that should be the same.

    Raises:
        WrongResult: it is not.
    """
    if not abs(off) <= LIMITS[dtype]:
        raise WrongResult(f"{what}: KL to full prefill {off:.2g}, allowed {LIMITS[dtype]:g}")
    return off


@torch.no_grad()
def check_blending(model: PreTrainedModel, prompt: BlendPrompt) -> dict:
    """In fp32: recomputing everything is full prefill, and recomputing nothing recomputes nothing.

    Args:
        model: left as it is; a copy is looked at.
        prompt: a small one will do.

    Raises:
        WrongResult: it is not so.
    """
    exact = copy.deepcopy(model).float()
    truth = distributions(exact, prefilled(exact, prompt), prompt)
    with tempfile.TemporaryDirectory() as folder:
        store, segments = Stores(folder, exact).fill("prefix", prompt)
        whole = BlendedCache.blend(exact, store, segments, recompute_ratio=1.0)
        reused = BlendedCache.blend(exact, store, segments, recompute_ratio=0.0)
    off = difference(exact, whole, prompt, truth)
    require_same("a blend with recompute_ratio=1", off, torch.float32)
    recomputed = sum(reused.report().recomputed_tokens)
    require_that(recomputed == 0, f"recompute_ratio=0 recomputes {recomputed} token-layers")
    return {"tokens": len(prompt.ids), "kl_at_ratio_1": off, "recomputed_at_ratio_0": recomputed}


def _require_blended(name: str, cache: BlendedCache, prompt: BlendPrompt, ratio: float) -> None:
    report, stored = cache.report(), sum(map(len, prompt.segments[:-1]))
    require_that(
        cache.input_ids[0].tolist() == prompt.ids
        and cache.get_seq_length() == len(prompt.ids) - 1
        and report.reused_tokens == stored,
        f"{name}: {report.reused_tokens} of {stored} stored tokens reused, "
        f"{cache.get_seq_length()} tokens in the cache of a prompt of {len(prompt.ids)}",
    )
    inexact = stored - report.exact_prefix_tokens
    share = len(report.selected) / max(inexact, 1)
    require_that(
        abs(share - ratio) * inexact <= 1,
        f"{name}: {len(report.selected)} of {inexact} inexact tokens recomputed",
    )


@torch.no_grad()
def measure_blend(
    model: PreTrainedModel,
    prompt: BlendPrompt,
    pace: Pace = PACE,
    ratios: tuple[float, ...] = RATIOS,
    stores: tuple[str, ...] = STORES,
    prefix_caching: bool = True,
    more: dict[str, Callable] | None = None,
    **fields,
) -> dict:
    """Seconds to the first token of every contestant.

    Args:
        model: on whatever device.
        prompt: as blend_prefill.text_prompt makes one.
        pace: how many rounds.
        ratios: shares to recompute.
        stores: "memory" and "disk"; the files of the latter are dropped from the system's page
            cache before every blend.
        prefix_caching: whether it takes part: the first segment is reused, and nothing else.
        more: contestants of your own that give what full prefill gives: ``make(prompt)`` returns a
            cache that holds a part of the prompt.
        **fields: other fields of BlendConfig.

    Raises:
        WrongResult: a contestant's cache is wrong; nothing is timed then.
    """
    truth = distributions(model, prefilled(model, prompt), prompt)
    whole = prefill_operations(model, len(prompt.ids))
    ways: dict[str, Callable] = {FULL: lambda: DynamicCache(config=model.config)}
    rows = {FULL: dict(kl=0.0, operations=1.0, store=None, ratio=None)}
    if prefix_caching:
        kept = _beginning(model, prompt.segments[0])
        ways[PREFIX_CACHING] = functools.partial(copy.deepcopy, kept)
        saved = prefill_operations(model, len(prompt.segments[0])) / whole
        rows[PREFIX_CACHING] = dict(operations=1 - saved, store=None, ratio=None)
    for name, make in (more or {}).items():
        ways[name] = functools.partial(make, prompt)
        rows[name] = dict(operations=None, store=None, ratio=None)
    for name in list(ways)[1:]:
        off = difference(model, ways[name](), prompt, truth)
        rows[name]["kl"] = require_same(name, off, model.dtype)
    with tempfile.TemporaryDirectory() as folder:
        for kind in stores:
            own = Stores(Path(folder, kind), model, **store_options(kind))
            store, segments = own.fill("prefix", prompt)
            for ratio in ratios:
                name = f"blend {ratio:g}, {kind}"
                make = functools.partial(
                    BlendedCache.blend, model, store, segments, recompute_ratio=ratio, **fields
                )
                cache = make()
                _require_blended(name, cache, prompt, ratio)
                counted = blend_operations(model, cache.report(), len(prompt.ids)) / whole
                off = difference(model, cache, prompt, truth)
                require_that(off == off, f"{name}: KL to full prefill is not a number")
                ways[name] = make
                rows[name] = dict(kl=off, operations=counted, store=kind, ratio=ratio)
        del cache

        def step(turn: int, make: Callable) -> None:
            first_token(model, make(), prompt.ids)

        def before(name: str) -> None:
            if rows[name]["store"] == "disk":
                forget(Path(folder, "disk"))

        steps = {name: functools.partial(step, make=make) for name, make in ways.items()}
        label = f"blend, {len(prompt.ids):,}"
        timed = alternate(steps, pace, model.device, label, before)
    for name, row in rows.items():
        row |= spread(timed[name])
    for row in rows.values():
        row["speed"] = {FULL: rows[FULL]["median"] / row["median"]}
        if prefix_caching:
            row["speed"][PREFIX_CACHING] = rows[PREFIX_CACHING]["median"] / row["median"]
        if row["operations"] is not None:
            row["bound"] = rows[FULL]["median"] * row["operations"]
            row["of_bound"] = row["median"] / row["bound"]
    dtype = str(model.dtype)[6:]
    return dict(tokens=len(prompt.ids), dtype=dtype, prompt=prompt.name, contestants=rows)


def table(results: list[dict]) -> str:
    """Markdown; the bound is full prefill's time x the share of its multiply-adds."""
    header = ["tokens", "contestant", "first token (quartiles)", "vs full", "vs prefix caching"]
    header += ["bound", "measured / bound", "KL"]
    rows = []
    for result in results:
        for name, row in result["contestants"].items():
            cells = [f"{result['tokens']:,}", name, shown(row, "s")]
            speeds = [row["speed"].get(other) for other in (FULL, PREFIX_CACHING)]
            cells += ["-" if speed is None else f"{speed:.2f} x" for speed in speeds]
            bound = "bound" in row
            cells.append(f"{row['bound']:.3f} s" if bound else "-")
            cells.append(f"{row['of_bound']:.2f}" if bound else "-")
            rows.append([*cells, f"{row['kl']:.4f}"])
    return markdown(header, rows)
