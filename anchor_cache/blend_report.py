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
        deviation: KV deviation per layer and token ``[layers, tokens]`` in the selector's
            measure; nan where it was not measured.
        selected: positions that were recomputed to the last layer.
        segment_starts: first token of each segment.
        load_seconds, compute_seconds: reading and placing the store's chunks; recomputing.
        reasons: what was not reused or not as good as it could be, and why.
    """

    reused_tokens: int
    exact_prefix_tokens: int
    fresh_tokens: int
    recomputed_tokens: list[int]
    deviation: torch.Tensor = dataclasses.field(repr=False)
    selected: list[int] = dataclasses.field(repr=False)
    segment_starts: list[int] = dataclasses.field(repr=False)
    load_seconds: float
    compute_seconds: float
    reasons: dict[str, int]

    def to_dict(self) -> dict:
        """The figures as JSON-serialisable values, the deviation left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if name != "deviation"}

    def __str__(self) -> str:
        lines = [
            f"{self.reused_tokens} tokens reused ({self.exact_prefix_tokens} exact), "
            f"{self.fresh_tokens} fresh, {len(self.selected)} recomputed to the last layer",
            f"loading {self.load_seconds:.3f} s, computing {self.compute_seconds:.3f} s",
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
