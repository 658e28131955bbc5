"""The index of one layer: anchors, offsets and sketches of its complete blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .anchor_config import AnchorConfig
from .anchors import builder_of
from .block_storage import GrowingStates
from .block_summary import summarise_blocks
from .kernels import ops
from .selection import StepPlan

# Tokens of a piece: more do not stay in a processor's cache, fewer leave an accelerator waiting for
# launches.
_TOKENS_AT_ONCE, _TOKENS_AT_ONCE_ON_ACCELERATOR = 1024, 16384


class AnchorIndex:
    """Anchors of the complete blocks of one layer, from slot 0 up to :attr:`blocks`.

    Built for a whole cache at once when it is first needed, so that anchors do not depend on how
    the prompt was cut into pieces, and extended as blocks complete while decoding.

    Args:
        config: block size, builder, number formats, and what else a block is to keep.
        perspectives: ``[B, H_kv, P, D]`` for builders that look at queries.
        paddings: left padding per row, as in :class:`Visible`.
        scaling: softmax scale.
    """

    def __init__(
        self,
        config: AnchorConfig,
        perspectives: torch.Tensor | None,
        paddings: tuple[int, ...],
        scaling: float,
    ) -> None:
        self.config = config
        self.builder = builder_of(config.builder)
        self.perspectives = perspectives
        self.paddings = paddings
        self.scaling = scaling
        self.blocks = 0
        self.per_block = 1
        self._anchors = GrowingStates()
        self._offsets = GrowingStates()
        self._anchor_scales = GrowingStates()
        self._bits = GrowingStates()
        self._sketch_scales = GrowingStates()
        self._radii = GrowingStates()
        self._mean_values = GrowingStates()
        self.padded = False
        self._visible: torch.Tensor | None = None  # what the blocks were summarised by

    def agrees_with(self, visible: torch.Tensor | None) -> bool:
        """Whether the blocks were summarised by the tokens that are visible now."""
        if visible is self._visible:
            return True
        size = self.config.block_size
        end = self.blocks * size + max(padding % size for padding in self.paddings)
        return _agree(visible, self._visible, end)

    @property
    def _per_anchor(self) -> tuple[GrowingStates, ...]:
        return self._anchors, self._offsets, self._anchor_scales

    @property
    def _per_block(self) -> tuple[GrowingStates, ...]:
        return self._bits, self._sketch_scales, self._radii, self._mean_values

    def extend(
        self, keys: GrowingStates, values: GrowingStates, visible: torch.Tensor | None
    ) -> None:
        """Give anchors to the blocks that have completed since the last call."""
        size = self.config.block_size
        shifts = [padding % size for padding in self.paddings]
        complete = (keys.length - max(shifts)) // size
        on_cpu = keys.model_device.type == "cpu"
        at_once = _TOKENS_AT_ONCE if on_cpu else _TOKENS_AT_ONCE_ON_ACCELERATOR
        self._visible = visible
        while self.blocks < complete:  # in pieces: what is computed here is larger than the keys
            stop = min(self.blocks + max(at_once // size, 1), complete)
            self._extend(keys, values, visible, shifts, stop)
            keys.give_back()
            values.give_back()

    def _extend(self, keys, values, visible, shifts: list[int], complete: int) -> None:
        size = self.config.block_size
        first, last = self.blocks * size + min(shifts), complete * size + max(shifts)
        tokens = torch.arange(first, last - max(shifts) + min(shifts), device=keys.model_device)
        tokens = tokens + torch.tensor(shifts, device=tokens.device)[:, None] - min(shifts)

        def blocks_of(states: GrowingStates) -> torch.Tensor:
            near = states.span(first, last)
            if len(set(shifts)) > 1:
                places = (tokens - first)[:, None].expand(*near.shape[:2], -1)
                near = ops.gather_tokens(near.contiguous(), places)
            return near.unflatten(2, (-1, size))

        valid = None
        if visible is not None:
            rows = tokens.expand(visible.shape[0], -1)
            valid = visible.gather(1, rows).unflatten(1, (-1, size)).unsqueeze(1)
            self.padded = True
        self._summarise(blocks_of(keys), valid)
        if self.config.skipped == "mean":
            self._mean_values.append(_mean(blocks_of(values), valid))
        self.blocks = complete

    def _summarise(self, blocks: torch.Tensor, valid: torch.Tensor | None) -> None:
        summary = summarise_blocks(blocks, valid, self.config, self.perspectives)
        self.per_block = summary.anchors.shape[2] // blocks.shape[2]
        stored = (*self._per_anchor, self._bits, self._sketch_scales)
        for states, new in zip(stored, summary[:-1], strict=True):
            if new is not None:
                states.append(new)
        if self.config.tolerance is not None:
            self._radii.append(ops.block_radii(blocks, summary.centres, valid).unsqueeze(-1))

    def score(
        self, query: torch.Tensor, first: int, last: int, softcap: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score block slots ``first`` to ``last`` for the query ``[B, H, D]``.

        Returns:
            Their estimated log mass, and what sketches need beside it, the logits of their centres
            before any ``softcap``, both ``[B, H_kv, G, last - first]``.
        """
        rows = slice(first * self.per_block, last * self.per_block)
        anchors, offsets, scales = (
            None if part.is_empty else part.states[:, :, rows].unflatten(2, (-1, self.per_block))
            for part in self._per_anchor
        )
        query = query * self.scaling
        scales = None if scales is None else scales[..., 0]
        scores, mean_logits = ops.score_anchors(
            self.builder.lift(query), anchors, offsets[..., 0], scales, softcap
        )
        if self.config.refine != "sketch":
            return scores, mean_logits
        if scales is not None and not self.builder.bounds_from_below:
            anchors = anchors * scales.unsqueeze(-1)
        return scores, self.builder.centre_logits(query, anchors, mean_logits)

    def score_sketches(
        self,
        query: torch.Tensor,
        slots: torch.Tensor | slice,
        centres: torch.Tensor,
        piece: int,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Log mass of pieces of blocks by their sketches, ``[B, H_r, H / H_r, parts C]``.

        Args:
            query: ``[B, H, D]``.
            slots: the blocks ``[B, H_r, C]``, or a run of slots for every head.
            centres: logits of their centres, ``[B, H_r, H / H_r, C]``.
            piece: tokens per piece.
            softcap: of the logits, if the model has one.
        """
        bits, scales = (
            part.states if isinstance(slots, torch.Tensor) else part.states[:, :, slots]
            for part in (self._bits, self._sketch_scales)
        )
        return ops.score_sketches(
            query * self.scaling,
            bits,
            scales,
            centres,
            slots if isinstance(slots, torch.Tensor) else None,
            piece,
            self.padded,
            softcap,
        )

    def choose(
        self,
        query: torch.Tensor,
        by_anchors: torch.Tensor,
        centres: torch.Tensor,
        plan: StepPlan,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """The pieces that a step reads, ``[B, H_r, pieces]`` numbered from the first candidate's
        first one, by what :meth:`score` says of the plan's candidates and by their sketches."""
        candidates = slice(plan.first_block, plan.last_block)
        bits, scales = (s.states[:, :, candidates] for s in (self._bits, self._sketch_scales))
        proposals = by_anchors.shape[3] if plan.proposes_all else plan.proposals
        return ops.choose_pieces(
            query * self.scaling,
            by_anchors,
            centres,
            bits,
            scales,
            proposals,
            plan.pieces,
            plan.piece,
            softcap,
        )

    def upper_bounds(
        self, query: torch.Tensor, first: int, last: int, softcap: float | None
    ) -> torch.Tensor:
        """Numbers that no logit of block slots can exceed, ``[B, H_kv, G, last - first]``.

        They follow from a ball around each block's centre (Cauchy-Schwarz), and from the box where
        there is one. Needs ``tolerance``.
        """
        rows = slice(first * self.per_block, last * self.per_block)
        anchors = self._exact_anchors()[:, :, rows].float()
        query = query.float() * self.scaling
        anchors = anchors.unflatten(2, (-1, self.per_block))
        centres = self.builder.centre(anchors)
        grouped = query.unflatten(1, (centres.shape[1], -1))
        radii = self._radii.states[:, :, first:last, 0].unsqueeze(2)
        largest = grouped @ centres.transpose(-1, -2) + grouped.norm(dim=-1, keepdim=True) * radii
        if not self.builder.bounds_from_below:
            lifted = self.builder.lift(query)
            no_offset = torch.zeros(anchors.shape[:4], device=anchors.device)
            box = ops.score_anchors(lifted, anchors, no_offset)[0]
            if not self._anchor_scales.is_empty:  # rounding may have moved each side inwards
                rounding = self._anchor_scales.states[:, :, rows, 0].unflatten(
                    2, (-1, self.per_block)
                )
                length = lifted.abs().sum(-1).unflatten(1, (centres.shape[1], -1)).unsqueeze(-1)
                box = box + length * rounding.amax(3).unsqueeze(2) / 2
            largest = torch.minimum(largest, box)
        if softcap is not None:
            largest = softcap * torch.tanh(largest / softcap)
        return largest

    def _exact_anchors(self) -> torch.Tensor:
        """``[B, H_kv, anchors, D]`` as they stand for the blocks, scales applied."""
        if self._anchor_scales.is_empty:
            return self._anchors.states
        return self._anchors.states * self._anchor_scales.states

    def mean_values(self, first: int, last: int) -> torch.Tensor:
        """Mean values of block slots, ``[B, H_kv, last - first, D_v]``. Needs ``skipped``."""
        return self._mean_values.states[:, :, first:last]

    @property
    def anchors(self) -> torch.Tensor:
        """Article A's view of the index: ``[B, blocks, anchors per head, heads, D]``, with query
        heads or, for ``anchor_heads="key_value"`` and query-independent builders, key/value
        heads; 2 D numbers for boxes. A copy in fp32 where they are kept in int8."""
        anchors = self._exact_anchors()
        b, heads, _, dim = anchors.shape
        per_head = self.config.anchors_per_head if self.builder.query_dependent else self.per_block
        blocks = anchors.view(b, heads, self.blocks, -1, per_head, dim)
        return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3, 4)

    def truncate(self, length: int) -> None:
        """Drop the blocks that are no longer complete in a cache of ``length`` tokens."""
        shift = max(padding % self.config.block_size for padding in self.paddings)
        self.blocks = min(self.blocks, max(length - shift, 0) // self.config.block_size)
        for states in self._per_anchor:
            states.truncate(self.blocks * self.per_block)
        for states in self._per_block:
            states.truncate(self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of anchors, offsets, sketches, radii and mean values."""
        return sum(states.nbytes for states in (*self._per_anchor, *self._per_block))

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension or the device."""
        for states in (*self._per_anchor, *self._per_block):
            states.map_(change)
        if self.perspectives is not None:
            self.perspectives = change(self.perspectives)
        if self._visible is not None:
            self._visible = change(self._visible)
        if len(self.paddings) > 1:
            paddings = change(torch.tensor(self.paddings)).tolist()
            self.paddings = tuple(paddings) if len(set(paddings)) > 1 else (paddings[0],)


@functools.lru_cache(maxsize=8)  # a device is to be waited for once per step, not per layer
def _agree(visible: torch.Tensor | None, before: torch.Tensor | None, end: int) -> bool:
    seen = [mask[:, :end] for mask in (visible, before) if mask is not None]
    return torch.equal(*seen) if len(seen) == 2 else bool(seen[0].all())


def _mean(blocks: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    if valid is None:
        return blocks.mean(3)
    weights = valid.unsqueeze(-1).to(blocks.dtype)
    return (blocks * weights).sum(3) / weights.sum(3).clamp(min=1)
