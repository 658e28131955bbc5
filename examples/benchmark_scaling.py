"""How costs grow with the context: a decoding step of a layer, and blending a prompt."""

from __future__ import annotations

import math

import torch
from benchmark_attention import DENSE, measure_attention
from benchmark_blend import measure_blend
from benchmark_states import LLAMA_8B, Shape
from benchmark_timing import PACE, Pace, shown
from blend_contestants import FULL
from blend_tasks import BlendPrompt
from evaluation_metrics import markdown

FAR = 16 * 1024  # contexts from here on get an exponent of their own
OURS = "AnchorDynamicCache"


def exponent(points: list[tuple[float, float]]) -> float | None:
    """The b of cost = a x size ** b, by least squares of the logarithms; None for less than two
    sizes.

    Args:
        points: (size, cost), both positive.
    """
    x, y = ([math.log(point[i]) for point in points] for i in (0, 1))
    if len(set(x)) < 2:
        return None
    middle = (sum(x) / len(x), sum(y) / len(y))
    spread = sum((a - middle[0]) ** 2 for a in x)
    return sum((a - middle[0]) * (b - middle[1]) for a, b in zip(x, y, strict=True)) / spread


def _scaled(what: str, results: list[dict], names: list[str], dtype: str) -> dict:
    """Costs of these contestants by size, and the exponents."""
    costs = {}
    for name in names:
        points = [(r["tokens"], r["contestants"][name]["median"]) for r in results]
        costs[name] = {
            "exponent": exponent(points),
            "exponent_far": exponent([point for point in points if point[0] >= FAR]),
        }
    rows = [
        {"tokens": r["tokens"], "contestants": {n: r["contestants"][n] for n in names}}
        for r in results
    ]
    return {"what": what, "dtype": dtype, "costs": costs, "sizes": rows}


def scale_decoding(
    lengths: list[int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    budget: int = 2048,
    shape: Shape = LLAMA_8B,
    pace: Pace = PACE,
    **fields,
) -> dict:
    """Seconds of one layer's decoding step at each length: ours with the default settings (but
    ``fields``), and the strongest dense attention.

    Raises:
        WrongResult: a contestant's first step is wrong.
    """
    options = dict(dtype=dtype, device=device, budget=budget, shape=shape, pace=pace)
    results = [
        measure_attention(length, **options, ours={OURS: fields}, stock=(DENSE,))
        for length in lengths
    ]
    return _scaled("decoding step of one layer", results, [OURS, DENSE], str(dtype)[6:])


def scale_blending(model, prompts: list[BlendPrompt], pace: Pace = PACE, **fields) -> dict:
    """Seconds to the first token of a blend with the default settings (but ``fields``), chunks in
    memory, and of full prefill.

    Raises:
        WrongResult: a blend is not what it should be.
    """
    options = dict(pace=pace, ratios=(0.15,), stores=("memory",), prefix_caching=False)
    results = [measure_blend(model, prompt, **options, **fields) for prompt in prompts]
    names = ["blend 0.15, memory", FULL]
    return _scaled("time to first token", results, names, results[0]["dtype"])


def table(results: list[dict]) -> str:
    """Markdown: costs by size, and below them the exponents of cost ~ size ** exponent."""
    parts = []
    for result in results:
        names = list(result["costs"])
        rows = []
        for one in result["sizes"]:
            unit = "ms" if one["contestants"][names[0]]["median"] < 0.5 else "s"
            cells = [shown(one["contestants"][name], unit) for name in names]
            rows.append([f"{one['tokens']:,}", *cells])
        for label, key in (("exponent", "exponent"), (f"from {FAR:,} on", "exponent_far")):
            fitted = [result["costs"][name][key] for name in names]
            if None not in fitted:
                rows.append([label, *(f"{b:.2f}" for b in fitted)])
        title = f"{result['what']}, {result['dtype']}"
        parts.append(f"{title}:\n\n{markdown(['tokens', *names], rows)}")
    return "\n\n".join(parts)
