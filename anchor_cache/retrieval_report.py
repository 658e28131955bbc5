"""What an AnchorDynamicCache read: for reading, for JSON and as pictures."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import torch

from .audit import Audit

FIGURES = ("mass", "estimated", "output_error", "recall")


@dataclasses.dataclass
class LayerRecord:
    """What one layer did."""

    prefill_steps: int = 0
    sparse_steps: int = 0
    dense_steps: int = 0
    attended: float = 0.0
    max_attended: float = 0.0
    skipped_share: float | None = None
    reasons: Counter = dataclasses.field(default_factory=Counter)
    audits: list[Audit] = dataclasses.field(default_factory=list)

    def sparse(self, attended: tuple[float, ...]) -> None:
        """Count a step whose heads attended to so many tokens in each row."""
        self.sparse_steps += 1
        self.attended += sum(attended) / len(attended)
        self.max_attended = max(self.max_attended, *attended)

    def dense(self, reason: str) -> None:
        """Count a decoding step that read everything."""
        self.dense_steps += 1
        self.reasons[reason] += 1


@dataclasses.dataclass
class RetrievalReport:
    """What an ``AnchorDynamicCache`` read.

    Attributes:
        tokens_seen: tokens in the cache, padding included.
        tokens_attended: tokens attended per sparse step, layer and head, mean.
        max_tokens_attended: the largest such number of a step and layer; never above the budget,
            but for the tokens that a ``tolerance`` needs.
        coverage: share of the true attention mass that was read, mean over audited steps, layers
            and heads. This and the next three are None when nothing was audited.
        estimated_coverage: the share that the index believed to read: as calibrated as it is near
            ``coverage``.
        recall: share of the chosen pieces that an oracle, which knows the true mass, chooses.
        output_error: distance of attention outputs from the true ones, over the latter's norm.
        skipped_share: with a ``tolerance``, the largest share of the mass that a head can have
            skipped, proven; None without.
        index_bytes: anchors, offsets, sketches, perspectives and the queries kept to learn them.
        kv_bytes: keys and values of the layers that can be sparse.
        sparse_steps, dense_steps, prefill_steps: decoding steps that were sparse in the layer where
            most were, the other ones, and appends of several tokens (always exact).
        reasons: why layers were not sparse, with the number of layer-steps.
        records: the raw record of each layer.
        memory: where keys and values are, with ``offload``.
    """

    tokens_seen: int
    tokens_attended: float
    max_tokens_attended: int
    coverage: float | None
    estimated_coverage: float | None
    recall: float | None
    output_error: float | None
    skipped_share: float | None
    index_bytes: int
    kv_bytes: int
    dense_steps: int
    sparse_steps: int
    prefill_steps: int
    reasons: dict[str, int]
    block_size: int
    records: dict[int, LayerRecord] = dataclasses.field(repr=False)
    memory: str = ""

    @classmethod
    def collect(
        cls, records, tokens_seen, index_bytes, kv_bytes, block_size, untouched
    ) -> RetrievalReport:
        """Sum up the records of all layers. ``untouched``: layer indices by class name."""
        every = list(records.values())
        sparse = sum(record.sparse_steps for record in every)
        most_sparse = max((record.sparse_steps for record in every), default=0)
        decoded = (record.sparse_steps + record.dense_steps for record in every)
        audits = [audit for record in every for audit in record.audits]
        bounds = [r.skipped_share for r in every if r.skipped_share is not None]
        reasons = dict(sum((record.reasons for record in every), Counter()))
        for name, layers in untouched.items():
            reasons[f"{name} layers are never sparse: {layers}"] = len(layers)
        return cls(
            tokens_seen=tokens_seen,
            tokens_attended=sum(record.attended for record in every) / max(sparse, 1),
            max_tokens_attended=math.ceil(max((r.max_attended for r in every), default=0)),
            coverage=_mean(audits, "mass"),
            estimated_coverage=_mean(audits, "estimated"),
            recall=_mean(audits, "recall"),
            output_error=_mean(audits, "output_error"),
            skipped_share=max(bounds, default=None),
            index_bytes=index_bytes,
            kv_bytes=kv_bytes,
            dense_steps=max(decoded, default=0) - most_sparse,
            sparse_steps=most_sparse,
            prefill_steps=max((r.prefill_steps for r in every), default=0),
            reasons=reasons,
            block_size=block_size,
            records=records,
        )

    def per_head(self, name: str) -> dict[int, list[float]]:
        """An audited figure per layer and head, mean over audited steps and rows of the batch.

        Args:
            name: "mass", "estimated", "output_error" (per query head) or "recall" (per head that
                makes a selection of its own).

        Raises:
            ValueError: no such figure, or no step was audited.
        """
        if name not in FIGURES:
            raise ValueError(f"name={name!r} is not valid: one of {', '.join(FIGURES)}")
        audited = {layer: record.audits for layer, record in self.records.items() if record.audits}
        if not audited:
            raise ValueError("no step was audited: set audit_every=1 to compare with the truth")
        return {
            layer: torch.cat([getattr(audit, name) for audit in audits]).nanmean(0).tolist()
            for layer, audits in audited.items()
        }

    def to_dict(self) -> dict:
        """The figures as JSON-serialisable values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if name != "records"}

    def __str__(self) -> str:
        lines = [
            f"{self.sparse_steps} sparse, {self.dense_steps} dense decoding steps, "
            f"{self.prefill_steps} exact prefill steps",
            f"tokens attended per sparse step: {self.tokens_attended:.0f} "
            f"(at most {self.max_tokens_attended}) of {self.tokens_seen}",
            f"index: {self.index_bytes / 2**20:.2f} MiB beside {self.kv_bytes / 2**20:.2f} MiB "
            f"of keys and values",
        ]
        if self.memory:
            lines.append(self.memory)
        if self.coverage is not None:
            lines.append(
                f"audited: {self.coverage:.1%} of the true attention mass read "
                f"({self.estimated_coverage:.1%} believed), {self.recall:.1%} of the blocks as the "
                f"oracle's, output error {self.output_error:.1%}"
            )
        if self.skipped_share is not None:
            lines.append(f"no head skipped more than {self.skipped_share:.2%} of its mass (proven)")
        lines += [f"not sparse: {reason} (x{count})" for reason, count in self.reasons.items()]
        return "\n".join(lines)

    def plot(
        self, path: str | Path, marks: dict[str, int] | None = None, figure: str = "blocks"
    ) -> Path:
        """Draw what was audited. Needs audited steps (``audit_every=1``) and matplotlib.

        Args:
            path: where to write the picture (format by suffix).
            marks: positions to point out, by label, in the picture of the blocks.
            figure: "blocks", which blocks each layer read over the document; "mass", "recall" or
                "output_error" per layer and head; "calibration", the share of the mass that the
                index believed to read against the true one.

        Raises:
            ValueError: no such figure, or no step was audited.
        """
        from . import plots

        if figure == "blocks":
            return plots.plot_blocks(self, Path(path), marks or {})
        if figure == "calibration":
            return plots.plot_calibration(self, Path(path))
        if figure in ("mass", "recall", "output_error"):
            return plots.plot_per_head(self, Path(path), figure)
        names = "blocks, mass, recall, output_error, calibration"
        raise ValueError(f"figure={figure!r} is not valid: one of {names}")


def _mean(audits: list[Audit], name: str) -> float | None:
    values = [getattr(audit, name) for audit in audits]
    return float(torch.stack([v.nanmean() for v in values]).nanmean()) if values else None
