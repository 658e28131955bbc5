"""The pictures of the reports. Colours come from cividis, made for colour-blind readers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .blend_report import BlendReport
    from .retrieval_report import RetrievalReport

_INK, _ACCENT = "#222222", "#d55e00"


def _axes(width: float, height: float):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install anchor-cache[plots]") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _edges(layers: list[int], columns: int, width: int):
    return [column * width for column in range(columns + 1)], list(range(len(layers) + 1))


def _label_layers(axes, layers: list[int]) -> None:
    every = max(len(layers) // 10, 1)
    axes.set_yticks([i + 0.5 for i in range(0, len(layers), every)], layers[::every])
    axes.set_ylabel("layer (first layer on top)")
    axes.invert_yaxis()


def plot_blocks(report: RetrievalReport, path: Path, marks: dict[str, int]) -> Path:
    """Which blocks each layer read while decoding; see ``RetrievalReport.plot``."""
    layers = [i for i, record in report.records.items() if record.audits]
    if not layers:
        raise ValueError("no step was audited: set audit_every=1 to record which blocks are read")
    size = report.block_size
    columns = -(-report.tokens_seen // size)
    reads = torch.zeros(len(layers), columns)
    for row, layer in enumerate(layers):
        audits = report.records[layer].audits
        for audit in audits:
            blocks = (audit.starts // size).flatten()
            weight = audit.piece / size / (len(audits) * audit.starts[..., 0].numel())
            share = torch.full((blocks.numel(),), weight)
            reads[row].index_add_(0, blocks, share)
    figure, axes = _axes(11, 5)
    x, y = _edges(layers, columns, size)
    image = axes.pcolormesh(x, y, reads.numpy(), cmap="cividis", vmin=0, vmax=1, rasterized=True)
    for label, position in marks.items():
        axes.annotate(
            label,
            (position, 0),
            xytext=(0, 12),
            textcoords="offset points",
            ha="center",
            color=_ACCENT,
            arrowprops=dict(arrowstyle="-|>", color=_ACCENT),
            annotation_clip=False,
        )
    _label_layers(axes, layers)
    axes.set_xlabel(f"position in the document (tokens, blocks of {size})")
    steps = len(report.records[layers[0]].audits)
    axes.set_title(
        f"Blocks chosen by the index over {steps} decoding steps "
        "(sinks and window, always read, are left dark)",
        pad=28,
        color=_INK,
    )
    figure.colorbar(image, label="share of the block that was read, mean over steps and heads")
    return _save(figure, path)


_TITLES = {
    "mass": "Share of the true attention mass that was read",
    "recall": "Share of the chosen blocks that the oracle chooses, too",
    "output_error": "Distance of the attention output from the true one, relative",
}


def plot_per_head(report: RetrievalReport, path: Path, name: str) -> Path:
    """An audited figure per layer and head; see ``RetrievalReport.plot``."""
    figures = report.per_head(name)
    layers, widest = list(figures), max(map(len, figures.values()))
    # Layers may differ in how many heads select.
    rows = [row + [float("nan")] * (widest - len(row)) for row in figures.values()]
    values = torch.tensor(rows)
    figure, axes = _axes(7, 6)
    image = axes.pcolormesh(values.numpy(), cmap="cividis", vmin=0, vmax=None, rasterized=True)
    _label_layers(axes, layers)
    axes.set_xticks([i + 0.5 for i in range(values.shape[1])], range(values.shape[1]))
    axes.set_xlabel("selecting head" if name == "recall" else "query head")
    axes.set_title(_TITLES[name], color=_INK)
    figure.colorbar(image)
    return _save(figure, path)


def plot_calibration(report: RetrievalReport, path: Path) -> Path:
    """Believed against true share of the mass, a point per layer and head."""
    believed, true = (report.per_head(name) for name in ("estimated", "mass"))
    figure, axes = _axes(6, 6)
    axes.plot([0, 1], [0, 1], color=_INK, linewidth=1)
    points = [(t, b) for layer in true for t, b in zip(true[layer], believed[layer], strict=True)]
    axes.plot(*zip(*points, strict=True), linestyle="none", marker=".", color=_ACCENT, alpha=0.6)
    axes.set_xlabel("true share of the attention mass that was read")
    axes.set_ylabel("share that the index believed to read")
    axes.set_title("Calibration, per layer and query head", color=_INK)
    return _save(figure, path)


def plot_deviation(report: BlendReport, path: Path, selected: list[int]) -> Path:
    """KV deviation per token and layer; see ``BlendReport.plot``."""
    deviation = report.deviation
    measured = ~deviation.isnan()
    if not measured.any():
        raise ValueError("no deviation was measured: blend with recompute_ratio > 0")
    layers = [i for i in range(len(deviation)) if measured[i].any()]
    # Layers differ in scale; within a layer the largest values would hide all others.
    shown = deviation[layers].clone()
    for row in shown:
        row /= row[~row.isnan()].quantile(0.99).clamp(min=1e-6)
    figure, axes = _axes(11, 5)
    x, y = _edges(layers, shown.shape[1], 1)
    image = axes.pcolormesh(x, y, shown.numpy(), cmap="cividis", vmin=0, vmax=1, rasterized=True)
    axes.set_facecolor("#dddddd")
    for start in report.segment_starts[1:]:
        axes.axvline(start, color="white", linewidth=1.2)
    if selected:
        axes.plot(
            [p + 0.5 for p in selected],
            [-0.35] * len(selected),
            linestyle="none",
            marker="|",
            markersize=9,
            color=_ACCENT,
            clip_on=False,
            label=f"recomputed ({len(selected)} tokens)",
        )
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1.03), frameon=False)
    _label_layers(axes, layers)
    axes.set_xlim(0, shown.shape[1])
    axes.set_ylim(len(layers), 0)
    axes.set_xlabel("token of the prompt (white lines: chunk borders; grey: exact or fresh)")
    axes.set_title("KV deviation of reused tokens", loc="left", pad=22, color=_INK)
    figure.colorbar(image, label="deviation / 99th percentile of the layer")
    return _save(figure, path)


def plot_trace(report: BlendReport, path: Path) -> Path:
    """When each layer was loaded and computed; see ``BlendReport.plot_trace``."""
    figure, axes = _axes(9, 4.5)
    colours = {"load": "#b8b8b8", "listen": "#e0b040", "measure": "#5b8db8"}
    for what in dict.fromkeys(entry[0] for entry in report.trace):
        rows = [entry for entry in report.trace if entry[0] == what]
        axes.barh(
            [layer for _, layer, _, _ in rows],
            [end - start for _, _, start, end in rows],
            left=[start for _, _, start, _ in rows],
            height=0.9 if what == "load" else 0.5,
            color=colours.get(what, _ACCENT),
            label=what,
        )
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the blend began")
    axes.set_ylabel("layer")
    axes.legend(frameon=False)
    return _save(figure, path)


def _save(figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    return path
