"""Timing for all benchmarks: contestants take turns, and only right results are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from tqdm import tqdm

ENOUGH = 2  # timed rounds that no limit of seconds takes away


class WrongResult(AssertionError):
    """A contestant does not compute what it is timed for."""


class Pace(NamedTuple):
    """How long to measure: ``rounds`` after ``warm_up``, or what fits into ``seconds``."""

    rounds: int = 15
    warm_up: int = 2
    seconds: float = 20.0


PACE = Pace()


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def alternate(
    steps: dict[str, Callable[[int], object]],
    pace: Pace,
    device: torch.device | str = "cpu",
    label: str = "rounds",
    before: Callable[[str], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every contestant's step, a list per contestant.

    The contestants take turns, so that whatever slows the machine down for a while hits them
    alike; each round begins with another of them.

    Args:
        steps: by contestant, what is timed; called with the number of the round.
        pace: how many rounds.
        device: where the steps run; waited for before and after each.
        label: of the progress bar.
        before: called with a contestant's name before each of its steps, not timed.
    """
    names, seconds = list(steps), {name: [] for name in steps}
    started = time.perf_counter()
    for turn in tqdm(range(pace.warm_up + pace.rounds), desc=label, unit="round", leave=False):
        spent = time.perf_counter() - started
        if turn - pace.warm_up >= ENOUGH and spent > pace.seconds:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if before is not None:
                before(name)
            synchronize(device)
            begun = time.perf_counter()
            steps[name](turn)
            synchronize(device)
            if turn >= pace.warm_up:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def spread(seconds: list[float]) -> dict:
    """Median, quartiles, mean (rare costs show there) and number of timed rounds."""
    low, median, high = (seconds * 3)[:3]
    if len(seconds) > 1:
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {
        "median": median,
        "q1": low,
        "q3": high,
        "mean": statistics.fmean(seconds),
        "rounds": len(seconds),
    }


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected, the worst of the last
    dimension's vectors."""
    actual, expected = (x.detach().float().flatten(0, -2) for x in (actual, expected))
    difference = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)
    return difference.max().item()


def require_close(what: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> float:
    """The :func:`distance` of a result from what it should be.

    Raises:
        WrongResult: it is larger than ``limit``, not a number, or the shapes differ.
    """
    if actual.shape != expected.shape:
        raise WrongResult(f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    off = distance(actual, expected)
    if not off <= limit:
        raise WrongResult(f"{what}: off by {off:.2g} of the norm, allowed {limit:g}")
    return off


def require_that(right: bool, what: str) -> None:
    """Raise WrongResult, saying ``what`` is wrong, unless ``right``."""
    if not right:
        raise WrongResult(what)


def shown(timed: dict, unit: str = "ms") -> str:
    """Median and quartiles for a table."""
    factor = {"ms": 1e3, "s": 1.0}[unit]
    low, median, high = (timed[name] * factor for name in ("q1", "median", "q3"))
    digits = 2 if unit == "ms" else 3
    return f"{median:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"
