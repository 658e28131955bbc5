"""Which reused tokens are recomputed. Override :meth:`TokenSelector.scores`, nothing else."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod

import torch


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The reused tokens that may be recomputed, ascending by position.

    offsets: how many tokens of its own chunk stand before each ``[T]``.
    wanted: how many will be recomputed.
    signal: what the selector asked for with :attr:`TokenSelector.signal`, ``[T]`` fp32, or None.
    """

    offsets: torch.Tensor
    wanted: int
    signal: torch.Tensor | None = None


class TokenSelector(ABC):
    """Ranks the tokens that may be recomputed.

    ``signal`` says what the ranking rests on: "deviation" is the KV deviation at the check layer,
    for which all tokens pass the layers up to it; "attention" is the attention that the question
    pays to each token over the reused cache, summed over the layers (in each the largest of any
    head and question token), for which only the question's tokens are run; None is neither.
    """

    signal: str | None = None

    @abstractmethod
    def scores(self, candidates: Candidates) -> torch.Tensor:
        """One score per token ``[T]``, the largest to be recomputed."""

    def count(self, ratio: float, tokens: int) -> int:
        """How many of ``tokens`` reused tokens to recompute."""
        return math.ceil(ratio * tokens)

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Indices of the ``wanted`` best candidates, ascending."""
        return self.scores(candidates).topk(candidates.wanted).indices.sort().values


class HKVD(TokenSelector):
    """High KV deviation: the tokens whose KV differ most from what they are with the whole prompt
    in view (CacheBlend, EuroSys 2025)."""

    signal = "deviation"

    def scores(self, candidates):
        return candidates.signal


class First(TokenSelector):
    """The first tokens of every chunk, which took the place of the missing context while it was
    encoded (EPIC/LegoLink, 2024)."""

    def scores(self, candidates):
        return -candidates.offsets.float()


class Query(TokenSelector):
    """The tokens that the question attends to, with the first tokens of every chunk: a token that
    the question finds needs its neighbourhood fresh too (kin of ProphetKV and CacheClip)."""

    signal = "attention"
    first_share = 0.4

    def scores(self, candidates):
        first = round(self.first_share * candidates.wanted)
        scores = candidates.signal / candidates.signal.max().clamp(min=1e-12)
        scores[candidates.offsets.argsort(stable=True)[:first]] += 1.5
        return scores


class Random(TokenSelector):
    """Any tokens: the control that every other selector has to beat."""

    def scores(self, candidates):
        generator = torch.Generator().manual_seed(0)
        return torch.rand(len(candidates.offsets), generator=generator).to(
            candidates.offsets.device
        )


class Nothing(TokenSelector):
    """No token: full reuse, whatever the ratio."""

    def count(self, ratio, tokens):
        return 0

    def scores(self, candidates):
        return torch.zeros(len(candidates.offsets), device=candidates.offsets.device)


SELECTORS: dict[str, type[TokenSelector]] = {
    "hkvd": HKVD,
    "first": First,
    "query": Query,
    "random": Random,
    "none": Nothing,
}
