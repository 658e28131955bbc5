"""The tables of evaluate_generation.py: what differs from dense, whether that grows, the cost."""

from __future__ import annotations

import statistics

import torch
from evaluation_metrics import markdown, mean_with_interval
from evaluation_record import grouped

REFERENCE, PRECISE = "dense", "dense, float32"
SLACK = 1.1  # how much farther than rounding leads a contestant may be from the reference
QUARTERS = ("1st", "2nd", "3rd", "4th")


def label(contestant: str, budget: float | None) -> str:
    return contestant if budget is None else f"{contestant}, {budget:.0%}"


def repeated(tokens: list[int], length: int = 4) -> float:
    """Share of the runs of so many tokens that were there before in the same text."""
    runs = list(zip(*(tokens[i:] for i in range(length)), strict=False))
    return 1 - len(set(runs)) / len(runs)


def agreement(groups: dict[tuple, list[dict]]) -> str:
    header = ["contestant", "same tokens at first", "equal tokens", "F1 of words", "repeated"]
    rows = [
        [
            label(*who),
            mean_with_interval([float(one["same"]) for one in own], 1),
            mean_with_interval([one["equal"] for one in own]),
            mean_with_interval([one["f1"] for one in own]),
            mean_with_interval([repeated(one["tokens"]) for one in own]),
        ]
        for who, own in groups.items()
    ]
    header += ["tokens read per step", "s / token (median)", "prompts"]
    for row, own in zip(rows, groups.values(), strict=True):
        dense = sum(one["dense_steps"] for one in own)
        row += [
            f"{statistics.fmean(one['read'] for one in own):,.0f}"
            + (f" ({dense} steps dense)" if dense else ""),
            f"{statistics.median(one['seconds'] for one in own):.4f}",
            str(len(own)),
        ]
    return markdown(header, rows)


def excess(own: list[dict], reference: dict[str, dict], quarter: int) -> list[float]:
    """By prompt, how much less likely the quarter is than the reference's, in nats per token."""
    return [one["nll"][quarter] - reference[one["prompt"]]["nll"][quarter] for one in own]


def drift(groups: dict[tuple, list[dict]], reference: dict[str, dict]) -> str:
    rows = []
    for who, own in groups.items():
        if who[0] == REFERENCE:
            quarters = zip(*(one["nll"] for one in own), strict=True)
            growth = [one["nll"][-1] - one["nll"][0] for one in own]
            cells = [mean_with_interval(quarter) for quarter in quarters]
        else:
            more = [excess(own, reference, i) for i in range(len(QUARTERS))]
            growth = [last - first for first, last in zip(more[0], more[-1], strict=True)]
            cells = [mean_with_interval(quarter) for quarter in more]
        rows.append([label(*who), *cells, mean_with_interval(growth)])
    return markdown(["contestant", *QUARTERS, "4th - 1st"], rows)


def distances(own: list[dict], reference: dict[str, dict]) -> dict[str, list[float]]:
    """Distances from the reference, of every prompt: 0 is the same text."""
    length = len(own[0]["tokens"])
    found = {
        "tokens after the first difference": [length - one["same"] for one in own],
        "unequal tokens": [1 - one["equal"] for one in own],
        "1 - F1": [1 - one["f1"] for one in own],
    }
    for i, quarter in enumerate(QUARTERS):
        found[f"NLL {quarter}"] = [abs(x) for x in excess(own, reference, i)]
    return found


def within(groups: dict[tuple, list[dict]], reference: dict[str, dict]) -> str:
    """Every contestant's mean distances, and whether rounding alone leads as far."""

    def means(own: list[dict]) -> dict[str, float]:
        return {name: statistics.fmean(each) for name, each in distances(own, reference).items()}

    allowed = means(groups[PRECISE, None])
    rows = [[label(PRECISE, None), *(f"{x:.3f}" for x in allowed.values())]]
    for who, own in groups.items():
        if who[0] not in (REFERENCE, PRECISE):
            off = means(own)
            rows.append(
                [
                    label(*who),
                    *(
                        f"{off[name]:.3f}, {'yes' if off[name] <= SLACK * most else 'no'}"
                        for name, most in allowed.items()
                    ),
                ]
            )
    return markdown(["contestant", *allowed], rows)


def tables(results: list[dict], dtype: torch.dtype) -> str:
    """Markdown of every result of evaluate_generation.py."""
    groups = grouped([one for one in results if "error" not in one], "contestant", "budget")
    reference = {one["prompt"]: one for one in groups[REFERENCE, None]}
    parts = [
        f"Against {REFERENCE} ({dtype}), means with 95 % intervals over prompts; repeated: share "
        "of the runs of four tokens that the text had before:",
        agreement(groups),
        f"NLL of the text under the dense float32 model, nats per token, by quarter of the text; "
        f"all but the row of {REFERENCE}: how much higher than its. A text that repeats itself is "
        "likely, too:",
        drift(groups, reference),
    ]
    if (PRECISE, None) in groups:
        parts += [
            f"Mean distance from {REFERENCE} (of NLL: absolute difference), and whether it is "
            "within what float32 instead of the model's precision does to the dense run, plus "
            f"{SLACK - 1:.0%}:",
            within(groups, reference),
        ]
    else:
        parts.append(
            f"The model is in {dtype}: there is no coarser rounding to compare with, so that no "
            "distance can be called harmless. Load it in bfloat16 for that."
        )
    errors = {one["error"] for one in results if "error" in one}
    return "\n\n".join([*parts, *sorted(errors)])
