"""A cache for RAG prompts, joined from stored chunks and selectively recomputed (CacheBlend)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .blend_config import BlendConfig
from .blend_report import BlendReport
from .chunk import ChunkKey, DamagedChunk
from .chunk_loading import LayerLoader
from .chunk_store import ChunkStore, Segment, require_eval
from .fusion import BlendLayer, Fusion
from .patches.partial_forward import PartialForward
from .prompt_layout import PromptLayout, look_up
from .recompute import recompute
from .rope import find_rotations
from .token_selectors import selector_of


class BlendedCache(DynamicCache):
    """The KV cache of a prompt whose documents were prefilled before, each alone.

    Make one with :meth:`blend`; it then continues like any ``DynamicCache``.

    Attributes:
        input_ids: ids of the whole prompt, ``[1, T + 1]``. The cache holds all but the last.

    Example:
        >>> cache = BlendedCache.blend(model, store, [prefix, *documents, question])
        >>> model.generate(**cache.inputs, past_key_values=cache)
    """

    input_ids: torch.Tensor

    def __init__(self, config: PreTrainedConfig | None = None) -> None:
        super().__init__(config=config)
        self._report: BlendReport | None = None

    @classmethod
    @torch.no_grad()
    def blend(
        cls,
        model: PreTrainedModel,
        store: ChunkStore,
        segments: Sequence[Segment],
        config: BlendConfig | None = None,
        *,
        add_missing: bool = False,
        **fields,
    ) -> BlendedCache:
        """Join stored chunks into the cache of a prompt and recompute what deviates most.

        Stored keys are rotated to their final positions. Then the question, missing chunks and
        the selected tokens run through the model's layers, each attending to everything before
        it, while the chunks of later layers are still being read. To select, "query" first runs
        the question alone over the reused cache; "hkvd" runs all tokens up to ``check_layer`` and
        compares their fresh keys and values with the stored ones (CacheBlend). Chunks in the store
        are never changed.

        Args:
            model: the store's model.
            store: where the chunks are.
            segments: texts or lists of token ids, spliced as ids in this order. The first, if it
                is the store's prefix, is reused exactly; the last is the question, always fresh.
            config: how much to recompute and how to choose it.
            add_missing: store chunks that were not there, after the blend.
            **fields: fields of :class:`BlendConfig` to replace.

        Returns:
            The cache; ``model.generate(**cache.inputs, past_key_values=cache)`` goes on from it.

        Raises:
            ValueError: no segments, an empty one, another model than the store's, or a model in
                training mode.
            NotImplementedError: the model, named, cannot be blended, and why.
        """
        config = BlendConfig.from_kwargs(config, fields)
        if model is not store.model:
            raise ValueError("model is not the store's model: make a ChunkStore for this model")
        require_eval(model)
        _require_layers(config, len(find_rotations(model)))
        started = time.perf_counter()
        damaged: dict[ChunkKey, str] = {}
        while True:
            prompt = look_up(store, segments, damaged)
            try:
                blended = cls(model.config)
                blended._fuse(model, prompt, config, started)
                break
            except DamagedChunk as error:  # it then counts as a miss
                damaged[error.key] = str(error)
            finally:
                prompt.close()
        if add_missing:
            for key in damaged:
                store.delete(key)
            store.add(prompt.missing, progress=False)
        return blended

    def _fuse(
        self, model: PreTrainedModel, prompt: PromptLayout, config: BlendConfig, started: float
    ) -> None:
        """Fill the layers and write the report."""
        self.input_ids = prompt.ids
        depth, tokens = len(self.layers), prompt.tokens
        selected, per_layer, ratio = [], [0] * depth, 0.0
        deviation, trace = torch.full((depth, tokens), float("nan")), []
        if tokens:
            forward = PartialForward(model, prompt.ids[:, :tokens])
            depth = forward.layers
            prompt.doubt_other_tables(forward)
            loader = LayerLoader(forward, prompt.chunks, find_rotations(model), model.device)
            try:
                fusion = Fusion(loader, depth, tokens, prompt.inexact, config.deviation)
                done = recompute(forward, prompt, fusion, config)
                for i, layer in enumerate(self.layers):
                    _hand_on(layer, fusion.loaded(i))
            finally:
                loader.close()
            selected, per_layer, ratio = done.selected.tolist(), done.per_layer, done.ratio
            deviation, trace = fusion.deviation.cpu(), fusion.trace
        self._report = BlendReport(
            reused_tokens=int(prompt.reused.sum()),
            exact_prefix_tokens=int(prompt.exact.sum()),
            fresh_tokens=tokens + 1 - int(prompt.reused.sum()),
            recomputed_tokens=per_layer,
            recompute_ratio=ratio,
            deviation=deviation,
            selected=selected,
            segment_starts=prompt.segment_starts,
            trace=sorted((w, n, a - started, b - started) for w, n, a, b in trace),
            seconds=time.perf_counter() - started,
            reasons=dict(prompt.reasons),
        )

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """``input_ids`` and an ``attention_mask`` of ones for ``generate``, which would otherwise
        guess a mask wherever the prompt holds the model's padding token."""
        return {"input_ids": self.input_ids, "attention_mask": torch.ones_like(self.input_ids)}

    def report(self) -> BlendReport:
        """What was reused and recomputed.

        Raises:
            RuntimeError: the cache was not made by :meth:`blend`.
        """
        if self._report is None:
            raise RuntimeError("this cache was not made by BlendedCache.blend")
        return self._report


def _require_layers(config: BlendConfig, depth: int) -> None:
    """Raise ValueError if the model has no layer where the settings want to filter."""
    measures = "deviation" in selector_of(config.selector).needs
    if measures and config.check_layer >= depth:
        raise ValueError(
            f"check_layer={config.check_layer} is not valid: the model has layers 0 to {depth - 1}"
        )
    last = (config.check_layer if measures else 0) + len(config.schedule)
    if config.schedule and last >= depth:
        raise ValueError(
            f"schedule={config.schedule!r} is not valid: its last filter would stand at layer "
            f"{last}, and the model has layers 0 to {depth - 1}"
        )


def _hand_on(layer, fused: BlendLayer) -> None:
    if fused.keys is None:
        return
    if type(layer) is DynamicLayer:
        layer.lazy_initialization(fused.keys, fused.values)
        layer.keys, layer.values = fused.keys, fused.values
    else:
        layer.update(fused.keys, fused.values)
