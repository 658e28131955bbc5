"""A StaticCache whose decoding steps read only the blocks that matter, for compiled decoding."""

from __future__ import annotations

import warnings

from transformers import PreTrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.utils import is_torchdynamo_compiling

from .anchor_config import AnchorConfig
from .anchor_static_layer import BYPASSED, AnchorStaticLayer
from .anchors import builder_of
from .patches.attention import hold_routing
from .retrieval_report import RetrievalReport
from .validation import is_int, require

# The values of fields whose other values need steps of different shapes, or a host that waits.
_ONLY = {
    "coverage": (None, "how much is read may not depend on the query"),
    "tolerance": (None, "how much is read may not depend on the query"),
    "selection_heads": ("key_value", "selections per query head or layer are not compiled"),
    "reselect_every": (1, "every step is the same graph"),
    "skipped": (None, "the means of skipped blocks are not compiled"),
    "offload": (None, "the buffers stay where they are"),
    "audit_every": (0, "every step is the same graph"),
}


def _require_static(config: AnchorConfig) -> None:
    for name, (only, why) in _ONLY.items():
        value = getattr(config, name)
        allowed = f"AnchorStaticCache takes {only!r} alone ({why}); use AnchorDynamicCache"
        require(value == only, name, value, allowed)
    require(
        config.refine in ("sketch", None),
        "refine",
        config.refine,
        "AnchorStaticCache takes 'sketch' or None; use AnchorDynamicCache",
    )
    require(
        not builder_of(config.builder).query_dependent,
        "builder",
        config.builder,
        "AnchorStaticCache takes builders that do not look at queries ('mean', 'minmax' or one of "
        "your own); use AnchorDynamicCache",
    )


class AnchorStaticCache(StaticCache):
    """Keeps the KV cache in buffers of fixed capacity and reads only the blocks that matter, with
    decoding steps that ``torch.compile`` and CUDA graphs trace once.

    Selects as :class:`AnchorDynamicCache` does, but that everything that depends on the length of
    the context is decided by the capacity: ``budget`` as a share, ``dense_below`` and
    ``dense_above`` are measured against ``max_cache_len``. A context within the budget is read
    whole. Prefill is exact. Attention functions are patched while such a cache lives.

    Args:
        config: the model's configuration.
        max_cache_len: tokens that the cache can hold, prompt and generated ones.
        anchor_config: how to index and select; defaults to ``AnchorConfig()``.
        **fields: fields of :class:`AnchorConfig` to replace.

    Raises:
        TypeError: an unknown field, or something else than a configuration.
        ValueError: a field is out of range, or has a value that needs an ``AnchorDynamicCache``.

    Example:
        >>> cache = AnchorStaticCache(model.config, max_cache_len=32768, budget=2048)
        >>> model.generate(**inputs, past_key_values=cache)
        >>> step = torch.compile(model.forward, fullgraph=True)
        >>> step(next_id, past_key_values=cache)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_cache_len: int,
        anchor_config: AnchorConfig | None = None,
        **fields,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(
                f"config must be a model's configuration (model.config), not a "
                f"{type(config).__name__}; an AnchorConfig goes to anchor_config"
            )
        require(is_int(max_cache_len, 1), "max_cache_len", max_cache_len, "an int >= 1")
        self.anchor_config = AnchorConfig.from_kwargs(anchor_config, fields)
        super().__init__(config=config, max_cache_len=max_cache_len)
        beyond = [i for i in self.anchor_config.per_layer or () if i >= len(self.layers)]
        last = len(self.layers) - 1
        require(not beyond, "per_layer", beyond, f"this model has cache layers 0 to {last}")
        for i, layer in enumerate(self.layers):
            if type(layer) is StaticLayer:
                own = self.anchor_config.for_layer(i)
                _require_static(own)
                self.layers[i] = AnchorStaticLayer(max_cache_len, own, i)
        self._has_warned = False
        # Here and not in update, which compiled steps run.
        hold_routing(self)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Append to layer ``layer_idx``; returns its whole buffers of keys and values.

        Raises:
            ValueError: several tokens that do not fit, or that the cache holds already (not looked
                at in compiled graphs).
        """
        if not is_torchdynamo_compiling():
            before = [x for x in self.layers[:layer_idx] if isinstance(x, AnchorStaticLayer)]
            if before and before[-1].is_bypassed and not self._has_warned:
                self._has_warned = True
                warnings.warn(f"AnchorStaticCache stays dense: {BYPASSED}", stacklevel=3)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        hold_routing(self)

    @property
    def anchor_layers(self) -> dict[int, AnchorStaticLayer]:
        """The layers that can be sparse, by index."""
        return {i: x for i, x in enumerate(self.layers) if isinstance(x, AnchorStaticLayer)}

    def report(self) -> RetrievalReport:
        """What was read so far, and what was not sparse and why; waits for the device."""
        layers, others = self.anchor_layers, {}
        for i, layer in enumerate(self.layers):
            if i not in layers:
                others.setdefault(type(layer).__name__, []).append(i)
        return RetrievalReport.collect(
            records={i: layer.record() for i, layer in layers.items()},
            tokens_seen=int(self.get_seq_length()),
            index_bytes=sum(layer.index_bytes for layer in layers.values()),
            kv_bytes=sum(layer.kv_bytes for layer in layers.values()),
            block_size=self.anchor_config.block_size,
            untouched=others,
        )
