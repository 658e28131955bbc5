"""The settings of an AnchorDynamicCache: frozen, validated, JSON-serialisable."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Hashable

from .anchors import BUILDERS, AnchorBuilder, builder_of, describe_builder, described_builder
from .validation import Config, is_int, is_share, require

_WHOLE_CACHE = {"per_layer", "offload", "offload_dir"}
_CHOICES = {
    "anchor_heads": ("query", "key_value"),
    "selection_heads": ("key_value", "query", "layer"),
    "anchor_dtype": (None, "int8"),
    "refine": ("sketch", "exact", None),
    "sketch_bits": (1, 2),
    "skipped": (None, "mean"),
    "offload": (None, "cpu", "disk"),
}


@dataclasses.dataclass(frozen=True)
class AnchorConfig(Config):
    """How an :class:`~anchor_cache.AnchorDynamicCache` indexes and reads its blocks.

    Args:
        block_size: tokens per block, the unit of the anchors.
        read_size: tokens that are read or left out together; a divisor of ``block_size``, and
            smaller than it only with ``refine``, which alone tells a block's tokens apart. None:
            2 with ``refine`` (1 if that does not divide the block), otherwise the block.
        budget: tokens attended per decoding step and head, sinks and window included. An int is a
            number of tokens, a float in (0, 1] a share of the context; a share is never taken as
            less than :attr:`smallest_budget`.
        coverage: read the fewest blocks whose estimated share of the attention mass, with sinks
            and window, reaches this share; the budget is the cap. None reads the whole budget.
        tolerance: read on beyond the budget until no query head can have skipped more than this
            share of its attention mass, by a proven bound; 0 reads everything. The bound is loose
            for heads that attend broadly, so that most contexts are read to a large part.
        builder: what summarises a block: "mean", its mean key; "tangent", its keys weighted as
            typical queries weigh them; "representative", its most attended key; "minmax", the box
            around its keys (Quest); or an :class:`~anchor_cache.AnchorBuilder` of your own.
        anchors_per_head: anchors per block and head, for builders that look at queries.
        anchor_heads: "query" aligns such anchors to the query heads (a layout of
            ``[layers, blocks, anchors, query heads, head size]``), "key_value" to the key/value
            heads, for a smaller index.
        anchor_dtype: "int8" keeps anchors in a byte per channel, each off by at most 1/254 of the
            anchor's largest one; None keeps the keys' dtype.
        refine: "sketch" lets the anchors propose more blocks than the budget holds and ranks
            those again by a few bits per key channel (RaBitQ); "exact" ranks them by their keys,
            which costs as much reading as it saves: a control; None takes the anchors' word.
        refine_factor: how many times as many blocks the anchors propose as the budget holds, but
            always those of up to 8,192 tokens.
        sketch_bits: bits per key channel, 1 or 2; 1 makes the index of bfloat16 keys smaller by 6 %
            of them and steps a tenth shorter, and ranks less well.
        selection_heads: who makes a selection: each "key_value" head, each "query" head (its
            budget is its own, so that up to as many times the keys are read as query heads share a
            key head), or the whole "layer" together.
        reselect_every: a selection serves so many steps before a new one is made.
        skipped: "mean" lets skipped blocks take part through their mean value, weighted by their
            estimated mass (RetroInfer); None leaves them out.
        sink_size: tokens at the start that every step reads, rounded up to whole blocks.
        window_size: newest tokens that every step reads, at least one block. Where sinks and
            window would take more than half of the budget (with the defaults: of one below 640
            tokens) they shrink, the sinks to an eighth of it, neither below one block.
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
        per_layer: other settings for some layers, ``{layer index: {field: value}}``; for example
            ``{0: {"budget": 1.0}}`` keeps the first layer dense.
        audit_every: on every n-th sparse step also compute the true attention and record, per
            layer and head, the mass read, the recall of the best blocks, the error of the output
            and the estimated mass. 0: never.

    Raises:
        ValueError: a value is out of range; the message names the field and what is allowed.
    """

    block_size: int = 16
    read_size: int | None = None
    budget: int | float = 2048
    coverage: float | None = None
    tolerance: float | None = None
    builder: str | AnchorBuilder = "mean"
    anchors_per_head: int = 1
    anchor_heads: str = "query"
    anchor_dtype: str | None = "int8"
    refine: str | None = "sketch"
    refine_factor: int = 8
    sketch_bits: int = 2
    selection_heads: str = "key_value"
    reselect_every: int = 1
    skipped: str | None = None
    sink_size: int = 64
    window_size: int = 256
    dense_below: int = 4096
    dense_above: float = 0.1
    offload: str | None = None
    offload_dir: str | None = None
    per_layer: dict[int, dict] | None = dataclasses.field(default=None, hash=False)
    audit_every: int = 0

    def __post_init__(self):
        for name in ("block_size", "anchors_per_head", "refine_factor", "reselect_every"):
            require(is_int(getattr(self, name), 1), name, getattr(self, name), "an int >= 1")
        for name in ("sink_size", "dense_below", "audit_every"):
            require(is_int(getattr(self, name), 0), name, getattr(self, name), "an int >= 0")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            known = any(type(value) is type(choice) and value == choice for choice in choices)
            require(known, name, value, "one of " + ", ".join(map(repr, choices)))
        require(
            self.read_size is None
            or (is_int(self.read_size, 1) and self.block_size % self.read_size == 0),
            "read_size",
            self.read_size,
            f"None or a divisor of block_size={self.block_size}",
        )
        require(
            self.refine is not None or self.read_size in (None, self.block_size),
            "read_size",
            self.read_size,
            "anchors alone do not tell a block's tokens apart; choose refine='sketch', or leave it "
            "at None",
        )
        require(
            isinstance(self.builder, AnchorBuilder) or self.builder in tuple(BUILDERS),
            "builder",
            self.builder,
            f"one of {', '.join(map(repr, BUILDERS))}, or an AnchorBuilder object of your own",
        )
        require(
            isinstance(self.builder, Hashable),
            "builder",
            self.builder,
            "it must be hashable: if it is a dataclass, make it a frozen one",
        )
        require(
            is_int(self.window_size, self.block_size),
            "window_size",
            self.window_size,
            f"an int of at least block_size={self.block_size}, since a block gets its anchors "
            "when it is complete",
        )
        require(is_share(self.dense_above), "dense_above", self.dense_above, "a share in (0, 1]")
        if isinstance(self.offload_dir, os.PathLike):
            object.__setattr__(self, "offload_dir", os.fspath(self.offload_dir))
        is_folder = isinstance(self.offload_dir, str) and self.offload == "disk"
        require(
            self.offload_dir is None or is_folder,
            "offload_dir",
            self.offload_dir,
            "a path, and only together with offload='disk'",
        )
        self._check_budget()
        self._check_combinations()
        self._check_layers()

    def _check_budget(self) -> None:
        if isinstance(self.budget, float):
            require(is_share(self.budget), "budget", self.budget, "a share lies in (0, 1]")
        else:
            require(
                is_int(self.budget, self.smallest_budget),
                "budget",
                self.budget,
                "a number of tokens must hold a block of sinks, one of the window, one that is not "
                f"full yet and one that is chosen, here {self.smallest_budget}; raise budget, or "
                "lower block_size or reselect_every",
            )
        coverage, tolerance = self.coverage, self.tolerance
        require(
            coverage is None or is_share(coverage),
            "coverage",
            coverage,
            "None or a share in (0, 1]",
        )
        require(
            tolerance is None or is_share(tolerance) or (tolerance == 0 and tolerance is not False),
            "tolerance",
            tolerance,
            "None, 0 (read everything) or a share in (0, 1]",
        )

    def _check_combinations(self) -> None:
        both = self.coverage is not None and self.tolerance is not None
        require(not both, "tolerance", self.tolerance, "leave coverage at None with a tolerance")
        require(
            self.skipped is None or builder_of(self.builder).bounds_from_below,
            "skipped",
            self.skipped,
            f"builder={self.builder!r} bounds the mass of skipped blocks from above; choose "
            "another builder",
        )
        for name in ("skipped", "tolerance"):
            value = getattr(self, name)
            require(
                value is None or self.reselect_every == 1,
                name,
                value,
                "depends on the query of each step; leave reselect_every at 1",
            )

    def _check_layers(self) -> None:
        layers = self.per_layer
        mapping = layers is None or isinstance(layers, dict)
        require(mapping, "per_layer", layers, "a dictionary {layer index: {field: value}}")
        for layer, fields in (layers or {}).items():
            require(is_int(layer, 0), "per_layer", layer, "layers are numbered from 0")
            require(
                isinstance(fields, dict) and not _WHOLE_CACHE & set(fields),
                f"per_layer[{layer}]",
                fields,
                f"a dictionary of fields other than {', '.join(sorted(_WHOLE_CACHE))}",
            )
            try:
                self.for_layer(layer)
            except (TypeError, ValueError) as error:
                raise type(error)(f"per_layer[{layer}]: {error}") from None

    def for_layer(self, layer: int) -> AnchorConfig:
        """The settings of one layer.

        Raises:
            TypeError: an override is not a field.
            ValueError: an override is out of range.
        """
        if not self.per_layer:
            return self
        fields = dict(self.per_layer.get(layer, {}))
        return AnchorConfig.from_kwargs(self, {"per_layer": None, **fields})

    def to_dict(self) -> dict:
        """The fields as JSON-serialisable values; a builder of your own by its class name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["builder"] = describe_builder(self.builder)
        if self.per_layer:
            fields["per_layer"] = {
                layer: {name: describe_builder(value) for name, value in own.items()}
                for layer, own in self.per_layer.items()
            }
        return fields

    @classmethod
    def from_dict(cls, data: dict) -> AnchorConfig:
        """The inverse of :meth:`to_dict`, but for builders of your own: put them in yourself.
        JSON has no int keys: ``per_layer`` may have strings."""
        data = {name: described_builder(value) for name, value in data.items()}
        if data.get("per_layer") is not None:
            data["per_layer"] = {
                int(layer): {name: described_builder(value) for name, value in own.items()}
                for layer, own in data["per_layer"].items()
            }
        return cls.from_kwargs(None, data)

    @property
    def read_tokens(self) -> int:
        """Tokens that are read or left out together."""
        if self.read_size is not None or self.refine is None:
            return self.read_size or self.block_size
        return 2 if self.block_size % 2 == 0 else 1

    @property
    def sink_blocks(self) -> int:
        """Whole blocks that the sinks take."""
        return math.ceil(self.sink_size / self.block_size)

    @property
    def smallest_budget(self) -> int:
        """Tokens that a block of sinks (if any), a window of a block with the partial one after
        it, a block that is chosen, and the steps that a selection is used again for need."""
        blocks = min(self.sink_blocks, 1) + 3
        return blocks * self.block_size - 1 + self.reselect_every - 1
