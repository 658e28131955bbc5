"""Which reused tokens are recomputed. Override :meth:`TokenSelector.scores`, nothing else."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch


class TokenSelector(ABC):
    """Ranks the tokens that may be recomputed."""

    @abstractmethod
    def scores(self, deviation: torch.Tensor) -> torch.Tensor:
        """One score per token, the largest first to be recomputed.

        Args:
            deviation: KV deviation at the check layer, ``[T]``, fp32.
        """

    def select(
        self, deviation: torch.Tensor, candidates: torch.Tensor, ratio: float
    ) -> torch.Tensor:
        """Positions ``[ceil(ratio T)]`` to recompute, ascending, out of ``candidates`` ``[T]``."""
        wanted = math.ceil(ratio * len(candidates))
        best = self.scores(deviation).topk(wanted).indices
        return candidates[best].sort().values


class HKVD(TokenSelector):
    """High KV deviation (CacheBlend, EuroSys 2025): the tokens whose KV differ most from what they
    are with the whole prompt in view."""

    def scores(self, deviation):
        return deviation


SELECTORS: dict[str, type[TokenSelector]] = {"hkvd": HKVD}
