"""A DynamicCache whose decoding steps read only the blocks that matter."""

from __future__ import annotations

from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .anchor_layer import AnchorLayer
from .config import AnchorConfig
from .patches.attention import hold_routing
from .refed_tokens import refuse_refed_tokens
from .retrieval_report import RetrievalReport


class AnchorDynamicCache(DynamicCache):
    """Keeps the whole KV cache and, at each decoding step, reads only the blocks that matter.

    Prefill is exact. From then on the query of each layer scores a small index of anchor vectors,
    and attention reads the sinks, the newest tokens and the best blocks that fit the budget.
    Attention functions are patched while such a cache lives, never on import, and only calls that
    come from it behave differently.

    Args:
        config: the model's configuration. Needed for models with sliding-window or linear
            layers; without it every layer is taken for full attention, as in ``DynamicCache``.
        anchor_config: how to index and select; defaults to ``AnchorConfig()``.
        **fields: fields of :class:`AnchorConfig` to replace.

    Raises:
        TypeError: an unknown field, or something else than a configuration.
        ValueError: a field is out of range.

    Example:
        >>> cache = AnchorDynamicCache(model.config, budget=0.1)
        >>> model.generate(**inputs, past_key_values=cache)
        >>> print(cache.report())
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        anchor_config: AnchorConfig | None = None,
        **fields,
    ) -> None:
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(
                f"config must be a model's configuration (model.config), not a "
                f"{type(config).__name__}; an AnchorConfig goes to anchor_config"
            )
        self.anchor_config = AnchorConfig.from_kwargs(anchor_config, fields)
        if config is None:
            Cache.__init__(self, layer_class_to_replicate=AnchorLayer)
            return
        super().__init__(config=config)
        layers, self.layers = self.layers, []
        for layer in layers:
            self.layers.append(self._next_layer() if type(layer) is DynamicLayer else layer)

    def _next_layer(self) -> AnchorLayer:
        return AnchorLayer(self.anchor_config.for_layer(len(self.layers)))

    @classmethod
    def from_cache(
        cls, cache: DynamicCache, anchor_config: AnchorConfig | None = None, **fields
    ) -> AnchorDynamicCache:
        """Index a cache that is filled already (a ``BlendedCache`` too).

        Keys and values of full-attention layers are copied; other layers are taken over as they
        are. Perspectives are learned from the queries that an ``AnchorDynamicCache`` has kept,
        otherwise from those that come.

        Args:
            cache: any ``DynamicCache``; do not go on using it.
            anchor_config: how to index and select.
            **fields: fields of :class:`AnchorConfig` to replace.

        Raises:
            TypeError: ``cache`` is of another kind.
        """
        if not isinstance(cache, DynamicCache):
            raise TypeError(f"cache must be a DynamicCache, not a {type(cache).__name__}")
        indexed = cls(None, anchor_config, **fields)
        for layer in cache.layers:
            if type(layer) in (DynamicLayer, AnchorLayer) and layer.is_initialized:
                source, layer = layer, indexed._next_layer()
                layer.keys, layer.values = source.keys, source.values
                layer.take_queries_from(source)
            elif type(layer) in (DynamicLayer, AnchorLayer):
                layer = indexed._next_layer()
            indexed.layers.append(layer)
        return indexed

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Append to layer ``layer_idx``; returns its whole keys and values.

        Raises:
            ValueError: the cache holds these tokens already, or they do not fit it.
        """
        hold_routing(self)
        if layer_idx == 0 and self.layers:
            refuse_refed_tokens(self.layers[0], key_states, value_states, kwargs)
        if self.layer_class_to_replicate is not None:
            # Made here and not by the base class: settings may differ between layers.
            while len(self.layers) <= layer_idx:
                self.layers.append(self._next_layer())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def anchor_layers(self) -> dict[int, AnchorLayer]:
        """The layers that can be sparse, by index."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, AnchorLayer)}

    def report(self) -> RetrievalReport:
        """What was read so far, and what was not sparse and why."""
        others: dict[str, list[int]] = {}
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, AnchorLayer):
                others.setdefault(type(layer).__name__, []).append(i)
        layers = self.anchor_layers
        for layer in layers.values():
            layer.note_unread_step()
        return RetrievalReport.collect(
            records={i: layer.record for i, layer in layers.items()},
            tokens_seen=self.get_seq_length() if self.layers else 0,
            index_bytes=sum(layer.index_bytes for layer in layers.values()),
            kv_bytes=sum(layer.kv_bytes for layer in layers.values()),
            block_size=self.anchor_config.block_size,
            untouched=others,
        )
