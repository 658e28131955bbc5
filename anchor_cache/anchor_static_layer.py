"""One layer of an AnchorStaticCache: fixed storage, an index of fixed size, steps without branches.

Whatever depends on the length is a tensor, and every Python value settles in the first steps, so
that ``torch.compile`` traces a decoding step once.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.utils import is_torchdynamo_compiling

from .anchor_config import AnchorConfig
from .block_choice import CachedTokens, choose_pieces
from .block_storage import GrowingStates
from .patches.attention import hand_over
from .patches.chosen_blocks import ChosenBlocks
from .patches.compat import tokens_to_keep, visible_row
from .refed_tokens import refuse_refed_tokens
from .retrieval_report import LayerRecord
from .selection import why_dense
from .static_index import StaticAnchorIndex
from .static_plan import StaticSizes
from .validation import require

BYPASSED = (
    "the model's attention did not get the cached keys themselves through transformers' attention "
    "interface (so it is with multi-head latent attention)"
)


class AnchorStaticLayer(StaticLayer):
    """One layer of an :class:`AnchorStaticCache`.

    Args:
        max_cache_len: tokens that it can hold.
        config: how to index and select.
        layer_idx: of the attention module whose layer this is.
    """

    def __init__(self, max_cache_len: int, config: AnchorConfig, layer_idx: int) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.config, self.layer_idx = config, layer_idx
        self.sizes = StaticSizes(config, max_cache_len)
        self.index: StaticAnchorIndex | None = None
        why = why_dense(config, max_cache_len)
        self.never_sparse = None if why is None else f"max_cache_len={max_cache_len}: {why}"
        self._reason: str | None = None  # why the last call could not be sparse
        self._is_shared = False  # whether another layer reads this one's keys
        self._awaiting = False  # whether the attention call of the last update has not come yet

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        batch, device = key_states.shape[0], key_states.device
        self._first = torch.zeros(batch, dtype=torch.int64, device=device)
        # Prefill calls and decoding steps; sparse steps, sparse rows of them, tokens that those
        # read, and the most that one read.
        self._calls = torch.zeros(2, dtype=torch.int64, device=device)
        self._read = torch.zeros(4, dtype=torch.int64, device=device)
        if self.never_sparse is None:
            self.index = StaticAnchorIndex(self.config, self.keys)
        self._hold_addresses()

    def _hold_addresses(self) -> None:
        """Let CUDA graphs, and the attention call, know the buffers."""
        if self.index is not None:
            hand_over(self, self.keys, {})
        if not is_torchdynamo_compiling():
            for states in self._states():
                torch._dynamo.mark_static_address(states)

    def _states(self) -> list[torch.Tensor]:
        index = [] if self.index is None else self.index.buffers
        return [
            self.keys,
            self.values,
            self.cumulative_length,
            self._first,
            self._calls,
            self._read,
            *index,
        ]

    def update(self, key_states, value_states, *args, **kwargs):
        """Append ``[B, H_kv, T, D]``; returns the whole buffers ``[B, H_kv, capacity, D]``.

        Raises:
            ValueError: several tokens that do not fit, or that the first layer holds already; found
                where they are not appended by a compiled graph.
        """
        if key_states.shape[2] > 1 and self.is_initialized and not is_torchdynamo_compiling():
            self._require_fit(key_states, value_states, kwargs)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self._calls[1 if key_states.shape[2] == 1 else 0].add_(1)
        self._awaiting = True
        return keys, values

    def _require_fit(self, key_states, value_states, kwargs: dict) -> None:
        length = int(self.cumulative_length)
        total = length + key_states.shape[2]
        allowed = f"the cache would have to hold {total} tokens; make a larger one"
        require(total <= self.max_cache_len, "max_cache_len", self.max_cache_len, allowed)
        if self.layer_idx == 0 and length:
            filled = DynamicLayer()
            filled.keys, filled.values = self.keys[:, :, :length], self.values[:, :, :length]
            filled.is_initialized = True
            refuse_refed_tokens(filled, key_states, value_states, kwargs)

    def read(self, module, query, keys, values, mask, kwargs) -> ChosenBlocks | None:
        """What ``query`` reads; called by the routed attention function."""
        if getattr(module, "layer_idx", None) != self.layer_idx:
            self._is_shared = True
            return None
        # Some models call attention twice for one update; their second call is not another step.
        is_first_call, self._awaiting = self._awaiting, False
        reason = self._why_dense(query, values, mask, kwargs)
        if reason != self._reason:
            self._reason = reason
        if reason is not None:
            return None
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            if query.shape[2] > 1:
                self._index_everything(query.shape[0], mask)
                return None
            return self._choose(query, keys, values, mask, kwargs, is_first_call)

    def _why_dense(self, query, values, mask, kwargs) -> str | None:
        if values.shape[:3] != self.keys.shape[:3]:
            return "the values are not those of the cached keys"
        if kwargs.get("sliding_window") is not None:
            return "sliding-window layer"
        if mask is None and query.shape[2] == 1:
            return "attention without a mask"
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
            return "flash or flex attention"
        if mask is not None and mask.shape[1] > 1:
            return "the mask differs between heads"
        if kwargs.get("position_bias") is not None:
            return "attention with a position bias"
        return None

    def _index_everything(self, batch: int, mask: torch.Tensor | None) -> None:
        if mask is None:
            places = torch.arange(self.max_cache_len, device=self.keys.device)
            visible = (places < self.cumulative_length).expand(batch, -1)
        else:
            visible = visible_row(mask, batch, self.max_cache_len)
        self._first.copy_(visible.to(torch.uint8).argmax(1))
        self.index.build(self.keys, self._first % self.config.block_size, visible)

    def _choose(self, query, keys, values, mask, kwargs, is_first_call: bool) -> ChosenBlocks:
        length = self.cumulative_length
        plan = self.sizes.plan(length, self._first)
        visible = visible_row(mask, query.shape[0], self.max_cache_len)
        # The newest complete block of each row, whether or not it was complete before.
        newest = (length - plan.shifts) // self.config.block_size - 1
        self.index.rebuild(self.keys, plan.shifts, visible, newest.clamp(min=0))
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        tokens = CachedTokens(
            query=query[:, :, 0].to(keys.dtype) * scaling,
            keys=GrowingStates.around(keys),
            values=GrowingStates.around(values),
            visible=visible,
            scaling=1.0,
            softcap=kwargs.get("softcap"),
        )
        choice = choose_pieces(self.index, tokens, plan)
        pieces = choice.pieces.masked_fill(~choice.valid, -1)
        ends = plan.ends.unsqueeze(1).expand(-1, pieces.shape[1], -1)
        if is_first_call:
            self._count(plan.is_sparse, plan.attended)
        return ChosenBlocks(
            torch.cat((ends, pieces), 2), plan.piece, plan.shifts, visible, length, mask
        )

    def _count(self, is_sparse: torch.Tensor, attended: torch.Tensor) -> None:
        attended = attended * is_sparse
        self._read[:3] += torch.stack((is_sparse.any().long(), is_sparse.sum(), attended.sum()))
        self._read[3:].clamp_(min=attended.max())

    # -- the rest of the cache surface -------------------------------------------------------

    def reset(self) -> None:
        """Forget everything, the record of past steps too; the buffers stay."""
        super().reset()
        if self.is_initialized:
            for states in (self._first, self._calls, self._read):
                states.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from the end; a positive value is, as in older
        transformers, the length to keep."""
        if self.is_initialized:
            length = tokens_to_keep(int(self.cumulative_length), tokens_to_remove)
            self.cumulative_length.fill_(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows, in place: compiled steps know the buffers by their addresses."""
        if not self.is_initialized:
            return
        index = [] if self.index is None else self.index.buffers
        for states in (self.keys, self.values, self._first, *index):
            states.copy_(states.index_select(0, beam_idx.to(states.device)))

    def __getstate__(self) -> dict:
        state = dict(vars(self))
        if self.is_initialized:  # without what the attention call knows this very layer by
            state["keys"] = self.keys.detach()
        return state

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        if self.is_initialized:
            self._hold_addresses()

    def record(self) -> LayerRecord:
        """What this layer did so far; waits for the device."""
        record = LayerRecord()
        if not self.is_initialized:
            return record
        record.prefill_steps, decoded = self._calls.tolist()
        record.sparse_steps, rows, attended, record.max_attended = self._read.tolist()
        record.attended = record.sparse_steps * attended / max(rows, 1)
        record.dense_steps = decoded - record.sparse_steps
        reason = self.never_sparse or (BYPASSED if self.is_bypassed else self._reason)
        if record.dense_steps:
            record.reasons[reason or f"context within the budget of {self.config.budget}"] = (
                record.dense_steps
            )
        if self._is_shared and decoded:
            record.reasons["the layer reads the cache of another layer"] = decoded
        return record

    @property
    def is_bypassed(self) -> bool:
        """Whether the attention call of the last update did not come here."""
        return self._awaiting and self.never_sparse is None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the buffers of keys and values."""
        if not self.is_initialized:
            return 0
        return sum(states.numel() * states.element_size() for states in (self.keys, self.values))

    @property
    def index_bytes(self) -> int:
        """Bytes of anchors and sketches."""
        return 0 if self.index is None else self.index.nbytes
