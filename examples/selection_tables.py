"""The tables of evaluate_selection.py."""

from __future__ import annotations

import math
import statistics

from evaluation_metrics import markdown, mean_with_interval
from evaluation_record import grouped
from selection_runs import AUDITED

CONTROL = "everything (control)"


def _mean(results: list[dict], name: str, form: str = "{:.3f}") -> str:
    """The mean of a figure over the results that have it."""
    values = [r[name] for r in results if r.get(name) is not None]
    return form.format(statistics.fmean(values)) if values else "-"


def _kls(results: list[dict]) -> list[float]:
    return [statistics.fmean(result["kl"]) for result in results]


def _cost(results: list[dict]) -> list[str]:
    seconds = [result["seconds"] for result in results if result.get("seconds")]
    return [
        _mean(results, "read", "{:.1%}"),
        _mean(results, "index", "{:.1%}"),
        f"{statistics.median(seconds):.3f} s" if seconds else "-",
        str(len(results)),
    ]


COST = ["read", "index / K", "s / token", "n"]


def text_table(results: list[dict]) -> str:
    """Ordinary text: KL to dense, and perplexity."""
    header = ["contestant", "KL (95 % interval)", "median step", "by text", "perplexity"]
    header += ["mass", "believed", "recall", "error", *COST]
    rows = []
    for name, own in grouped(results, "contestant").items():
        steps = [kl for result in own for kl in result["kl"]]
        by_text = [statistics.fmean(_kls(rs)) for rs in grouped(own, "kind").values()]
        likelihood = statistics.fmean(result["nll"] for result in own)
        rows.append(
            [
                name,
                mean_with_interval(_kls(own), 4),
                f"{statistics.median(steps):.4f}",
                " ".join(f"{kl:.3f}" for kl in by_text),
                f"{math.exp(likelihood):.2f}",
                *(_mean(own, name) for name in AUDITED),
                *_cost(own),
            ]
        )
    return markdown(header, rows)


def answer_table(results: list[dict]) -> str:
    """Tasks with answers: the share of their items that is right, by length and together."""
    lengths = list(grouped(results, "kind"))
    of_control = {r["prompt"]: r["score"] for r in results if r["contestant"] == CONTROL}
    header = ["contestant", *(f"at {length}" for length in lengths), "right (95 % interval)"]
    header += ["of dense's", "NLL", "KL", *COST]
    rows = []
    for name, own in grouped(results, "contestant").items():
        scores = [result["score"] for result in own]
        by_length = grouped(own, "kind")
        # Where dense attention itself is wrong, a selection has nothing to keep.
        kept = [r["score"] for r in own if of_control.get(r["prompt"]) == 1]
        rows.append(
            [
                name,
                *(_mean(by_length.get(length, []), "score", "{:.2f}") for length in lengths),
                mean_with_interval(scores, 2),
                f"{statistics.fmean(kept):.2f} of {len(kept)}" if kept else "-",
                _mean(own, "nll"),
                f"{statistics.fmean(_kls(own)):.4f}",
                *_cost(own),
            ]
        )
    return markdown(header, rows)
