"""Figures of answers and distributions, and how sure their means are."""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter
from collections.abc import Sequence

import torch


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces (as SQuAD does)."""
    answer = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1.0 if the answer is one of the accepted ones after normalisation, else 0.0."""
    return float(normalise(answer) in map(normalise, accepted))


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Harmonic mean of the words' precision and recall, best of the accepted answers."""

    def one(truth: str) -> float:
        words, true = normalise(answer).split(), normalise(truth).split()
        if not words or not true:
            return float(words == true)
        common = sum((Counter(words) & Counter(true)).values())
        return 2 * common / (len(words) + len(true))

    return max(map(one, accepted))


def contains(answer: str, accepted: Sequence[str]) -> float:
    """1.0 if an accepted answer's words occur in the answer one after the other, else 0.0."""
    said = f" {normalise(answer)} "
    return float(any(f" {normalise(truth)} " in said for truth in accepted))


def kl(truth: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(truth || other) of log-probabilities ``[T, vocabulary]``, in nats, ``[T]``."""
    return (truth.exp() * (truth - other)).sum(-1)


def resampled_means(values, draws: int = 2000) -> torch.Tensor:
    """Means of bootstrap samples ``[..., draws]`` of ``values`` ``[..., n]``, drawn alike in all
    rows; the same values give the same means."""
    sample = torch.tensor(values, dtype=torch.float64)
    generator, n = torch.Generator().manual_seed(0), sample.shape[-1]
    return sample[..., torch.randint(n, (draws, n), generator=generator)].mean(-1)


def central(values: torch.Tensor) -> tuple[float, float]:
    """The ends of the middle 95 % of ``values`` ``[draws]``."""
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return low, high


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean; the same values give the same interval."""
    return central(resampled_means(values, draws))


def mean_with_interval(values: Sequence[float], digits: int = 3) -> str:
    low, high = interval(values)
    return f"{statistics.mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
