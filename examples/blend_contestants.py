"""The contestants of evaluate_blend.py: a blend's settings, and how its chunks were encoded.

A contestant is a dict: the fields of BlendConfig, and

* ``encoding``: "prefix" (chunks encoded after the prompt's prefix, the default), "alone", "sink"
  (after the prompt's first token), "prefix only" (prefix caching: no chunk is stored) or "unmoved"
  (chunks encoded alone, keys left where they were: ratio 0, without the position repair).
* ``stored``: the store's dtype; by default the model's own.

The prompt's prefix itself is exact in every one of them.
"""

from __future__ import annotations

from anchor_cache import Combined

ENCODINGS = ("prefix", "alone", "sink", "prefix only", "unmoved")
RATIOS = (0.05, 0.15, 0.3, 1.0)

FULL = "full prefill"
REUSE = dict(recompute_ratio=0.0, selector="none")
SELECTORS = {
    "query": dict(selector="query"),
    "HKVD on values": dict(selector="hkvd", deviation="values"),
    "HKVD on keys": dict(selector="hkvd", deviation="keys"),
    "HKVD on both": dict(selector="hkvd", deviation="both"),
    "first (EPIC)": dict(selector="first"),
    "attended": dict(selector="attended"),
    "random": dict(selector="random"),
    "oracle": dict(selector="oracle"),
    "first + HKVD": dict(selector=Combined(("first", 0.5), ("hkvd", 0.5))),
    "first + attended": dict(selector=Combined(("first", 0.4), ("attended", 0.6))),
}
_CACHEBLEND = dict(recompute_ratio=0.15, selector="hkvd", deviation="values", check_layer=1)
# As many rows in all, on a model of 30 layers, as with .15 everywhere.
_EARLY_MORE = (0.24,) * 7 + (0.15,) * 3


def _grid(selectors, encodings, ratios) -> dict[str, dict]:
    """Every combination, named ``selector, encoding, ratio``."""
    return {
        f"{name}, {encoding}, {ratio:g}": dict(
            SELECTORS[name], encoding=encoding, recompute_ratio=ratio
        )
        for name in selectors
        for encoding in encodings
        for ratio in ratios
    }


CONTESTANTS: dict[str, dict[str, dict]] = {
    "baselines": {
        "prefix caching": dict(REUSE, encoding="prefix only"),
        "full reuse, keys not moved": dict(REUSE, encoding="unmoved"),
        **{f"full reuse, {e}": dict(REUSE, encoding=e) for e in ("alone", "sink", "prefix")},
        # Its authors' code encodes every chunk after the token that begins prompts.
        "CacheBlend as published, 0.15": dict(_CACHEBLEND, encoding="sink"),
        "CacheBlend, gradual, 0.15": dict(_CACHEBLEND, encoding="sink", schedule=(0.3, 0.2)),
        "CacheBlend, chunks alone, 0.15": dict(_CACHEBLEND, encoding="alone"),
        "HKVD on values, prefix, 0.15": _CACHEBLEND,
        "EPIC, 0.15": dict(encoding="alone", recompute_ratio=0.15, selector="first"),
        "default": dict(),
        # CacheBlend computes two layers whole, the default none: as many rows of 30 layers.
        "default, 0.21": dict(recompute_ratio=0.21),
        "default, chunks after the first token": dict(encoding="sink"),
        "default, chunks alone": dict(encoding="alone"),
        "default, int8 store": dict(stored="int8"),
        "default, gradual": dict(schedule=_EARLY_MORE, recompute_ratio=0.12),
    },
    "selectors": _grid(SELECTORS, ["prefix"], [0.15, 0.3]),
    "encodings": {
        **{f"full reuse, {e}": dict(REUSE, encoding=e) for e in ("alone", "sink", "prefix")},
        **_grid(
            ["query", "HKVD on values", "first (EPIC)"], ["alone", "sink", "prefix"], [0.15, 0.3]
        ),
    },
    "ratios": _grid(["query", "HKVD on values", "first (EPIC)"], ["prefix"], RATIOS),
    # Settings of one's own: any fields of BlendConfig.
    "mine": {},
    "everything": _grid(SELECTORS, ["alone", "sink", "prefix"], RATIOS),
}
QUICK = ("full reuse, alone", "full reuse, prefix", "CacheBlend as published, 0.15", "default")


def chosen(sets: list[str], only: list[str] | None = None) -> dict[str, dict]:
    """The contestants of these sets by name, each once.

    Raises:
        ValueError: ``only`` names one that the sets do not have.
    """
    named = {name: settings for group in sets for name, settings in CONTESTANTS[group].items()}
    unknown = sorted(set(only or ()) - set(named))
    if unknown:
        raise ValueError(
            f"only={unknown}: not in the sets {', '.join(sets)}; choose of {list(named)}"
        )
    return {name: s for name, s in named.items() if not only or name in only}
