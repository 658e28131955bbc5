"""Which reused tokens are recomputed. Override :meth:`TokenSelector.scores`, nothing else."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any

import torch

SIGNALS = ("deviation", "attention", "truth")


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The reused tokens that may be recomputed, ascending by position.

    positions: in the prompt ``[T]``.
    before, after: tokens of its own chunk before and after each ``[T]``.
    wanted: how many will be recomputed.
    deviation, attention, truth: the signals that the selector asked for ``[T]`` fp32, else None.
    """

    positions: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    wanted: int = 0
    deviation: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    truth: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, index: torch.Tensor) -> Candidates:
        """The candidates at ``index``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Candidates(
            **{n: v[index] if isinstance(v, torch.Tensor) else v for n, v in fields.items()}
        )


class TokenSelector(ABC):
    """Ranks the tokens that may be recomputed.

    ``needs`` names the signals that the ranking rests on; only they are measured:

    * "deviation": the KV deviation at the check layer, for which all tokens pass the layers up to
      it (measured again at each layer where a schedule filters);
    * "attention": the attention that the question pays to each token over the reused cache, summed
      over the layers (in each the largest of any head and question token), for which only the
      question's tokens are run;
    * "truth": the KV deviation summed over all layers, for which everything is computed: research.
    """

    needs: tuple[str, ...] = ()

    @abstractmethod
    def scores(self, candidates: Candidates) -> torch.Tensor:
        """One real score per token ``[T]``, on the device of ``candidates.positions``, the largest
        to be recomputed."""

    def count(self, ratio: float, tokens: int) -> int:
        """How many of ``tokens`` reused tokens to recompute."""
        return math.ceil(ratio * tokens)

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Indices of the ``wanted`` best candidates, ascending."""
        return checked_scores(self, candidates).topk(candidates.wanted).indices.sort().values

    def wanted(self, candidates: Candidates, share: float) -> int:
        """The fewest tokens that hold this share of the sum of all scores.

        Raises:
            ValueError: the selector measures nothing that could be added up.
        """
        if not self.needs:
            raise ValueError(
                f"recompute_ratio='auto' needs a selector that measures something, and "
                f"{type(self).__name__} does not: give a ratio, or another selector"
            )
        held = checked_scores(self, candidates).clamp(min=0).sort(descending=True).values.cumsum(0)
        return int((held < share * held[-1]).sum()) + 1 if len(held) and held[-1] > 0 else 0


def checked_scores(selector: TokenSelector, candidates: Candidates) -> torch.Tensor:
    """The scores of ``selector``.

    Raises:
        ValueError: they are not one number for each candidate.
    """
    scores, positions = selector.scores(candidates), candidates.positions
    name = f"{type(selector).__name__}.scores"
    if not isinstance(scores, torch.Tensor):
        raise ValueError(f"{name} must return a tensor, not a {type(scores).__name__}")
    if scores.shape != positions.shape or scores.device != positions.device or scores.is_complex():
        raise ValueError(
            f"{name} must return one real number for each of the {len(candidates)} candidates, on "
            f"{positions.device}, not {scores.dtype} {tuple(scores.shape)} on {scores.device}"
        )
    if scores.isnan().any():
        raise ValueError(f"{name} returned nan, which ranks no token: return -inf for the last")
    return scores.float() if scores.dtype == torch.bool else scores


class HKVD(TokenSelector):
    """High KV deviation: the tokens whose KV differ most from what they are with the whole prompt
    in view (CacheBlend, EuroSys 2025)."""

    needs = ("deviation",)

    def scores(self, candidates):
        return candidates.deviation


class First(TokenSelector):
    """The first tokens of every chunk, which took the place of the missing context while it was
    encoded (EPIC/LegoLink, 2024)."""

    def scores(self, candidates):
        return -candidates.before.float()


class Front(TokenSelector):
    """The first tokens of every chunk, the more of them the more the question attends to the
    chunk: a token's score is its chunk's attention over its place in the chunk."""

    needs = ("attention",)

    def scores(self, candidates):
        chunks = (candidates.positions - candidates.before).unique(return_inverse=True)[1]
        received = torch.zeros_like(candidates.attention)
        received.index_add_(0, chunks, candidates.attention)
        return received[chunks] / (1 + candidates.before)


