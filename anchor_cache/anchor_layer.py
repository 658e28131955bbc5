"""One layer of an AnchorDynamicCache: storage, index, and what each step reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicLayer

from .anchor_index import AnchorIndex, RecentQueries
from .anchors import BUILDERS
from .block_storage import GrowingStates
from .config import AnchorConfig
from .kernels import ops
from .memory_tiers import new_storage
from .patches.attention import Reading, hand_over
from .patches.compat import tokens_to_keep, visible_keys
from .report import Audit, LayerRecord
from .selection import StepPlan, plan_step

_BYPASSED = "the model's attention did not pass through transformers' attention interface"


class AnchorLayer(DynamicLayer):
    """One layer of an :class:`AnchorDynamicCache`: all keys and values in a growing buffer, and an
    index of anchors that follows from them.

    The index is derived state. Appending extends it; whatever else changes the keys either changes
    the index alike or drops it, and the next sparse step builds it anew.
    """

    def __init__(self, config: AnchorConfig | None = None) -> None:
        self.config = config or AnchorConfig()
        self._keys, self._values = new_storage(self.config), new_storage(self.config)
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        self.recent = RecentQueries()
        self.index: AnchorIndex | None = None
        self.record = LayerRecord()
        self.module_idx: int | None = None
        self._had_prompt = False
        self._awaiting = 0  # tokens of the last update whose attention call has not come yet

    # -- keys and values ---------------------------------------------------------------------

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, ``[B, H_kv, L, D]``. Assigning replaces them."""
        return None if self._keys.is_empty else self._keys.states

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._keys = new_storage(self.config) if states is None else self._assigned(states)
        self.index = None

    @property
    def values(self) -> torch.Tensor | None:
        """All values, ``[B, H_kv, L, D_v]``. Assigning replaces them."""
        return None if self._values.is_empty else self._values.states

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._values = new_storage(self.config) if states is None else self._assigned(states)

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
        if key_states.shape[2] >= self.config.block_size:
            # A new prompt: its queries are better perspectives than the old ones.
            self.index = None
        keys, values = self._to_attend(key_states.shape[2])
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
    def read(self, module, query, keys, mask, kwargs) -> Reading | None:
        """What ``query`` reads; called by the routed attention function."""
        if self.module_idx is None:
            self.module_idx = getattr(module, "layer_idx", None)
        if getattr(module, "layer_idx", None) != self.module_idx:
            self.record.reasons["the layer reads the cache of another layer"] += 1
            return None
        # Some models call attention twice for one update; their second call is not another step.
        record = self.record if self._awaiting else LayerRecord()
        self._awaiting = 0
        reason = self._why_dense(query, keys, mask, kwargs)
        if query.shape[2] > 1:
            self._had_prompt = True
            record.prefill_steps += 1
            if self._keys.length > query.shape[2]:
                record.reasons["several tokens appended at once are exact, and dense"] += 1
        if reason is None:
            self._learn_from(query)
        if query.shape[2] > 1:
            return None
        if reason is not None:
            record.dense(reason)
            return None

        visible = visible_keys(mask, query.shape[0], self._keys.length)
        paddings = (0,) if visible is None else visible.first
        plan = plan_step(self.config, self._keys.length, paddings, query.device)
        if plan.dense_reason is not None:
            record.dense(plan.dense_reason)
            return None
        if len(plan.attended) < len(plan.rows):
            record.reasons["rows of a batch that alone would be dense read everything"] += 1
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        visible = None if visible is None else visible.tokens
        autocast = torch.autocast(query.device.type, enabled=False)
        with torch.no_grad(), autocast:
            blocks = self._choose(query[:, :, 0].to(keys.dtype), plan, paddings, visible, scaling)
            index = self._token_index(blocks, plan)
            valid = self._valid(index, visible, plan)
            record.sparse(plan.attended)
            if self.config.audit_every and self.record.sparse_steps % self.config.audit_every == 0:
                softcap = kwargs.get("softcap")
                mass = ops.attention_mass(query[:, :, 0], keys, scaling, visible, softcap)
                record.audits.append(self._audit(mass, index, valid, blocks, plan))
        return Reading(
            self._keys.gather(index),
            self._values.gather(index),
            None if valid is None else _mask_like(mask, index, valid, query.shape[1]),
        )

    def _learn_from(self, query: torch.Tensor) -> None:
        """Keep queries for builders that look at them.

        Perspectives come from the prompt: they must not depend on when a row of a batch first
        grows beyond its budget. Single queries serve where there was no prompt.
        """
        if BUILDERS[self.config.builder].query_dependent:
            if query.shape[2] > 1 or not self._had_prompt:
                self.recent.append(query, self._keys.length)

    def _why_dense(self, query, keys, mask, kwargs) -> str | None:
        if keys.shape[1:] != self._keys.shape[1:]:
            return "keys are expanded after the cache (multi-head latent attention)"
        if kwargs.get("sliding_window") is not None:
            return "sliding-window layer"
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
            return "padding with flash or flex attention"
        if mask is not None and mask.shape[1] > 1:
            return "the mask differs between heads"
        if kwargs.get("position_bias") is not None:
            return "attention with a position bias"
        return None

    def _choose(self, query, plan: StepPlan, paddings, visible, scaling: float) -> torch.Tensor:
        """The blocks to read, after the index was built or brought up to date."""
        index = self.index
        if index is None or index.paddings != paddings or index.wants_refresh(self.recent):
            heads = self._keys.shape[1]
            self.index = AnchorIndex(self.config, self.recent, visible, paddings, heads, scaling)
        if self.index.blocks < plan.last_candidate:
            self.index.extend(self._keys, visible)
        return self.index.choose(query, plan)

    def _token_index(self, blocks: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Positions to read, ``[B, H_kv, S]``: sinks, tail, then the chosen blocks."""
        size = self.config.block_size
        starts = blocks * size + plan.shifts[:, None, None]
        tokens = starts[..., None] + torch.arange(size, device=blocks.device)
        fixed = plan.fixed_index[:, None].expand(*blocks.shape[:2], -1)
        return torch.cat((fixed, tokens.flatten(2)), -1)

    def _valid(self, index, visible, plan: StepPlan) -> torch.Tensor | None:
        """Which of the positions to read are to be attended, ``[B, H_kv, S]``; None for all."""
        if visible is None:
            return None
        b, heads, _ = index.shape
        valid = visible[:, None].expand(b, heads, -1).gather(2, index)
        fixed = plan.fixed_index.shape[1]
        if plan.fixed_valid is not None:
            valid[..., :fixed] &= plan.fixed_valid[:, None]
        if plan.read_valid is not None:
            per_token = plan.read_valid.repeat_interleave(self.config.block_size, 1)
            valid[..., fixed:] &= per_token[:, None]
        return valid

    def _audit(self, mass, index, valid, blocks, plan: StepPlan) -> Audit:
        heads = mass.shape[1] // index.shape[1]
        read = mass.gather(2, index.repeat_interleave(heads, 1))
        if valid is not None:
            read = read * valid.repeat_interleave(heads, 1)
        return Audit(
            mass=read.sum(-1).cpu(),
            blocks=blocks.cpu(),
            block_starts=(blocks * self.config.block_size + plan.shifts[:, None, None]).cpu(),
        )

    # -- the rest of the cache surface -------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from the end; a positive value is, as in older
        transformers, the length to keep."""
        length = tokens_to_keep(self._keys.length, tokens_to_remove)
        self._keys.truncate(length)
        self._values.truncate(length)
        self.recent.truncate(length)
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
        self._map_derived(change)

    def _map_derived(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.recent.map_(change)
        if self.index is not None:
            self.index.map_(change)

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
        self._map_derived(lambda states: states.to(device, non_blocking=True))

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def state_dict(self) -> dict:
        """What a copy of this layer needs, as tensors and plain values; the index follows from it.
        Past steps are not part of it."""
        return {
            "keys": None if self._keys.is_empty else self._keys.in_memory(),
            "values": None if self._values.is_empty else self._values.in_memory(),
            "recent": self.recent.state_dict(),
            "had_prompt": self._had_prompt,
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
        self.recent.load_state_dict(state["recent"])
        # A builder that needs queries, where none were kept, learns from those that come.
        self._had_prompt = state["had_prompt"] and self.recent.seen > 0
        self.module_idx = state["module_idx"]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the stored keys and values."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of anchors, offsets, sketches, perspectives and the queries kept for these."""
        return self.recent.nbytes + (0 if self.index is None else self.index.nbytes)


def _mask_like(mask, index, valid, n_heads) -> torch.Tensor:
    """The mask of the positions read, ``[B, H, 1, S]``, in the form of the full one."""
    if mask.dtype == torch.bool:
        picked = valid
    else:
        row = mask[:, :, -1].expand(*index.shape[:2], -1)
        picked = row.gather(2, index).masked_fill(~valid, torch.finfo(mask.dtype).min)
    return picked.repeat_interleave(n_heads // index.shape[1], 1)[:, :, None]
