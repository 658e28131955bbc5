"""Recomputing chosen tokens of a prompt over keys and values that were joined from chunks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch

from .blend_config import BlendConfig
from .chunk_store import Chunk
from .kernels import ops
from .patches.attention import hand_over, hold_routing
from .patches.partial_forward import PartialForward, StopForward
from .token_selectors import SELECTORS, Candidates


@dataclasses.dataclass
class Prompt:
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


class Fusion:
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

    def read(self, module, query, keys, values, mask, kwargs) -> None:
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


def recompute(
    forward: PartialForward, prompt: Prompt, fusion: Fusion, config: BlendConfig
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


def _listen(forward: PartialForward, prompt: Prompt, fusion: Fusion) -> None:
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