class Attended(TokenSelector):
    """The tokens that the question attends to (kin of ProphetKV and CacheClip)."""

    needs = ("attention",)

    def scores(self, candidates):
        return candidates.attention


class Oracle(TokenSelector):
    """The tokens whose KV really deviate most, over all layers: a research control that computes
    everything first."""

    needs = ("truth",)

    def scores(self, candidates):
        return candidates.truth


class Random(TokenSelector):
    """Any tokens: the control that every other selector has to beat."""

    def scores(self, candidates):
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(len(candidates), generator=generator)
        return scores.to(candidates.positions.device)


class Nothing(TokenSelector):
    """No token: full reuse, whatever the ratio."""

    def scores(self, candidates):
        return torch.zeros(len(candidates), device=candidates.positions.device)

    def count(self, ratio, tokens):
        return 0


class Combined(TokenSelector):
    """Several selectors, one after the other: each adds its share of the tokens to recompute, the
    best that are not chosen yet; the last fills up.

    Args:
        parts: pairs of a selector (name or object) and its share; the shares sum to 1.

    Example:
        >>> Combined(("first", 0.5), ("hkvd", 0.5))
    """

    def __init__(self, *parts: tuple[str | TokenSelector, float]) -> None:
        shares = [share for _, share in parts]
        if not parts or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"the shares of the combined selectors must sum to 1, not {shares}")
        self.parts = [(selector_of(selector), share) for selector, share in parts]
        self.needs = tuple({n: None for s, _ in self.parts for n in s.needs})

    def scores(self, candidates):
        """Those of the first part that measures something."""
        return next((s for s, _ in self.parts if s.needs), self.parts[0][0]).scores(candidates)

    def select(self, candidates):
        chosen = torch.zeros(len(candidates), dtype=torch.bool, device=candidates.positions.device)
        left = candidates.wanted
        for i, (selector, share) in enumerate(self.parts):
            last = i == len(self.parts) - 1
            count = left if last else min(round(share * candidates.wanted), left)
            free = (~chosen).nonzero()[:, 0]
            chosen[free[checked_scores(selector, candidates)[free].topk(count).indices]] = True
            left -= count
        return chosen.nonzero()[:, 0]


def query() -> Combined:
    """The tokens that the question attends to, with the first tokens of the chunks where they are:
    a token that the question finds needs its neighbourhood fresh too."""
    return Combined((Front(), 0.6), (Attended(), 0.4))


SELECTORS = {
    "hkvd": HKVD,
    "first": First,
    "query": query,
    "front": Front,
    "attended": Attended,
    "random": Random,
    "oracle": Oracle,
    "none": Nothing,
}


def selector_of(selector: str | TokenSelector) -> TokenSelector:
    """The selector that a configuration names, or carries itself.

    Raises:
        ValueError: it needs signals that there are not.
    """
    selector = SELECTORS[selector]() if isinstance(selector, str) else selector
    if isinstance(selector.needs, str) or not set(selector.needs) <= set(SIGNALS):
        raise ValueError(
            f"{type(selector).__name__}.needs={selector.needs!r} is not valid: a tuple of some of "
            f"{', '.join(SIGNALS)}"
        )
    return selector


def describe_selector(selector: Any) -> Any:
    """A selector object as JSON-serialisable values; one of your own by its class name."""
    if isinstance(selector, Combined):
        return [[describe_selector(part), share] for part, share in selector.parts]
    if isinstance(selector, TokenSelector):
        names = {cls: name for name, cls in SELECTORS.items()}
        return names.get(type(selector), type(selector).__name__)
    return selector


def described_selector(value: Any) -> Any:
    """The inverse of :func:`describe_selector` for built-in selectors."""
    if isinstance(value, (list, tuple)) and not isinstance(value, str):
        return Combined(*((described_selector(part), share) for part, share in value))
    return value
