"""What a BlendedCache reused and recomputed: for reading, for JSON and as a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch


@dataclasses.dataclass
class BlendReport:
    """What a ``BlendedCache`` reused and recomputed.

    Attributes:
        reused_tokens: tokens whose KV came from the store, exact ones included.
        exact_prefix_tokens: of these, the ones whose stored context is the real one.
        fresh_tokens: tokens that were never stored: the question, and chunks that were missing.
        recomputed_tokens: per layer, reused tokens whose KV were computed again.
        recompute_ratio: share of the reused tokens that are not exact which were recomputed to the
            last layer; what "auto" decided.
        deviation: KV deviation per layer and token ``[layers, tokens]`` in the selector's
            measure; nan where it was not measured.
        selected: positions that were recomputed to the last layer.
        segment_starts: first token of each segment.
        seconds: what the blend took.
        trace: what was done when: ``(what, layer, start, end)`` in seconds since the blend began.
            "load" (in threads of its own) reads and places a layer's chunks; "listen", "measure"
            and "recompute" run tokens through it. On an accelerator these are the times at which
            the work was handed over.
        reasons: what was not reused or not as good as it could be, and why.
    """

    reused_tokens: int
    exact_prefix_tokens: int
    fresh_tokens: int
    recomputed_tokens: list[int]
    recompute_ratio: float
    deviation: torch.Tensor = dataclasses.field(repr=False)
    selected: list[int] = dataclasses.field(repr=False)
    segment_starts: list[int] = dataclasses.field(repr=False)
    seconds: float
    trace: list[tuple[str, int, float, float]] = dataclasses.field(repr=False)
    reasons: dict[str, int]

    @property
    def load_seconds(self) -> float:
        """Time in which at least one chunk was being read and placed."""
        return _covered([(start, end) for what, _, start, end in self.trace if what == "load"])

    @property
    def compute_seconds(self) -> float:
        """Time in which tokens were run through the layers."""
        return _covered([(start, end) for what, _, start, end in self.trace if what != "load"])

    def to_dict(self) -> dict:
        """The figures as JSON-serialisable values, the deviation left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {n: getattr(self, n) for n in ("load_seconds", "compute_seconds")}
        return {name: value for name, value in fields.items() if name != "deviation"}

    def __str__(self) -> str:
        lines = [
            f"{self.reused_tokens} tokens reused ({self.exact_prefix_tokens} exact), "
            f"{self.fresh_tokens} fresh, {len(self.selected)} recomputed to the last layer",
            f"{self.seconds:.3f} s, in which loading took {self.load_seconds:.3f} s and computing "
            f"{self.compute_seconds:.3f} s",
        ]
        lines += [f"note: {reason} (x{count})" for reason, count in self.reasons.items()]
        return "\n".join(lines)

    def plot(self, path: str | Path, selected: list[int] | None = None) -> Path:
        """Draw the KV deviation per token and layer, recomputed tokens marked.

        A blend with ``recompute_ratio=1`` measures every token at every layer.

        Args:
            path: where to write the picture (format by suffix).
            selected: positions to mark; by default the ones recomputed in this blend.
        """
        from .plots import plot_deviation

        return plot_deviation(self, Path(path), self.selected if selected is None else selected)

    def plot_trace(self, path: str | Path) -> Path:
        """Draw when each layer was loaded and computed.

        Args:
            path: where to write the picture (format by suffix).
        """
        from .plots import plot_trace

        return plot_trace(self, Path(path))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans, which may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
