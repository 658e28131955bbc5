"""One layer of an AnchorDynamicCache: storage, index, and what each step reads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicLayer

from .anchor_index import AnchorIndex
from .anchors import builder_of
from .audit import audit_step
from .block_choice import CachedTokens, choose_blocks
from .block_storage import GrowingStates
from .certificate import read_until_certain
from .config import AnchorConfig
from .misplaced_tokens import warn_of_misplaced_tokens
from .patches.attention import Reading, hand_over
from .patches.compat import tokens_to_keep, visible_keys
from .perspectives import Perspectives
from .retrieval_report import LayerRecord
from .selection import StepPlan, plan_step
from .token_reading import Selection, reading_of, select_tokens, with_skipped_means

_BYPASSED = (
    "the model's attention did not pass through transformers' attention interface with the cached "
    "keys"
)


class AnchorLayer(DynamicLayer):
    """One layer of an :class:`AnchorDynamicCache`: all keys and values in a growing buffer, and an
    index of anchors that follows from them.

    The index is derived state. Appending extends it; whatever else changes the keys either changes
    the index alike or drops it, and the next sparse step builds it anew.
    """

    def __init__(self, config: AnchorConfig | None = None) -> None:
        self._keys, self._values = GrowingStates(), GrowingStates()
        super().__init__()
        self.config = config or AnchorConfig()
        self._forget()

    def _forget(self) -> None:
        config = self.config
        self.perspectives: Perspectives | None = None
        if builder_of(config.builder).query_dependent:
            by_query_head = config.anchor_heads == "query"
            self.perspectives = Perspectives(config.anchors_per_head, by_query_head)
        self.index: AnchorIndex | None = None
        self._selection: Selection | None = None
        self._serves = 0  # steps that the selection is still to be used for
        self.record = LayerRecord()
        self.module_idx: int | None = None
        self._awaiting = 0  # tokens of the last update whose attention call has not come yet

    # -- keys and values ---------------------------------------------------------------------

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, ``[B, H_kv, L, D]``. Assigning replaces them."""
        return None if self._keys.is_empty else self._keys.states

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._keys = GrowingStates() if states is None else self._assigned(states)
        self.index = self._selection = None

    @property
    def values(self) -> torch.Tensor | None:
        """All values, ``[B, H_kv, L, D_v]``. Assigning replaces them."""
        return None if self._values.is_empty else self._values.states

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._values = GrowingStates() if states is None else self._assigned(states)

    def _assigned(self, states: torch.Tensor) -> GrowingStates:
        if not self.is_initialized:
            self.lazy_initialization(states, states)
        storage = GrowingStates()
        storage.append(states)
        return storage

    def lazy_initialization(self, key_states, value_states) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Append ``[B, H_kv, T, D]``; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.note_unread_step()
        self._keys.append(key_states)
        self._values.append(value_states)
        self._awaiting = key_states.shape[2]
        keys = self._keys.states
        hand_over(self, keys, kwargs)
        return keys, self._values.states

    def note_unread_step(self) -> None:
        """Record a decoding step whose query never came, if the last one was such."""
        if self._awaiting == 1:
            if _BYPASSED not in self.record.reasons:
                warnings.warn(
                    f"AnchorDynamicCache stays dense: {_BYPASSED}; anchor_attention(model) tells "
                    "whether a model is supported",
                    stacklevel=4,
                )
            self.record.dense(_BYPASSED)
        self._awaiting = 0

    def get_seq_length(self) -> int:
        return self._keys.length

    # -- attention ---------------------------------------------------------------------------

    @torch.compiler.disable
    def read(self, module, query, keys, values, mask, kwargs) -> Reading | None:
        """What ``query`` reads; called by the routed attention function."""
        if self.module_idx is None:
            self.module_idx = getattr(module, "layer_idx", None)
        if getattr(module, "layer_idx", None) != self.module_idx:
            if query.shape[2] == 1:
                self.record.reasons["the layer reads the cache of another layer"] += 1
            return None
        # Some models call attention twice for one update; their second call is not another step.
        record = self.record if self._awaiting else LayerRecord()
        self._awaiting = 0
        reason = self._why_dense(keys, values, mask, kwargs)
        if reason is None and self.perspectives is not None:
            self.perspectives.observe(query, self._keys.length)
        if query.shape[2] > 1:
            record.prefill_steps += 1
            if self._keys.length > query.shape[2]:
                record.reasons["several tokens appended at once are exact, and dense"] += 1
                if mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 4):
                    places, (batch, _, fed, _) = kwargs.get("position_ids"), query.shape
                    warn_of_misplaced_tokens(mask, places, batch, fed, self._keys.length)
            return None
        if reason is not None:
            record.dense(reason)
            return None

        visible = visible_keys(mask, query.shape[0], self._keys.length)
        paddings = (0,) if visible is None else visible.first
        tokens = CachedTokens(
            query[:, :, 0].to(keys.dtype),
            self._keys,
            # A model may attend to values made of the stored ones (differential attention does).
            self._values if self._values.are(values) else GrowingStates.around(values),
            None if visible is None else visible.tokens,
            kwargs.get("scaling") or query.shape[-1] ** -0.5,
            kwargs.get("softcap"),
        )
        plan = plan_step(self.config, self._keys.length, paddings, query.device)
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            self._refresh_perspectives(tokens)
            if plan.dense_reason is not None:
                record.dense(plan.dense_reason)
                return None
            self._bring_index_up_to(plan, tokens, paddings)
            return self._read_blocks(tokens, plan, mask, record)

    def _refresh_perspectives(self, tokens: CachedTokens) -> None:
        # At every decoding step, dense ones too: what is learned must not depend on when a row of
        # a batch first grows beyond its budget.
        if self.perspectives is not None:
            n_kv_heads = self._keys.states.shape[1]
            if self.perspectives.refresh(tokens.visible, n_kv_heads, tokens.scaling):
                self.index = None

    def take_queries_from(self, layer: DynamicLayer) -> None:
        """Learn perspectives from the queries that another layer has kept, if it has."""
        kept = getattr(layer, "perspectives", None)
        if kept is not None and self.perspectives is not None:
            self.perspectives.recent = copy.deepcopy(kept.recent)

    def _bring_index_up_to(self, plan: StepPlan, tokens: CachedTokens, paddings) -> None:
        if self.index is None or self.index.paddings != paddings:
            centres = None if self.perspectives is None else self.perspectives.centres
            self.index = AnchorIndex(self.config, centres, paddings, tokens.scaling)
        if self.index.blocks < plan.last_candidate:
            self.index.extend(tokens.keys, tokens.values, tokens.visible)

    def _read_blocks(self, tokens: CachedTokens, plan: StepPlan, mask, record) -> Reading | None:
        """Choose blocks, or use the last choice again, and gather their tokens."""
        config, last = self.config, self._selection
        if last is not None and self._serves and last.length == self._keys.length - 1:
            selection = last.grown_to(self._keys.length, tokens.visible)
            self._serves -= 1
        else:
            choice = choose_blocks(self.index, tokens, plan)
            if config.tolerance is not None:
                choice, skipped = read_until_certain(self.index, tokens, plan, choice)
                record.skipped_share = max(record.skipped_share or 0.0, float(skipped.max()))
                if choice is None:
                    record.dense("the tolerance could only be proven by reading everything")
                    return None
            selection = select_tokens(choice, tokens, plan, config)
            self._serves = config.reselect_every - 1
        if record is self.record and config.reselect_every > 1:
            self._selection = selection
        record.sparse(selection.counts)
        if len(plan.attended) < len(plan.rows):
            record.reasons["rows of a batch that alone would be dense read everything"] += 1
        reading = reading_of(selection, tokens, mask)
        if config.skipped == "mean":
            reading = with_skipped_means(reading, self.index, selection.choice, plan, tokens.query)
        if config.audit_every and self.record.sparse_steps % config.audit_every == 0:
            audit = audit_step(selection, tokens, plan, config)
            record.audits.append(audit)
            reading = reading._replace(compare=audit.compare)
        return reading

    def _why_dense(self, keys, values, mask, kwargs) -> str | None:
        if not self._keys.are(keys) or values.shape[:3] != keys.shape[:3]:
            return "keys are made of the cached ones (as in multi-head latent attention)"
        if kwargs.get("sliding_window") is not None:
            return "sliding-window layer"
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
            return "padding with flash or flex attention"
        if mask is not None and mask.shape[1] > 1:
            return "the mask differs between heads"
        if kwargs.get("position_bias") is not None:
            return "attention with a position bias"
        return None

    # -- the rest of the cache surface -------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from the end; a positive value is, as in older
        transformers, the length to keep."""
        length = tokens_to_keep(self._keys.length, tokens_to_remove)
        self._keys.truncate(length)
        self._values.truncate(length)
        if self.perspectives is not None:
            self.perspectives.recent.truncate(length)
        self._selection = None
        self._awaiting = 0
        if self.index is not None:
            self.index.truncate(length)

    def reset(self) -> None:
        """Forget everything, the record of past steps too."""
        self.keys = self.values = None
        self.is_initialized = False
        self._forget()

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._keys.map_(change)
        self._values.map_(change)
        for derived in (self.perspectives, self.index):
            if derived is not None:
                derived.map_(change)
        if self._selection is not None:
            self._selection = self._selection.map(change)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._map(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        indices = torch.as_tensor(indices)
        self._map(lambda states: states[indices.to(states.device)])

    def offload(self) -> None:
        self._map(lambda states: states.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map(lambda states: states.to(self.device, non_blocking=True))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the stored keys and values."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of anchors, sketches, and what else is kept to choose blocks."""
        return sum(part.nbytes for part in (self.perspectives, self.index) if part is not None)
