"""The pictures of kv_deviation.py; needs matplotlib (`pip install anchor-cache[plots]`)."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

_INK, _ACCENT = "#222222", "#d55e00"
# One marker each, so that the lines are told apart without colours, too.
_MARKERS = "osD^v*"


def draw(layers: list[dict], kls: dict[str, dict[str, float]], folder: Path) -> list[Path]:
    """Write all pictures.

    Args:
        layers: figures per layer, see ``of_layers`` in kv_deviation.py.
        kls: KL per selector and ratio; empty for no such picture.
        folder: where to; it must exist.

    Returns:
        The files.
    """
    pictures = [concentration(layers, folder), correlation(layers, folder)]
    return pictures + ([quality(kls, folder)] if kls else [])


def axes_of(title: str, across: str, up: str):
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, color=_INK, loc="left")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, path: Path) -> Path:
    figure.savefig(path, dpi=140)
    return path


def concentration(layers: list[dict], folder: Path) -> Path:
    """Share of the squared deviation against share of the tokens, a line per layer."""
    figure, axes = axes_of(
        "How many tokens carry the KV deviation?",
        "share of the tokens, most deviating first (%)",
        "share of the squared deviation (%)",
    )
    scale = Normalize(layers[0]["layer"], max(layers[-1]["layer"], layers[0]["layer"] + 1))
    for one in layers:
        colour = colormaps["cividis"](scale(one["layer"]))
        places = [100 * i / (len(one["curve"]) - 1) for i in range(len(one["curve"]))]
        axes.plot(places, [100 * y for y in one["curve"]], color=colour, linewidth=1)
    axes.plot(15, 85, marker="+", markersize=14, markeredgewidth=2, color=_ACCENT)
    axes.annotate("85 / 15", (15, 85), xytext=(-18, 10), textcoords="offset points", color=_ACCENT)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    figure.colorbar(ScalarMappable(scale, "cividis"), ax=axes, label="layer")
    return save(figure, folder / "concentration.png")


def correlation(layers: list[dict], folder: Path) -> Path:
    """Rank correlation with the layer before and with layer 1."""
    figure, axes = axes_of(
        "Do the same tokens deviate in every layer?", "layer", "Spearman's rank correlation"
    )
    later = layers[1:]
    where = [one["layer"] for one in later]
    axes.plot(where, [one["before"] for one in later], marker="o", color=_INK, label="layer before")
    axes.plot(where, [one["first"] for one in later], marker="s", color=_ACCENT, label="layer 1")
    axes.axhline(0, color=_INK, linewidth=0.5)
    axes.set_ylim(None, 1.02)
    axes.legend(frameon=False, title="with the")
    return save(figure, folder / "correlation.png")


def quality(kls: dict[str, dict[str, float]], folder: Path) -> Path:
    """KL against the ratio, a line per selector."""
    figure, axes = axes_of(
        "What recomputing is worth", "share of the reused tokens recomputed", "KL(full || blended)"
    )
    for i, (name, own) in enumerate(kls.items()):
        colour = colormaps["cividis"](i / max(len(kls) - 1, 1))
        places = [float(ratio) for ratio in own]
        marker = _MARKERS[i % len(_MARKERS)]
        axes.plot(places, list(own.values()), marker=marker, color=colour, label=name)
    # Ratio 1 is full prefill: its rounding errors would squeeze all else on a log scale.
    least = [v for own in kls.values() for ratio, v in own.items() if float(ratio) < 1 and v > 0]
    if least:
        axes.set_yscale("log")
        axes.set_ylim(min(least) / 2, None)
    axes.legend(frameon=False)
    return save(figure, folder / "quality.png")
