"""What happened: reports of both caches, for reading, for JSON and as pictures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import torch


@dataclasses.dataclass
class Audit:
    """One sparse step of one layer beside its true attention.

    mass: share of the true attention mass that was read ``[B, H]``.
    blocks: chosen block slots ``[B, H_kv, k]``. block_starts: their first tokens.
    """

    mass: torch.Tensor
    blocks: torch.Tensor
    block_starts: torch.Tensor


@dataclasses.dataclass
class LayerRecord:
    """What one layer did."""

    prefill_steps: int = 0
    sparse_steps: int = 0
    dense_steps: int = 0
    attended: float = 0.0
    max_attended: int = 0
    reasons: Counter = dataclasses.field(default_factory=Counter)
    audits: list[Audit] = dataclasses.field(default_factory=list)

    def sparse(self, attended: tuple[int, ...]) -> None:
        """Count a step that read ``attended`` tokens in each row."""
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
        tokens_attended: tokens read per sparse step and layer, mean.
        max_tokens_attended: the largest such number; never above the budget.
        coverage: share of the true attention mass that was read, mean over audited steps, layers
            and heads; None when nothing was audited.
        index_bytes: anchors, offsets, sketches, perspectives and the queries kept to learn them.
        kv_bytes: keys and values of the layers that can be sparse.
        sparse_steps, dense_steps, prefill_steps: decoding steps that were sparse in at least one
            layer, or in none, and appends of several tokens (always exact).
        reasons: why layers were not sparse, with the number of layer-steps.
        records: the raw record of each layer.
        memory: where keys and values are, with ``offload``.
    """

    tokens_seen: int
    tokens_attended: float
    max_tokens_attended: int
    coverage: float | None
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
        sparse = sum(record.sparse_steps for record in records.values())
        attended = sum(record.attended for record in records.values())
        most_sparse = max((record.sparse_steps for record in records.values()), default=0)
        decoded = (record.sparse_steps + record.dense_steps for record in records.values())
        masses = [audit.mass.mean() for r in records.values() for audit in r.audits]
        reasons = dict(sum((record.reasons for record in records.values()), Counter()))
        for name, layers in untouched.items():
            reasons[f"{name} layers are never sparse: {layers}"] = len(layers)
        return cls(
            tokens_seen=tokens_seen,
            tokens_attended=attended / sparse if sparse else 0.0,
            max_tokens_attended=max((r.max_attended for r in records.values()), default=0),
            coverage=float(torch.stack(masses).mean()) if masses else None,
            index_bytes=index_bytes,
            kv_bytes=kv_bytes,
            dense_steps=max(decoded, default=0) - most_sparse,
            sparse_steps=most_sparse,
            prefill_steps=max((r.prefill_steps for r in records.values()), default=0),
            reasons=reasons,
            block_size=block_size,
            records=records,
        )

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
            lines.append(f"true attention mass read (audited): {self.coverage:.1%}")
        lines += [f"not sparse: {reason} (x{count})" for reason, count in self.reasons.items()]
        return "\n".join(lines)

    def plot(self, path: str | Path, marks: dict[str, int] | None = None) -> Path:
        """Draw which blocks each layer read while decoding, over the document.

        Needs audited steps (``audit_every=1``) and matplotlib.

        Args:
            path: where to write the picture (format by suffix).
            marks: positions to point out, by label.

        Raises:
            ValueError: no step was audited.
        """
        from .plots import plot_blocks

        return plot_blocks(self, Path(path), marks or {})


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
