"""A cache for RAG prompts, joined from stored chunks and selectively recomputed (CacheBlend)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .blend_config import BlendConfig
from .blend_report import BlendReport
from .chunk import ChunkKey, DamagedChunk
from .chunk_loading import LayerLoader
from .chunk_store import ChunkStore
from .fusion import BlendLayer, Fusion
from .left_padding import spread, stacked
from .model_identity import require_inference
from .patches.attention import hand_over, hold_routing
from .patches.partial_forward import PartialForward
from .prompt_layout import PromptLayout, look_up
from .recompute import Recomputed, recompute
from .refed_tokens import refuse_refed_tokens
from .rope import find_rotations
from .segment_ids import Segment
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
        self._mask: torch.Tensor | None = None
        self._reports: list[BlendReport] = []

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
                training mode or under autocast.
            NotImplementedError: the model, named, cannot be blended, and why.
        """
        return cls._of([segments], model, store, config, add_missing, fields)

    @classmethod
    @torch.no_grad()
    def blend_batch(
        cls,
        model: PreTrainedModel,
        store: ChunkStore,
        prompts: Sequence[Sequence[Segment]],
        config: BlendConfig | None = None,
        *,
        add_missing: bool = False,
        **fields,
    ) -> BlendedCache:
        """Blend several prompts, one after the other, into one cache of as many rows.

        Prompts may have different chunks and lengths; shorter ones are padded on the left, as
        :attr:`inputs` tells ``generate``. Each row is what :meth:`blend` makes of its prompt alone.

        Args:
            prompts: each a list of segments, as for :meth:`blend`.

        Returns:
            The cache; :meth:`reports` has a report for each prompt.

        Raises:
            ValueError, NotImplementedError: as :meth:`blend`.

        Example:
            >>> cache = BlendedCache.blend_batch(model, store, [[*docs, "Who?"], [doc, "When?"]])
            >>> model.generate(**cache.inputs, past_key_values=cache)
        """
        if isinstance(prompts, str) or not len(prompts):
            raise ValueError("prompts must be a list of lists of segments")
        return cls._of(prompts, model, store, config, add_missing, fields)

    @classmethod
    def _of(cls, prompts, model, store, config, add_missing, fields) -> BlendedCache:
        config = BlendConfig.from_kwargs(config, fields)
        if model is not store.model:
            raise ValueError("model is not the store's model: make a ChunkStore for this model")
        require_inference(model)
        _require_layers(config, len(find_rotations(model)))
        fused = [_fuse(model, store, segments, config, add_missing) for segments in prompts]
        blended = cls(model.config)
        padding = model.config.get_text_config(decoder=True).pad_token_id
        ids, masks = zip(*((f.ids, torch.ones_like(f.ids)) for f in fused), strict=True)
        blended.input_ids = stacked(ids, 0 if padding is None else padding)
        blended._mask = stacked(masks, 0)
        # Layers that share another one's keys and values come last, and have none of their own.
        for i, layer in enumerate(blended.layers[: len(fused[0].layers)]):
            _hand_on(layer, [f.layers[i] for f in fused])
        blended._reports = [f.report for f in fused]
        return blended

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == 0 and self.layers:
            refuse_refed_tokens(self.layers[0], key_states, value_states, kwargs)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[2] == 1:
            hold_routing(self)
            keys = keys[:]  # the layer's own tensor must not carry the hand-over
            hand_over(self, keys, kwargs)
        return keys, values

    def batch_select_indices(self, indices) -> None:
        """Keep these rows, those of :attr:`inputs` and :meth:`reports` too unless the cache's were
        repeated, which ``generate`` does to its own inputs."""
        keys = self.layers[0].keys
        if self._reports and (keys is None or len(keys) == len(self._reports)):
            kept = torch.arange(len(self._reports))[torch.as_tensor(indices).cpu()].tolist()
            self.input_ids, self._mask = self.input_ids[kept], self._mask[kept]
            self._reports = [self._reports[i] for i in kept]
        super().batch_select_indices(indices)

    def read(self, module, query, keys, values, mask, kwargs) -> None:
        """Called by the routed attention function: a decoding step reads everything, packed as is
        fastest on a CPU (see ``patches/attention.py``)."""

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """``input_ids`` and their ``attention_mask`` for ``generate``, which would otherwise guess
        a mask wherever the prompt holds the model's padding token. Assisted and prompt-lookup
        decoding read all ids they get: give them ``input_ids[:, -1:]`` and the mask."""
        return {"input_ids": self.input_ids, "attention_mask": self._mask}

    def report(self) -> BlendReport:
        """What was reused and recomputed.

        Raises:
            RuntimeError: the cache was not made by :meth:`blend`.
        """
        if len(self._reports) != 1:
            raise RuntimeError(
                f"this cache holds {len(self._reports)} blended prompts: BlendedCache.blend makes "
                "one of a single prompt, and reports() gives those of a batch"
            )
        return self._reports[0]

    def reports(self) -> list[BlendReport]:
        """A report for each prompt of a batch."""
        return list(self._reports)


