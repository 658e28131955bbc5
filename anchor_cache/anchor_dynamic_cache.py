"""A DynamicCache whose decoding steps read only the blocks that matter."""

from __future__ import annotations

import dataclasses
import os

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .anchor_config import AnchorConfig
from .anchor_layer import AnchorLayer
from .memory_tiers import describe, require_offloadable
from .offloaded_layer import OffloadedAnchorLayer
from .patches.attention import hold_routing
from .refed_tokens import refuse_refed_tokens
from .retrieval_report import RetrievalReport
from .validation import require
from .warm_cache_files import read_description, read_layers, write_cache


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
        NotImplementedError: ``offload="cpu"`` with multi-head latent attention.

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
        require_offloadable(self.anchor_config, config)
        if config is None:
            Cache.__init__(self, layer_class_to_replicate=AnchorLayer)
            return
        super().__init__(config=config)
        beyond = [i for i in self.anchor_config.per_layer or () if i >= len(self.layers)]
        require(
            not beyond,
            "per_layer",
            beyond,
            f"this model has cache layers 0 to {len(self.layers) - 1}",
        )
        layers, self.layers = self.layers, []
        for layer in layers:
            self.layers.append(self._next_layer() if type(layer) is DynamicLayer else layer)

    def _next_layer(self) -> AnchorLayer:
        config = self.anchor_config.for_layer(len(self.layers))
        return AnchorLayer(config) if config.offload is None else OffloadedAnchorLayer(config)

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
            if type(layer) is DynamicLayer or isinstance(layer, AnchorLayer):
                source, layer = layer, indexed._next_layer()
                if source.is_initialized:
                    layer.keys, layer.values = source.keys, source.values
                if isinstance(source, AnchorLayer):
                    layer.reader.take_queries_from(source.reader)
            indexed.layers.append(layer)
        return indexed

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write the cache to a folder, so that a document is prefilled once and for all.

        One safetensors file per layer and a JSON, which replaces that of an older cache in one
        step. The index is not written: the first sparse step makes it anew. Nor is the report.

        Args:
            folder: made if it does not exist; other files in it are left alone.

        Raises:
            TypeError: a layer, named, holds something that cannot be written.
        """
        layers = (
            (AnchorLayer, layer.state_dict())
            if isinstance(layer, AnchorLayer)
            else (type(layer), vars(layer))
            for layer in self.layers
        )
        settings = {
            "anchor_config": self.anchor_config.to_dict(),
            "adds_layers": self.layer_class_to_replicate is not None,
        }
        write_cache(folder, settings, layers)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike, device: str | torch.device | None = None, **fields
    ) -> AnchorDynamicCache:
        """Load what :meth:`save_pretrained` wrote; goes on as the saved cache would, but that a
        selection that was to serve more steps (``reselect_every``) is made anew.

        Args:
            folder: where it was saved.
            device: where to put it; None for the devices that its layers were on.
            **fields: fields of :class:`AnchorConfig` to replace; a builder of your own has to be
                given again.

        Raises:
            FileNotFoundError: there is no saved cache.
            ValueError: a file is damaged, missing, or of a newer format; or a field is out of
                range.
            RuntimeError: the device is not here.
            ImportError: the class of a layer is not here.
            TypeError: an unknown field.
        """
        description = read_description(folder)
        config = AnchorConfig.from_dict({**description["anchor_config"], **fields})
        cache = cls(None, config)
        for layer_class, state in read_layers(folder, description, device):
            if layer_class is AnchorLayer:
                layer = cache._next_layer()
                layer.load_state_dict(state)
            else:
                layer = layer_class.__new__(layer_class)
                vars(layer).update(state)
            cache.layers.append(layer)
        if not description["adds_layers"]:
            cache.layer_class_to_replicate = None
        return cache

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
        report = RetrievalReport.collect(
            records={i: layer.record for i, layer in layers.items()},
            tokens_seen=self.get_seq_length() if self.layers else 0,
            index_bytes=sum(layer.index_bytes for layer in layers.values()),
            kv_bytes=sum(layer.kv_bytes for layer in layers.values()),
            block_size=self.anchor_config.block_size,
            untouched=others,
        )
        storages = (s for layer in layers.values() for s in (layer._keys, layer._values))
        return dataclasses.replace(report, memory=describe(self.anchor_config, storages))
