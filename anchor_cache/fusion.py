"""The cache that a model's layers see while chosen tokens of a prompt are recomputed over keys and
values that were joined from chunks."""

from __future__ import annotations

import copy
import time

import torch

from .chunk_loading import LayerLoader
from .kernels import ops
from .patches.attention import additive_mask, hand_over, hold_routing
from .patches.partial_forward import PartialForward, StopForward
from .patches.row_groups import RowGroups, RowsInPlace

# Rows that attend together on a CPU: more waste work on keys that most of them do not see, fewer
# spend it on the overhead of calls.
_GROUP_ROWS = 64


class BlendLayer:
    """Keys and values of all tokens of one layer, ``[1, H_kv, T, D]``."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def scatter(
        self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, measured: str
    ) -> torch.Tensor | None:
        """Copy ``[1, H_kv, R, D]`` to the positions ``rows``.

        Returns:
            How far each is from what was there, ``[R]`` in fp32: the deviation of the "values", of
            the "keys" or of "both", as ``measured`` says; None if nothing was there.
        """
        known = self.keys is not None
        if not known:
            self.keys = keys.new_zeros((*keys.shape[:2], self.tokens, keys.shape[3]))
            self.values = values.new_zeros((*values.shape[:2], self.tokens, values.shape[3]))
        total = 0.0
        for name, fresh, held in (("keys", keys, self.keys), ("values", values, self.values)):
            if known and measured in (name, "both"):
                total = total + ops.replace_tokens(held, fresh, rows)[0].square()
            else:
                held.index_copy_(2, rows, fresh)
        return total.sqrt() if known else None


class Fusion:
    """Fresh rows are scattered among the reused ones and compared with them; every layer then
    attends to all of it.

    Args:
        loader: brings the reused keys and values of each layer.
        layers: of the model.
        tokens: of the prompt, the last one left out.
        reused: which tokens ``[T]`` are compared with what was stored.
        measure: the deviation is that of "values", "keys" or "both".
    """

    def __init__(
        self, loader: LayerLoader, layers: int, tokens: int, reused: torch.Tensor, measure: str
    ) -> None:
        self.layers = [BlendLayer(tokens) for _ in range(layers)]
        self.deviation = torch.full((layers, tokens), float("nan"), device=reused.device)
        self.attention = torch.zeros(tokens, device=reused.device)
        self.heard: set[int] = set()
        self.trace: list[tuple[str, int, float, float]] = loader.trace
        self.loader, self._reused, self._measured = loader, reused, measure
        self._rows: torch.Tensor | None = None
        self._masks: dict[int, tuple] = {}
        self._stop = self._listening = False
        hold_routing(self)

    def loaded(self, layer: int) -> BlendLayer:
        """The layer, with its reused keys and values in place."""
        held = self.layers[layer]
        if held.keys is None and (states := self.loader.take(layer)) is not None:
            held.keys, held.values = states
        return held

    def branch(self) -> Fusion:
        """A copy that may be computed with, to see what would come out."""
        other = copy.copy(self)
        other.layers = [BlendLayer(layer.tokens) for layer in self.layers]
        for i, layer in enumerate(other.layers):
            if (held := self.loaded(i)).keys is not None:
                layer.keys, layer.values = held.keys.clone(), held.values.clone()
        other.deviation = self.deviation.clone()
        return other

    def run(
        self,
        forward: PartialForward,
        layer: int,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        what: str = "recompute",
        *,
        stop: bool = False,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run ``rows`` through a layer; see :meth:`PartialForward.run`.

        Args:
            what: the name of this in the trace; "listen" adds up what the rows attend to.
            stop: compute keys and values, and nothing after them.
        """
        self.loaded(layer)
        if rows is not self._rows:
            self._rows, self._masks = rows, {}
        self._stop, self._listening = stop, what == "listen"
        started = time.perf_counter()
        hidden = forward.run(layer, hidden, rows, self, visible=visible)
        self.trace.append((what, layer, started, time.perf_counter()))
        return hidden

    def run_through(self, forward: PartialForward, rows: torch.Tensor, what: str, **kwargs) -> None:
        """Run the same rows through all layers; arguments as for :meth:`run`."""
        hidden = forward.embedded.index_select(1, rows)
        for layer in range(forward.layers):
            hidden = self.run(forward, layer, hidden, rows, what, **kwargs)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        deviation = layer.scatter(key_states, value_states, self._rows, self._measured)
        if deviation is not None:
            known = self.deviation[layer_idx]
            first_time = self._reused[self._rows] & known[self._rows].isnan()
            known[self._rows] = torch.where(first_time, deviation, known[self._rows])
        if self._stop:
            raise StopForward
        keys = layer.keys[:]  # the layer's own tensor must not carry the hand-over
        hand_over(self, keys, kwargs)
        return keys, layer.values

    def read(self, module, query, keys, values, mask, kwargs) -> RowGroups | RowsInPlace | None:
        """Called by the routed attention function: notes what a listening question attends to,
        and says how the rows are best gone over."""
        reading, limits = None, {}
        if mask is not None:
            pattern = getattr(mask, "pattern", None)
            own = {"mask": mask, "positions": self._rows}
            limits = own if pattern is None else pattern._asdict()
            if ops.attend_rows.fast_for(query, keys, values, **limits) is not None:
                reading = RowsInPlace(limits, mask)
            elif query.device.type == "cpu":
                additive, reading = self._prepared(mask, query)
                limits = {"mask": additive}
        if self._listening:
            self.heard.add(module.layer_idx)
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            softcap = kwargs.get("softcap")
            self.attention += ops.attention_received(
                query, keys, scaling, softcap=softcap, **limits
            )
        return reading

    def _prepared(self, mask: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, RowGroups]:
        """The mask in the form that is fastest to add, and groups of the rows; made once for all
        layers that share the mask."""
        if id(mask) not in self._masks:
            additive = additive_mask(mask, query.dtype) if mask.dtype == torch.bool else mask[:]
            groups = RowGroups.of(self._rows.tolist(), _GROUP_ROWS, additive)
            self._masks[id(mask)] = mask, additive, groups
        return self._masks[id(mask)][1:]
