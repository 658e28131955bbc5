"""One decoding step of one attention layer: what a cache's update and its attention cost.

Made states of any length, so no model has to be prefilled. Every contestant's first step is
compared with attention that is written out: ours with attention over just the tokens that it
reports, and, with a budget of the whole context, over all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from benchmark_layer import (
    DYNAMIC,
    STATIC,
    anchor_cache,
    cache_step,
    faster_dense,
    first_truth,
    stock_step,
)
from benchmark_states import LLAMA_8B, LayerStates, Shape
from benchmark_timing import PACE, Pace, alternate, require_close, require_that, shown, spread
from evaluation_metrics import markdown

from anchor_cache import AnchorConfig, AnchorDynamicCache
from anchor_cache.selection import always_read, budget_of

# The two published kinds of index are shown as such: they select wherever the budget allows it.
_ALWAYS = dict(dense_below=0, dense_above=1.0)
OURS = {
    "AnchorDynamicCache": {},
    "tangent anchors (article A)": dict(block_size=64, builder="tangent", refine=None, **_ALWAYS),
    "min/max boxes (Quest)": dict(block_size=16, builder="minmax", refine=None, **_ALWAYS),
}
DENSE = "dense, strongest"
# By how much of its norm an output of heads may be off. The last is for the same selection made
# twice, in which pieces of next to equal mass may change places.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SAME_SELECTION = 5e-2


def reported_positions(cache: AnchorDynamicCache) -> torch.Tensor:
    """The tokens that the last audited step of layer 0 says it read, ``[B, H_kv, S]``."""
    audit, config = cache.report().records[0].audits[-1], cache.anchor_config
    length, size = cache.get_seq_length(), config.block_size
    fixed = torch.arange(length)
    sinks, window = always_read(config, budget_of(config, length))
    fixed = torch.cat((fixed[: sinks * size], fixed[(length - window) // size * size :]))
    pieces = (audit.starts.cpu().unsqueeze(-1) + torch.arange(audit.piece)).flatten(2)
    return torch.cat((fixed.expand(*pieces.shape[:2], -1), pieces), 2)


def check_ours(name: str, states: LayerStates, config: AnchorConfig) -> tuple[dict, torch.Tensor]:
    """Two caches of this configuration against attention that is written out: one that may read
    everything, and one that reads what it says.

    Returns:
        How good the selection was, and what the step must give.

    Raises:
        WrongResult: the first does not give full attention; the second gives something else than
            attention over the tokens that it reports, reads a token twice, or more than the budget.
    """
    limit, new, truth = LIMITS[states.dtype], states.step(0), first_truth(states)
    whole = anchor_cache(states, AnchorConfig.from_kwargs(config, {"budget": 1.0}))
    output = cache_step(whole, states.shape)(new)
    off = require_close(f"{name}, budget=1.0", output, truth, limit)
    del whole
    cache = anchor_cache(states, AnchorConfig.from_kwargs(config, {"audit_every": 1}))
    output, report = cache_step(cache, states.shape)(new), cache.report()
    figures = dict(sparse=report.sparse_steps > 0, off_at_whole_budget=off, mass=report.coverage)
    figures |= dict(output_error=report.output_error, reasons=report.reasons)
    if not figures["sparse"]:
        figures["attended"] = states.length + 1
        off = require_close(f"{name}, dense", output, truth, limit)
        return dict(figures, off=off), truth
    positions = reported_positions(cache)
    figures["attended"] = positions.shape[2]
    unique = all(len(head.unique()) == len(head) for head in positions.flatten(0, 1))
    require_that(unique, f"{name}: a token is read twice")
    require_that(
        positions.shape[2] == report.max_tokens_attended <= config.budget,
        f"{name}: reads {positions.shape[2]} tokens, reports {report.max_tokens_attended}, "
        f"may read {config.budget}",
    )
    expected = first_truth(states, positions.to(states.device))
    figures["off"] = require_close(f"{name}, over what it reads", output, expected, limit)
    return figures, expected


@torch.no_grad()
def measure_attention(
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    budget: int = 2048,
    shape: Shape = LLAMA_8B,
    pace: Pace = PACE,
    bandwidth: float | None = None,
    ours: dict[str, dict] | None = None,
    stock: tuple[str, ...] = (DENSE, DYNAMIC, STATIC),
    more: dict[str, Callable] | None = None,
    batch: int = 1,
    made_there: bool = False,
) -> dict:
    """Seconds per step of every contestant at one length.

    Args:
        length: tokens in the cache before the first step.
        dtype, device, shape: of keys and values.
        budget: tokens that ours may read.
        pace: how many rounds.
        bandwidth: copied bytes per second, for the floor: the time that reading the index and the
            selected tokens takes at least. None leaves it out.
        ours: fields of AnchorConfig by contestant; None for :data:`OURS`. They must read just the
            tokens of their pieces, and all of them: no ``coverage``, ``tolerance`` or ``skipped``.
        stock: which of the others take part.
        more: contestants of your own, full attention: ``make(states, room)`` gives a step.
        batch, made_there: as of LayerStates.

    Raises:
        WrongResult: a contestant's first step is wrong; nothing is timed then.
    """
    states = LayerStates(shape, length, dtype, device, batch=batch, made_there=made_there)
    room = pace.rounds + pace.warm_up + 1
    limit, truth, rows = LIMITS[dtype], first_truth(states), {}
    result = dict(tokens=length, dtype=str(dtype)[6:], budget=budget, batch=batch)
    result["shape"] = shape._asdict()
    steps: dict[str, Callable] = {}
    caches: dict[str, AnchorDynamicCache] = {}
    for name, fields in (OURS if ours is None else ours).items():
        config = AnchorConfig(budget=budget, **fields)
        rows[name], expected = check_ours(name, states, config)
        caches[name] = anchor_cache(states, config)
        steps[name] = cache_step(caches[name], shape)
        same = limit if not rows[name]["sparse"] else max(limit, SAME_SELECTION)
        require_close(f"{name}, timed", steps[name](states.step(0)), expected, same)
    others = dict(more or {})
    others |= {name: functools.partial(stock_step, name) for name in stock if name != DENSE}
    if DENSE in stock:
        steps[DENSE], result["dense"] = faster_dense(states, room, limit)
    for name, make in others.items():
        steps[name] = make(states, room)
    for name in [DENSE, *others] if DENSE in stock else others:
        off = require_close(name, steps[name](states.step(0)), truth, limit)
        rows[name] = dict(sparse=False, off=off, attended=length + 1)
    news = {turn: states.step(turn + 1) for turn in range(room)}
    timed = alternate(
        {name: lambda turn, step=step: step(news[turn]) for name, step in steps.items()},
        pace,
        device,
        label=f"attention, {length:,} {result['dtype']}",
    )
    for name, seconds in timed.items():
        row = rows[name]
        row |= spread(seconds)
        if name in caches:
            report = caches[name].report()
            row |= dict(index_bytes=report.index_bytes, kv_bytes=report.kv_bytes)
            if bandwidth is not None:
                read = (row["attended"] + 1) * shape.token_bytes(dtype) * batch
                row["floor"] = (read + row["sparse"] * row["index_bytes"]) / bandwidth
                row["of_floor"] = row["median"] / row["floor"]
    for row in rows.values():
        row["speed"] = {other: rows[other]["median"] / row["median"] for other in stock}
    return dict(result, bandwidth=bandwidth, contestants=rows)


def table(results: list[dict]) -> str:
    """Markdown: a row per length and contestant."""
    header = ["tokens", "dtype", "contestant", "step (quartiles)", "vs dense", "vs Dynamic"]
    header += ["vs Static", "reads", "mass", "index / K/V", "floor", "step / floor"]
    rows = []
    for result in results:
        for name, row in result["contestants"].items():
            if name == DENSE:
                name = f"{DENSE} ({result['dense']['fastest']})"
            speeds = [row["speed"].get(other) for other in (DENSE, DYNAMIC, STATIC)]
            cells = [f"{result['tokens']:,}", result["dtype"], name, shown(row)]
            cells += ["-" if speed is None else f"{speed:.2f} x" for speed in speeds]
            cells.append(f"{row['attended']:,}")
            cells.append("-" if row.get("mass") is None else f"{row['mass']:.1%}")
            kept = "index_bytes" in row
            cells.append(f"{row['index_bytes'] / row['kv_bytes']:.1%}" if kept else "-")
            floor = "floor" in row
            cells.append(f"{row['floor'] * 1e3:.2f} ms" if floor else "-")
            cells.append(f"{row['of_floor']:.1f}" if floor else "-")
            rows.append(cells)
    return markdown(header, rows)
