"""A cache for RAG prompts, joined from stored chunks and selectively recomputed (CacheBlend)."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .chunk_store import Chunk, ChunkStore, Segment, require_eval
from .config import BlendConfig
from .kernels import ops
from .patches.attention import hand_over, hold_routing
from .patches.partial_forward import PartialForward, StopForward
from .report import BlendReport
from .rope import find_rotations
from .token_selectors import SELECTORS, Candidates


@dataclasses.dataclass
class _Prompt:
    """Where every token's KV come from."""

    ids: torch.Tensor  # [1, T + 1], the last one is left to generate
    segment_starts: list[int]
    chunks: list[tuple[int, Chunk]]  # first position, stored chunk
    exact: torch.Tensor  # [T] stored context is the real one
    reused: torch.Tensor  # [T] exact ones included
    offsets: torch.Tensor  # [T] place in the own segment
    reasons: Counter
    missing: list[Sequence[int]]


class BlendLayer:
    """Keys and values of all tokens of one layer while they are blended: ``update`` scatters the
    rows that are computed among the reused ones and returns everything."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def place(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``[1, H_kv, T, D]`` to the positions from ``start`` on."""
        self._allocate(keys, values)
        span = slice(start, start + keys.shape[2])
        self.keys[:, :, span] = keys
        self.values[:, :, span] = values

    def scatter(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``[1, H_kv, R, D]`` to the positions ``rows``."""
        self._allocate(keys, values)
        self.keys.index_copy_(2, rows, keys)
        self.values.index_copy_(2, rows, values)

    def _allocate(self, keys, values) -> None:
        if self.keys is None:
            self.keys = keys.new_zeros((*keys.shape[:2], self.tokens, keys.shape[3]))
            self.values = values.new_zeros((*values.shape[:2], self.tokens, values.shape[3]))


class _Fusion:
    """The cache that the model's layers see during a blend."""

    def __init__(self, layers: int, tokens: int, reused: torch.Tensor, measure: str) -> None:
        self.layers = [BlendLayer(tokens) for _ in range(layers)]
        self.reused, self.measure = reused, measure
        self.deviation = torch.full((layers, tokens), float("nan"), device=reused.device)
        self.attention = torch.zeros(tokens, device=reused.device)
        self.heard: set[int] = set()
        self.rows: torch.Tensor | None = None
        self.stop = self.listening = False

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        if layer.keys is not None:
            self._measure(layer_idx, key_states, value_states)
        layer.scatter(key_states, value_states, self.rows)
        if self.stop:
            raise StopForward
        if self.listening:
            keys = layer.keys[:]
            hand_over(self, keys, kwargs)
            return keys, layer.values
        return layer.keys, layer.values

    def read(self, module, query, keys, mask, kwargs) -> None:
        """Note what the rows attend to; called by the routed attention function."""
        self.heard.add(module.layer_idx)
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        self.attention += ops.attention_received(query, keys, scaling, mask, kwargs.get("softcap"))

    def _measure(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        layer, total = self.layers[layer_idx], 0.0
        for name, fresh, held in (("keys", keys, layer.keys), ("values", values, layer.values)):
            if self.measure in (name, "both"):
                deviation = ops.token_deviation(fresh, held.index_select(2, self.rows))[0]
                total = total + deviation.square()
        first_time = self.reused[self.rows] & self.deviation[layer_idx, self.rows].isnan()
        rows = self.rows[first_time]
        self.deviation[layer_idx, rows] = total.sqrt()[first_time]


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

        Stored keys are rotated to their final positions. All tokens pass the layers before
        ``check_layer``; there the fresh keys and values are compared with the stored ones, and
        from there on only the question, missing chunks and the selected tokens are computed, each
        attending to everything before it. Chunks in the store are never changed.

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
        fusion = _Fusion(depth, tokens, prompt.reused & ~prompt.exact, config.deviation)
        if forward is not None:
            _place_chunks(model, forward, prompt, fusion)
        loaded = time.perf_counter()
        selected, recomputed = prompt.exact.new_zeros(0, dtype=torch.long), [0] * depth
        if forward is not None:
            selected, recomputed = _recompute(forward, prompt, fusion, config)
        for layer, fused in zip(blended.layers, fusion.layers, strict=True):
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
        if add_missing and prompt.missing:
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


def _look_up(store: ChunkStore, segments: Sequence[Segment]) -> _Prompt:
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
    for i, (start, segment) in enumerate(zip(starts[:-1], ids[:-1], strict=True)):
        is_prefix = i == 0 and segment == store.prefix
        chunk, reason = store.get(store.key(segment, () if is_prefix else None))
        if chunk is None:
            reasons[reason] += 1
            missing.append(segment)
            continue
        chunks.append((start, chunk))
        span = slice(start, start + len(segment))
        reused[span] = True
        exact[span] = tuple(flat[:start]) == chunk.key.prefix
    offsets = torch.cat([torch.arange(len(segment)) for segment in ids])[:-1].to(device)
    prompt_ids = torch.tensor([flat], device=device)
    return _Prompt(prompt_ids, starts, chunks, exact, reused, offsets, reasons, missing)


def _doubt_other_tables(forward: PartialForward, prompt: _Prompt) -> None:
    """A chunk in its real context is exact only if its rotary tables are the prompt's, too."""
    for start, chunk in prompt.chunks:
        span = slice(start, start + len(chunk.key.ids))
        if prompt.exact[span.start] and chunk.rotary != forward.rotary_digest(span.stop):
            prompt.exact[span] = False


def _place_chunks(model, forward: PartialForward, prompt: _Prompt, fusion: _Fusion) -> None:
    for i, rotation in enumerate(find_rotations(model)):
        cos, sin = forward.rotary_tables(i)
        for start, chunk in prompt.chunks:
            span = slice(start, start + chunk.keys[i].shape[2])
            keys, values = rotation.apply(
                chunk.keys[i], chunk.values[i], cos[:, span], sin[:, span]
            )
            fusion.layers[i].place(start, keys, values)


def _recompute(
    forward: PartialForward, prompt: _Prompt, fusion: _Fusion, config: BlendConfig
) -> tuple[torch.Tensor, list[int]]:
    """Run the layers; returns the positions recomputed to the last layer and the number of reused
    tokens recomputed per layer."""
    positions = torch.arange(forward.tokens, device=prompt.ids.device)
    candidates = positions[fusion.reused]
    selector = SELECTORS[config.selector]()
    wanted = selector.count(config.recompute_ratio, len(candidates))
    fresh = ~prompt.reused
    offered = Candidates(prompt.offsets[candidates], wanted)
    if wanted in (0, len(candidates)):
        selected = candidates[:wanted]
    elif selector.signal == "deviation":
        rows = positions[~prompt.exact]
        hidden = forward.embedded.index_select(1, rows)
        for layer in range(config.check_layer):
            hidden = _run(forward, layer, hidden, rows, fusion)
        _run(forward, config.check_layer, hidden, rows, fusion, stop=True)
        deviation = fusion.deviation[config.check_layer, candidates]
        best = selector.select(dataclasses.replace(offered, signal=deviation))
        selected = candidates[best]
        kept = fresh[rows] | torch.isin(rows, selected)
        _run_from(forward, config.check_layer, hidden[:, kept], rows[kept], fusion)
        full = [len(candidates)] * (config.check_layer + 1)
        return selected, full + [wanted] * (forward.layers - len(full))
    else:
        if selector.signal == "attention":
            _listen(forward, prompt, fusion)
            offered = dataclasses.replace(offered, signal=fusion.attention[candidates])
        selected = candidates[selector.select(offered)]
    rows = positions[fresh | torch.isin(positions, selected)]
    _run_from(forward, 0, forward.embedded.index_select(1, rows), rows, fusion)
    return selected, [len(selected)] * forward.layers


def _run(forward, layer, hidden, rows, fusion, stop=False, visible=None):
    fusion.rows, fusion.stop = rows, stop
    return forward.run(layer, hidden, rows, fusion, visible=visible)


def _run_from(forward, first, hidden, rows, fusion) -> None:
    """Run rows to the last layer, of which only keys and values are needed."""
    for layer in range(first, forward.layers if len(rows) else first):
        hidden = _run(forward, layer, hidden, rows, fusion, stop=layer == forward.layers - 1)


def _listen(forward: PartialForward, prompt: _Prompt, fusion: _Fusion) -> None:
    """Run the question alone over the reused cache and note what it attends to."""
    hold_routing(fusion)
    question = torch.arange(prompt.segment_starts[-1], forward.tokens, device=prompt.ids.device)
    if not len(question):
        return
    visible = prompt.reused.clone()
    visible[question] = True
    fusion.listening = True
    hidden = forward.embedded.index_select(1, question)
    for layer in range(forward.layers):
        hidden = _run(forward, layer, hidden, question, fusion, visible=visible)
    fusion.listening = False
    deaf = sorted(set(range(forward.layers)) - fusion.heard)
    if deaf:
        prompt.reasons[f"question's attention not seen in layers {deaf}"] += 1


def _hand_on(layer, fused: BlendLayer) -> None:
    if fused.keys is None:
        return
    if type(layer) is DynamicLayer:
        layer.lazy_initialization(fused.keys, fused.values)
        layer.keys, layer.values = fused.keys, fused.values
    else:
        layer.update(fused.keys, fused.values)