class _Fused(NamedTuple):
    """One prompt: its ids ``[1, T + 1]``, its layers, its report."""

    ids: torch.Tensor
    layers: list[BlendLayer]
    report: BlendReport


def _fuse(model, store, segments, config: BlendConfig, add_missing: bool) -> _Fused:
    started = time.perf_counter()
    damaged: dict[ChunkKey, str] = {}
    while True:
        prompt = look_up(store, segments, damaged)
        try:
            fused = _compute(model, store, prompt, config, started)
            break
        except DamagedChunk as error:  # it then counts as a miss
            damaged[error.key] = error.reason
        finally:
            prompt.close()
    if add_missing:
        store.add(prompt.missing, progress=False)
    return fused


def _compute(
    model: PreTrainedModel,
    store: ChunkStore,
    prompt: PromptLayout,
    config: BlendConfig,
    started: float,
) -> _Fused:
    tokens, rotations = prompt.tokens, find_rotations(model)
    forward = PartialForward(model, prompt.ids[:, :tokens]) if tokens else None
    if forward is not None:
        prompt.doubt_other_tables(forward)
    loader = LayerLoader(forward, prompt.chunks, rotations, model.device, store.is_local)
    try:
        fusion = Fusion(loader, len(rotations), tokens, prompt.inexact, config.deviation)
        done = Recomputed.nothing(len(rotations))
        if forward is not None:
            done = recompute(forward, prompt, fusion, config)
        layers = [fusion.loaded(i) for i in range(len(rotations))]
    finally:
        loader.close()
    report = BlendReport(
        reused_tokens=int(prompt.reused.sum()),
        exact_prefix_tokens=int(prompt.exact.sum()),
        fresh_tokens=tokens + 1 - int(prompt.reused.sum()),
        recomputed_tokens=done.per_layer,
        recompute_ratio=done.ratio,
        deviation=fusion.deviation.cpu(),
        selected=done.selected.tolist(),
        segment_starts=prompt.segment_starts,
        trace=sorted((w, n, a - started, b - started) for w, n, a, b in fusion.trace),
        seconds=time.perf_counter() - started,
        reasons=dict(prompt.reasons),
    )
    return _Fused(prompt.ids, layers, report)


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


def _hand_on(layer, rows: Sequence[BlendLayer]) -> None:
    """Give a layer of the cache the keys and values of all prompts."""
    held = [row for row in rows if row.keys is not None]
    if not held:  # prompts of a single token
        return
    keys, values = (
        stacked([getattr(row, name) for row in held], 0, dim=2) for name in ("keys", "values")
    )
    if len(held) < len(rows):
        where = torch.tensor([row.keys is not None for row in rows], device=keys.device)
        keys, values = (spread(states, where) for states in (keys, values))
    if type(layer) is DynamicLayer:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    else:
        layer.update(keys, values)
