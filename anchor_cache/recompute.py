"""Choosing the tokens to recompute and running them through the layers, ever fewer of them."""

from __future__ import annotations

import dataclasses
import time

import torch

from .blend_config import BlendConfig
from .fusion import Fusion
from .patches.partial_forward import PartialForward
from .prompt_layout import PromptLayout
from .token_selectors import Candidates, TokenSelector, selector_of

NO_QUESTION = "question of a single token, which generate computes: its attention was not known"
_PROBED_ROWS = 64


@dataclasses.dataclass
class Recomputed:
    """What was recomputed.

    Attributes:
        selected: positions of reused tokens that were recomputed to the last layer, ascending.
        per_layer: how many reused tokens were recomputed in each layer.
        ratio: share of the reused, inexact tokens that are among ``selected``.
    """

    selected: torch.Tensor
    per_layer: list[int]
    ratio: float

    @classmethod
    def nothing(cls, layers: int) -> Recomputed:
        """A prompt without reused tokens."""
        return cls(torch.zeros(0, dtype=torch.long), [0] * layers, 0.0)


def recompute(
    forward: PartialForward, prompt: PromptLayout, fusion: Fusion, config: BlendConfig
) -> Recomputed:
    """Recompute what ``config`` asks for in the layers of ``fusion``, and all that is not reused.

    A layer where tokens are filtered by their deviation first computes keys and values of all
    tokens that are left, then goes on with the ones that deviate most (CacheBlend's gradual
    filtering). Other selectors know beforehand which tokens each layer needs.
    """
    filters = _Filters(forward, prompt, fusion, config)
    measured = filters.measure
    candidates = filters.candidates if measured else filters.next()
    positions = torch.arange(forward.tokens, device=prompt.ids.device)
    rows = positions[~prompt.reused | torch.isin(positions, candidates.positions)]
    hidden, per_layer = forward.embedded.index_select(1, rows), []
    for layer in range(forward.layers):
        filtered = filters.left and layer >= (config.check_layer if measured else 1)
        if filtered:
            before = candidates
            if measured and len(rows):
                fusion.run(forward, layer, hidden, rows, "measure", stop=True)
            candidates = filters.next(layer)
            kept = ~prompt.reused[rows] | torch.isin(rows, candidates.positions)
            rows, hidden = rows[kept], hidden[:, kept]
        per_layer.append(len(before if filtered and measured else candidates))
        if len(rows):
            hidden = fusion.run(forward, layer, hidden, rows, stop=layer == forward.layers - 1)
    total = max(len(filters.all), 1)
    return Recomputed(candidates.positions, per_layer, len(candidates) / total)


class _Filters:
    """One filter after the other keeps fewer candidates."""

    def __init__(self, forward, prompt, fusion, config) -> None:
        self._forward, self._fusion, self._config = forward, fusion, config
        self._selector = selector = selector_of(config.selector)
        chosen = prompt.inexact.nonzero()[:, 0]
        self.all = self.candidates = Candidates(chosen, prompt.before[chosen], prompt.after[chosen])
        self._shares = [*config.schedule, config.recompute_ratio]
        counts = {None if s == "auto" else self._count(s) for s in self._shares}
        is_choice = len(chosen) > 0 and not counts <= {0, len(chosen)}
        self.measure = is_choice and "deviation" in selector.needs
        if is_choice:
            self.candidates = _listened(forward, prompt, fusion, selector, self.all)

    @property
    def left(self) -> int:
        """How many filters have not been applied."""
        return len(self._shares)

    def next(self, layer: int | None = None) -> Candidates:
        """Apply the next filter, by the deviation of ``layer`` if the selector measures it."""
        share, candidates = self._shares.pop(0), self.candidates
        if not len(candidates):
            return candidates
        if self.measure:
            deviation = self._fusion.deviation[layer, candidates.positions]
            candidates = dataclasses.replace(candidates, deviation=deviation)
        wanted = self._automatic(candidates) if share == "auto" else self._count(share)
        if wanted == 0:
            candidates = candidates.take(candidates.positions[:0])
        elif wanted < len(candidates):
            offered = dataclasses.replace(candidates, wanted=wanted)
            candidates = candidates.take(self._selector.select(offered))
        self.candidates = candidates
        return candidates

    def _count(self, share: float) -> int:
        return self._selector.count(share, len(self.all))

    def _automatic(self, candidates: Candidates) -> int:
        if self._config.auto == "quality":
            wanted = self._selector.wanted(candidates, self._config.quality_target)
        else:
            per_row = _seconds_per_row(self._forward, self._fusion, candidates)
            wanted = int(self._fusion.loader.seconds_per_layer() / per_row)
        low, high = map(self._count, self._config.auto_limits)
        return min(max(wanted, low), high)


def _listened(
    forward: PartialForward,
    prompt: PromptLayout,
    fusion: Fusion,
    selector: TokenSelector,
    candidates: Candidates,
) -> Candidates:
    """The candidates with the signals that are known before anything is recomputed."""
    signals = {}
    if "attention" in selector.needs:
        _listen(forward, prompt, fusion)
        signals["attention"] = fusion.attention[candidates.positions]
    if "truth" in selector.needs:
        other = fusion.branch()
        other.run_through(forward, (~prompt.exact).nonzero()[:, 0], "truth")
        signals["truth"] = other.deviation[:, candidates.positions].nan_to_num().sum(0)
    return dataclasses.replace(candidates, **signals)


def _listen(forward: PartialForward, prompt: PromptLayout, fusion: Fusion) -> None:
    """Run the question alone over the reused cache and note what it attends to."""
    question = torch.arange(prompt.segment_starts[-1], forward.tokens, device=prompt.ids.device)
    if not len(question):
        prompt.reasons[NO_QUESTION] += 1
        return
    visible = prompt.reused.clone()
    visible[question] = True
    fusion.run_through(forward, question, "listen", visible=visible)
    deaf = sorted(set(range(forward.layers)) - fusion.heard)
    if deaf:
        prompt.reasons[f"question's attention not seen in layers {deaf}"] += 1


def _seconds_per_row(forward: PartialForward, fusion: Fusion, candidates: Candidates) -> float:
    """What one more row costs a layer. The rows are run through layer 0, whose keys and values
    stay what they are."""
    rows = candidates.positions[:_PROBED_ROWS]
    hidden = forward.embedded.index_select(1, rows)
    started = time.perf_counter()
    fusion.run(forward, 0, hidden, rows, "probe")
    return max((time.perf_counter() - started) / len(rows), 1e-9)
