"""The settings of a BlendedCache: frozen, validated, JSON-serialisable."""

from __future__ import annotations

import dataclasses

from .token_selectors import SELECTORS
from .validation import Config, is_int, require

DEVIATIONS = ("values", "keys", "both")


@dataclasses.dataclass(frozen=True)
class BlendConfig(Config):
    """How a :class:`~anchor_cache.BlendedCache` chooses what it recomputes.

    Args:
        recompute_ratio: share of the reused tokens to recompute, in [0, 1]. 0 is full reuse, 1
            full prefill; the question and chunks that were not stored are always fresh. Tokens
            whose stored context is the real one (the prompt's prefix, and a chunk encoded after
            exactly what precedes it) are exact and never need it.
        selector: which tokens: "query", those the question attends to, with the first ones of each
            chunk; "hkvd", those whose KV deviates most (CacheBlend); "first", the first ones of
            each chunk (EPIC); "random", a control; "none", full reuse.
        deviation: "hkvd" measures it on "values", "keys" or "both".
        check_layer: the layer where "hkvd" measures; all tokens pass the layers before it. At
            least 1: keys and values of layer 0 do not depend on the context, so nothing deviates
            there.

    Raises:
        ValueError: a value is out of range; the message names the field and what is allowed.
    """

    recompute_ratio: float = 0.15
    selector: str = "query"
    deviation: str = "values"
    check_layer: int = 1

    def __post_init__(self):
        ratio = self.recompute_ratio
        is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        require(is_number and 0 <= ratio <= 1, "recompute_ratio", ratio, "a share lies in [0, 1]")
        require(
            self.selector in SELECTORS, "selector", self.selector, f"one of {', '.join(SELECTORS)}"
        )
        require(
            self.deviation in DEVIATIONS,
            "deviation",
            self.deviation,
            f"one of {', '.join(DEVIATIONS)}",
        )
        require(
            is_int(self.check_layer, 1),
            "check_layer",
            self.check_layer,
            "an int of at least 1: keys and values of layer 0 do not depend on the context, so "
            "nothing deviates there",
        )
