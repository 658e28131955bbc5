"""Pictures of an evaluation's records: quality against what is read or recomputed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from deviation_pictures import axes_of, save
from evaluation_record import grouped, results_of
from selection_tables import CONTROL

_MARKERS = "osD^v*XPh<>"


def _lines(results: list[dict], across: Callable, up: Callable) -> dict[str, list[tuple]]:
    """Per contestant, the mean of one figure at every value of another."""
    lines = {}
    for name, own in grouped(results, "contestant").items():
        points: dict[float, list[float]] = {}
        for result in own:
            points.setdefault(across(result), []).append(up(result))
        lines[name] = sorted((x, statistics.fmean(ys)) for x, ys in points.items())
    return lines


def _picture(path: Path, title: str, across: str, up: str, lines: dict, log: bool) -> Path:
    figure, axes = axes_of(title, across, up)
    for i, (name, points) in enumerate(lines.items()):
        axes.plot(*zip(*points, strict=True), marker=_MARKERS[i % len(_MARKERS)], label=name)
    if log:
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    return save(figure, path)


def _kl(result: dict) -> float:
    return statistics.fmean(result["kl"])


def _results(folder: Path, record: str, half: str, about: str) -> list[dict]:
    results = results_of(folder / f"{record}-{half}.jsonl", about)
    return [result for result in results if result["contestant"] != CONTROL]


def _ratio(result: dict) -> dict:
    """A result of a contestant "selector, encoding, ratio", under the selector's name."""
    selector, _, ratio = result["contestant"].rsplit(", ", 2)
    return dict(result, contestant=selector, ratio=float(ratio))


def draw(folder: Path, half: str, about: str) -> list[Path]:
    """Write the pictures for which there are records.

    Args:
        folder: of the evaluation.
        half: "tune" or "report".
        about: only results about this model count.

    Returns:
        The files.
    """
    pictures = []

    def add(name, results, title, across, of, up, value, log=False):
        if results:
            lines = _lines(results, lambda result: round(result[of], 2), value)
            pictures.append(_picture(folder / f"{name}.png", title, across, up, lines, log))

    text = _results(folder / "retrieval", "text", half, about)
    add("text", text, "Text: distance to dense", "share read", "read", "KL", _kl, True)
    needles = _results(folder / "retrieval", "single", half, about)
    title = "Needles: share that is found"
    add("needles", needles, title, "share read", "read", "right", lambda r: r["score"])
    for task in ("facts", "continuation-6x256"):
        every = _results(folder / "blend-ratios", task, half, about)
        blends = [_ratio(r) for r in every if r["contestant"].count(", ") == 2]
        title, across = f"Blend, {task}: distance to full prefill", "share recomputed"
        add(f"blend_{task}", blends, title, across, "ratio", "KL", _kl)
    return pictures
