"""The settings of a BlendedCache: frozen, validated, JSON-serialisable."""

from __future__ import annotations

import dataclasses

from .token_selectors import (
    SELECTORS,
    TokenSelector,
    describe_selector,
    described_selector,
    selector_of,
)
from .validation import Config, is_int, is_share, require

DEVIATIONS = ("values", "keys", "both")
AUTO = ("quality", "loading")


@dataclasses.dataclass(frozen=True)
class BlendConfig(Config):
    """How a :class:`~anchor_cache.BlendedCache` chooses what it recomputes.

    Args:
        recompute_ratio: share of the reused tokens to recompute, in [0, 1]. 0 is full reuse, 1
            full prefill; the question and chunks that were not stored are always fresh. Tokens
            whose stored context is the real one (the prompt's prefix, and a chunk encoded after
            exactly what precedes it) are exact and never need it. "auto" decides for each prompt,
            see ``auto``.
        selector: which tokens: "query", those the question attends to, with the first ones of each
            chunk; "hkvd", those whose KV deviates most (CacheBlend); "first", the first ones of
            each chunk (EPIC); "attended", what the question attends to alone; "random" and
            "oracle", controls; "none", full reuse; or a
            :class:`~anchor_cache.TokenSelector` object, :class:`~anchor_cache.Combined` or your
            own.
        schedule: gradual filtering (CacheBlend): the shares recomputed in the first layers where
            the selector filters, never growing and not below ``recompute_ratio``, which holds for
            the layers after them. A selector that measures the deviation filters from
            ``check_layer`` on and measures it again at each of these layers; others filter from
            the first layer on.
        deviation: selectors measure it on "values", "keys" or "both".
        check_layer: the layer where the deviation is measured first; all tokens pass the layers
            before it. At least 1: keys and values of layer 0 do not depend on the context, so
            nothing deviates there.
        auto: what ``recompute_ratio="auto"`` goes by. "quality": the fewest tokens that hold
            ``quality_target`` of what the selector measures. "loading": as many as can be
            recomputed while the chunks are read (CacheBlend's loading controller), for selectors
            that do not look at the question's attention, which is known only when all is read.
        quality_target: a share in (0, 1].
        auto_limits: the smallest and the largest ratio that "auto" may take.

    Raises:
        ValueError: a value is out of range; the message names the field and what is allowed.

    Example:
        >>> BlendConfig(selector="hkvd", schedule=(0.3, 0.2), recompute_ratio=0.15)
    """

    recompute_ratio: float | str = 0.15
    selector: str | TokenSelector = "query"
    schedule: tuple[float, ...] = ()
    deviation: str = "values"
    check_layer: int = 1
    auto: str = "quality"
    quality_target: float = 0.8
    auto_limits: tuple[float, float] = (0.05, 0.5)

    def __post_init__(self):
        ratio = self.recompute_ratio
        require(
            ratio == "auto" or _is_ratio(ratio),
            "recompute_ratio",
            ratio,
            "a share in [0, 1], or 'auto'",
        )
        require(
            isinstance(self.selector, TokenSelector) or self.selector in tuple(SELECTORS),
            "selector",
            self.selector,
            f"one of {', '.join(SELECTORS)}, or a TokenSelector object",
        )
        self._check_schedule()
        for field, known in (("deviation", DEVIATIONS), ("auto", AUTO)):
            value = getattr(self, field)
            require(value in known, field, value, f"one of {', '.join(known)}")
        require(
            is_int(self.check_layer, 1),
            "check_layer",
            self.check_layer,
            "an int of at least 1: keys and values of layer 0 do not depend on the context, so "
            "nothing deviates there",
        )
        require(
            is_share(self.quality_target),
            "quality_target",
            self.quality_target,
            "a share in (0, 1]",
        )
        by_loading = self.recompute_ratio == "auto" and self.auto == "loading"
        needs = selector_of(self.selector).needs
        require(
            not (by_loading and "attention" in needs),
            "selector",
            self.selector,
            "auto='loading' takes one that does not look at the question's attention, which is "
            "known only when all is read",
        )
        limits = self.auto_limits
        require(
            _are_ratios(limits) and len(limits) == 2 and limits[0] <= limits[1],
            "auto_limits",
            limits,
            "two shares in [0, 1], the smaller one first",
        )
        object.__setattr__(self, "auto_limits", tuple(limits))

    def _check_schedule(self) -> None:
        schedule = self.schedule
        require(_are_ratios(schedule), "schedule", schedule, "shares in [0, 1], one for each layer")
        require(
            not (schedule and self.recompute_ratio == "auto"),
            "schedule",
            schedule,
            "recompute_ratio='auto' takes none: give a ratio",
        )
        steps = [*schedule, self.recompute_ratio]
        require(
            len(steps) == 1 or steps == sorted(steps, reverse=True),
            "schedule",
            schedule,
            "shares that never grow and do not fall below recompute_ratio, since a token that was "
            "dropped in one layer cannot be computed in the next",
        )
        object.__setattr__(self, "schedule", tuple(schedule))

    def to_dict(self) -> dict:
        """The fields as JSON-serialisable values; a selector of your own by its class name."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["selector"] = describe_selector(self.selector)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in fields.items()}

    @classmethod
    def from_dict(cls, data: dict) -> BlendConfig:
        """The inverse of :meth:`to_dict`, but for selectors of your own: put them in yourself."""
        data = dict(data)
        if "selector" in data:
            data["selector"] = described_selector(data["selector"])
        return cls.from_kwargs(None, data)


def _is_ratio(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _are_ratios(values) -> bool:
    return isinstance(values, (list, tuple)) and all(_is_ratio(value) for value in values)
