"""A cache for RAG prompts, joined from stored chunks and selectively recomputed (CacheBlend)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .blend_config import BlendConfig
from .blend_report import BlendReport
from .chunk_store import Chunk, ChunkStore, Segment, require_eval
from .fusion import BlendLayer, Fusion, Prompt, recompute
from .model_identity import model_identity
from .patches.partial_forward import PartialForward
from .rope import find_rotations
from .token_selectors import SELECTORS


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
        it. To select, "query" first runs the question alone over the reused cache; "hkvd" runs
        all tokens up to ``check_layer`` and compares their fresh keys and values with the stored
        ones (CacheBlend). Chunks in the store are never changed.

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
        depth = len(find_rotations(model))
        if SELECTORS[config.selector].signal == "deviation" and config.check_layer >= depth:
            raise ValueError(
                f"check_layer={config.check_layer} is not valid: the model has layers 0 to "
                f"{depth - 1}"
            )
        started = time.perf_counter()
        prompt = _look_up(store, segments)
        tokens = prompt.ids.shape[1] - 1
        blended = cls(model.config)
        blended.input_ids = prompt.ids
        forward = PartialForward(model, prompt.ids[:, :tokens]) if tokens else None
        if forward is not None:
            _doubt_other_tables(forward, prompt)
        fusion = Fusion(depth, tokens, prompt.reused & ~prompt.exact, config.deviation)
        if forward is not None:
            _place_chunks(model, forward, prompt, fusion)
        loaded = time.perf_counter()
        selected, recomputed = prompt.exact.new_zeros(0, dtype=torch.long), [0] * depth
        if forward is not None:
            selected, recomputed = recompute(forward, prompt, fusion, config)
        for layer, fused in zip(blended.layers, fusion.layers, strict=False):
            _hand_on(layer, fused)
        blended._report = BlendReport(
            reused_tokens=int(prompt.reused.sum()),
            exact_prefix_tokens=int(prompt.exact.sum()),
            fresh_tokens=tokens + 1 - int(prompt.reused.sum()),
            recomputed_tokens=recomputed,
            deviation=fusion.deviation.cpu(),
            selected=selected.tolist(),
            segment_starts=prompt.segment_starts,
            load_seconds=loaded - started,
            compute_seconds=time.perf_counter() - loaded,
            reasons=dict(prompt.reasons),
        )
        if add_missing:
            store.add(prompt.missing, progress=False)
        return blended

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


def _look_up(store: ChunkStore, segments: Sequence[Segment]) -> Prompt:
    if isinstance(segments, str) or not len(segments):
        raise ValueError("segments must be a list that ends with the question")
    ids = [store.token_ids(segment, f"segments[{i}]") for i, segment in enumerate(segments)]
    starts = [sum(map(len, ids[:i])) for i in range(len(ids))]
    flat = [token for segment in ids for token in segment]
    device, tokens = store.model.device, len(flat) - 1
    exact = torch.zeros(tokens, dtype=torch.bool, device=device)
    reused, reasons = exact.clone(), Counter()
    chunks: list[tuple[int, Chunk]] = []
    missing = []
    identity = model_identity(store.model)
    for i, (start, segment) in enumerate(zip(starts[:-1], ids[:-1], strict=True)):
        is_prefix = i == 0 and segment == store.prefix
        chunk, reason = store.get(store.key(segment, () if is_prefix else None, identity))
        if chunk is None:
            reasons[reason] += 1
            if not is_prefix:  # which the store adds by itself
                missing.append(segment)
            continue
        chunks.append((start, chunk))
        span = slice(start, start + len(segment))
        reused[span] = True
        exact[span] = tuple(flat[:start]) == chunk.key.prefix
    offsets = torch.cat([torch.arange(len(segment)) for segment in ids])[:-1].to(device)
    prompt_ids = torch.tensor([flat], device=device)
    return Prompt(prompt_ids, starts, chunks, exact, reused, offsets, reasons, missing)


def _doubt_other_tables(forward: PartialForward, prompt: Prompt) -> None:
    """A chunk in its real context is exact only if its rotary tables are the prompt's, too."""
    for start, chunk in prompt.chunks:
        span = slice(start, start + len(chunk.key.ids))
        if prompt.exact[span.start] and chunk.rotary != forward.rotary_digest(span.stop):
            prompt.exact[span] = False


def _place_chunks(model, forward: PartialForward, prompt: Prompt, fusion: Fusion) -> None:
    for i, rotation in enumerate(find_rotations(model)):
        cos, sin = forward.rotary_tables(i)
        for start, chunk in prompt.chunks:
            span = slice(start, start + chunk.keys[i].shape[2])
            keys, values = rotation.apply(
                chunk.keys[i], chunk.values[i], cos[:, span], sin[:, span]
            )
            fusion.layers[i].place(start, keys, values)


def _hand_on(layer, fused: BlendLayer) -> None:
    if fused.keys is None:
        return
    if type(layer) is DynamicLayer:
        layer.lazy_initialization(fused.keys, fused.values)
        layer.keys, layer.values = fused.keys, fused.values
    else:
        layer.update(fused.keys, fused.values)
