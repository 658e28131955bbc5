"""The settings of both caches: frozen, validated, JSON-serialisable."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from typing import Any

from .anchors import BUILDERS
from .token_selectors import SELECTORS

ANCHOR_HEADS = ("query", "key_value")
OFFLOADS = (None, "cpu", "disk")
REFINEMENTS = ("sketch", None)
DEVIATIONS = ("values", "keys", "both")


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raise ValueError naming the field, the value and what is allowed."""
    if not condition:
        raise ValueError(f"{field}={value!r} is not valid: {allowed}")


def _is_int(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


class _Config:
    """What the two configurations share."""

    @classmethod
    def from_kwargs(cls, config: _Config | None, kwargs: dict) -> _Config:
        """``config`` (None: the defaults) with the fields in ``kwargs`` replaced.

        Raises:
            TypeError: a keyword is not a field, or ``config`` is something else.
            ValueError: a value is out of range.
        """
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"expected a {cls.__name__}, not a {type(config).__name__}")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names)}"
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
        return dataclasses.replace(cls() if config is None else config, **kwargs)

    def to_dict(self) -> dict:
        """The fields as JSON-serialisable values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> _Config:
        """The inverse of :meth:`to_dict`."""
        return cls.from_kwargs(None, data)


@dataclasses.dataclass(frozen=True)
class AnchorConfig(_Config):
    """How an :class:`~anchor_cache.AnchorDynamicCache` indexes and reads its blocks.

    Args:
        block_size: tokens per block. Smaller blocks select better and cost a larger index.
        budget: tokens attended per decoding step, sinks and window included. An int is a number
            of tokens, a float in (0, 1] a share of the context; a share is never taken as less
            than the sinks, the window and one block need.
        coverage: reserved for a share of the attention mass to reach; only None so far.
        builder: what summarises a block: "mean", its mean key, or "tangent", its keys weighted as
            typical queries of the prompt weigh them.
        anchors_per_head: anchors per block and head, for builders that look at queries.
        anchor_heads: "query" aligns such anchors to the query heads (a layout of
            ``[layers, blocks, anchors, query heads, head size]``), "key_value" to the key/value
            heads, for a smaller index.
        refine: "sketch" lets the anchors propose more blocks than the budget holds and ranks
            those again by one bit per key channel (RaBitQ); None takes the anchors' word.
        refine_factor: how many times as many blocks the anchors propose.
        sink_size: tokens at the start that are always read, rounded up to whole blocks.
        window_size: newest tokens that are always read, at least one block.
        dense_below: contexts of at most this many tokens are read densely,
        dense_above: and so are budgets above this share of the context: there the selection costs
            more than it saves (measured on a CPU; 0 and 1 select whenever the budget allows).
        offload: where keys and values are kept. None: on the model's device. "cpu", with a model
            on an accelerator: in pinned host memory, and the blocks that were read lately, up to
            twice those that a step reads, on the accelerator; a sparse step fetches the selected
            blocks that are not there. "disk": in memory-mapped files, so that a context larger
            than the memory can be decoded; nothing but the index stays in memory. Dense steps read
            (and with "cpu" copy) everything, layer by layer.
        offload_dir: the folder for the files of "disk", made if it does not exist. They have no
            names there and vanish with the cache. None: the system's folder for temporary files;
            see that it is not itself in memory (tmpfs).
        audit_every: on every n-th sparse step also compute the true attention and record which
            share of its mass the selected blocks held, per layer and head. 0: never.

    Raises:
        ValueError: a value is out of range; the message names the field and what is allowed.
    """

    block_size: int = 16
    budget: int | float = 2048
    coverage: float | None = None
    builder: str = "mean"
    anchors_per_head: int = 1
    anchor_heads: str = "query"
    refine: str | None = "sketch"
    refine_factor: int = 8
    sink_size: int = 64
    window_size: int = 256
    dense_below: int = 4096
    dense_above: float = 0.125
    offload: str | None = None
    offload_dir: str | None = None
    audit_every: int = 0

    def __post_init__(self):
        require(_is_int(self.block_size, 1), "block_size", self.block_size, "an int of at least 1")
        require(self.builder in BUILDERS, "builder", self.builder, f"one of {', '.join(BUILDERS)}")
        require(
            _is_int(self.anchors_per_head, 1),
            "anchors_per_head",
            self.anchors_per_head,
            "an int of at least 1",
        )
        require(
            self.anchor_heads in ANCHOR_HEADS,
            "anchor_heads",
            self.anchor_heads,
            f"one of {', '.join(ANCHOR_HEADS)}",
        )
        require(self.refine in REFINEMENTS, "refine", self.refine, "'sketch' or None")
        require(
            _is_int(self.refine_factor, 1),
            "refine_factor",
            self.refine_factor,
            "an int of at least 1",
        )
        require(_is_int(self.sink_size, 0), "sink_size", self.sink_size, "an int of at least 0")
        require(
            _is_int(self.window_size, self.block_size),
            "window_size",
            self.window_size,
            f"an int of at least block_size={self.block_size}, since a block gets its anchors "
            "when it is complete",
        )
        above = self.dense_above
        is_number = isinstance(above, (int, float)) and not isinstance(above, bool)
        require(is_number and 0 < above <= 1, "dense_above", above, "a share lies in (0, 1]")
        require(self.offload in OFFLOADS, "offload", self.offload, "'cpu', 'disk' or None")
        if isinstance(self.offload_dir, os.PathLike):
            object.__setattr__(self, "offload_dir", os.fspath(self.offload_dir))
        require(
            self.offload_dir is None
            or (isinstance(self.offload_dir, str) and self.offload == "disk"),
            "offload_dir",
            self.offload_dir,
            "a path, and only together with offload='disk'",
        )
        for name in ("dense_below", "audit_every"):
            require(_is_int(getattr(self, name), 0), name, getattr(self, name), "an int >= 0")
        require(
            self.coverage is None,
            "coverage",
            self.coverage,
            "only None in this version; choose a budget, and audit_every=1 to see its coverage",
        )
        if isinstance(self.budget, float):
            require(0 < self.budget <= 1, "budget", self.budget, "a share lies in (0, 1]")
        else:
            require(
                _is_int(self.budget, self.smallest_budget),
                "budget",
                self.budget,
                "a number of tokens must hold the sinks, the window and one block, here "
                f"{self.smallest_budget}; raise budget, or lower sink_size, window_size or "
                "block_size",
            )

    @property
    def sink_blocks(self) -> int:
        """Whole blocks that the sinks take."""
        return math.ceil(self.sink_size / self.block_size)

    @property
    def smallest_budget(self) -> int:
        """Tokens that the sinks, the window with its partial block, and one block need."""
        return self.sink_blocks * self.block_size + self.window_size + 2 * self.block_size - 1


@dataclasses.dataclass(frozen=True)
class BlendConfig(_Config):
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
            _is_int(self.check_layer, 1),
            "check_layer",
            self.check_layer,
            "an int of at least 1: keys and values of layer 0 do not depend on the context, so "
            "nothing deviates there",
        )
