"""One layer of an AnchorDynamicCache: storage, index, and what each step reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicLayer

from .anchor_config import AnchorConfig
from .anchor_index import AnchorIndex
from .block_choice import CachedTokens
from .block_reader import BlockReader
from .block_storage import GrowingStates
from .memory_tiers import new_storage
from .misplaced_tokens import warn_of_misplaced_tokens
from .patches.attention import hand_over
from .patches.compat import tokens_to_keep, visible_keys
from .patches.readings import BlockReading, Reading
from .retrieval_report import LayerRecord
from .selection import StepPlan, plan_step

_BYPASSED = (
    "the model's attention did not pass through transformers' attention interface with the cached "
    "keys"
)


class AnchorLayer(DynamicLayer):
    """One layer of an :class:`AnchorDynamicCache`: all keys and values in growing storage, and a
    reader that finds the blocks of them that a query needs.
    """

    def __init__(self, config: AnchorConfig | None = None) -> None:
        self.config = config or AnchorConfig()
        self._forget()
        super().__init__()  # makes the storage, by setting keys and values to None

    def _forget(self) -> None:
        self.reader = BlockReader(self.config)
        self.record = LayerRecord()
        self.module_idx: int | None = None
        self._awaiting = 0  # tokens of the last update whose attention call has not come yet
        self._given = (None, None)  # what the last update returned

    @property
    def index(self) -> AnchorIndex | None:
        """The anchors, once a sparse step needed them."""
        return self.reader.index

    # -- keys and values ---------------------------------------------------------------------

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, ``[B, H_kv, L, D]``. Assigning replaces them."""
        return None if self._keys.is_empty else self._keys.states

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._keys = new_storage(self.config) if states is None else self._assigned(states)
        self.reader.keys_changed()

    @property
    def values(self) -> torch.Tensor | None:
        """All values, ``[B, H_kv, L, D_v]``. Assigning replaces them."""
        return None if self._values.is_empty else self._values.states

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._values = new_storage(self.config) if states is None else self._assigned(states)
        self.reader.keys_changed()

    def _assigned(self, states: torch.Tensor) -> GrowingStates:
        if not self.is_initialized:
            self.lazy_initialization(states, states)
        storage = new_storage(self.config)
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
        try:
            self._values.append(value_states)
        except BaseException:
            self._keys.truncate(self._values.length)
            raise
        self._awaiting = key_states.shape[2]
        keys, values = self._to_attend(key_states.shape[2])
        self._given = identity(keys), identity(values)
        hand_over(self, keys, kwargs)
        return keys, values

    def _to_attend(self, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that ``update`` returns after ``new_tokens`` were appended."""
        return self._keys.states, self._values.states

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
    def read(self, module, query, keys, values, mask, kwargs) -> Reading | BlockReading | None:
        """What ``query`` reads; called by the routed attention function."""
        if self.module_idx is None:
            self.module_idx = getattr(module, "layer_idx", None)
        if getattr(module, "layer_idx", None) != self.module_idx:
            if query.shape[2] == 1:
                self.record.reasons["the layer reads the cache of another layer"] += 1
            return None
        # Some models call attention twice for one update; their second call is not another step.
        is_first_call = bool(self._awaiting)
        record = self.record if is_first_call else LayerRecord()
        self._awaiting = 0
        reason = self._why_dense(keys, values, mask, kwargs)
        if reason is None:
            self.reader.observe(query, self._keys.length)
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
        plan = plan_step(self.config, self._keys.length, paddings, query.device)
        tokens = CachedTokens(
            query[:, :, 0].to(keys.dtype),
            self._keys,
            # A model may attend to values made of the stored ones (differential attention does).
            self._values if identity(values) == self._given[1] else GrowingStates.around(values),
            None if visible is None else visible.tokens,
            kwargs.get("scaling") or query.shape[-1] ** -0.5,
            kwargs.get("softcap"),
        )
        device = query.device.type  # both contexts take longer to enter than to ask for
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if not (casts or torch.is_grad_enabled()):
            return self._read_sparsely(tokens, plan, mask, record, is_first_call)
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return self._read_sparsely(tokens, plan, mask, record, is_first_call)

    def _read_sparsely(self, tokens: CachedTokens, plan: StepPlan, mask, record, is_first_call):
        self.reader.refresh_perspectives(tokens)
        if plan.dense_reason is not None:
            record.dense(plan.dense_reason)
            return None
        return self.reader.read(tokens, plan, mask, record, is_first_call)

    def _why_dense(self, keys, values, mask, kwargs) -> str | None:
        if identity(keys) != self._given[0] or values.shape[:3] != keys.shape[:3]:
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
        self.reader.truncate(length)
        self._awaiting = 0

    def reset(self) -> None:
        """Forget everything, the record of past steps too."""
        self.keys = self.values = None
        self.is_initialized = False
        self._forget()

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._keys.map_(change)
        self._values.map_(change)
        self.reader.map_(change)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._map(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        indices = torch.as_tensor(indices)
        self._map(lambda states: states[indices.to(states.device)])

    def _move(self, device: torch.device | str) -> None:
        self._keys.move_(device)
        self._values.move_(device)
        self.reader.map_(lambda states: states.to(device, non_blocking=True))

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def state_dict(self) -> dict:
        """What a copy of this layer needs, as tensors and plain values; the index follows from it.
        Past steps are not part of it."""
        perspectives = self.reader.perspectives
        return {
            "keys": None if self._keys.is_empty else self._keys.in_memory(),
            "values": None if self._values.is_empty else self._values.in_memory(),
            "perspectives": None if perspectives is None else perspectives.state_dict(),
            "module_idx": self.module_idx,
            "device": self.device if self.is_initialized else None,
        }

    def load_state_dict(self, state: dict) -> None:
        """The inverse of :meth:`state_dict`, on a new layer."""
        if state["keys"] is not None:
            # An offloaded cache keeps them elsewhere than the model is.
            self.keys, self.values = (
                state[name].to(state["device"]) for name in ("keys", "values")
            )
        if self.reader.perspectives is not None and state["perspectives"] is not None:
            self.reader.perspectives.load_state_dict(state["perspectives"])
        self.module_idx = state["module_idx"]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the stored keys and values."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of anchors, sketches, and what else is kept to choose blocks."""
        return self.reader.nbytes


def identity(states: torch.Tensor) -> tuple:
    """What tells the very tensors that ``update`` returned from others made of them."""
    return states.data_ptr(), states.dtype, states.shape, states.stride()
