"""The index of one layer: anchors and offsets of its blocks, scored by a decoding query."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .anchors import BUILDERS, learn_perspectives
from .block_storage import GrowingStates
from .config import AnchorConfig
from .kernels import ops
from .selection import StepPlan, best_blocks

QUERY_WINDOW = 64
"""Newest queries kept per layer to learn perspectives from."""

_REFRESH_FACTOR = 8
_TOKENS_AT_ONCE = 2048


class RecentQueries:
    """The last :data:`QUERY_WINDOW` queries of a layer, in a ring indexed by position."""

    def __init__(self) -> None:
        self._ring: torch.Tensor | None = None
        self.seen = 0
        self._end = 0

    def append(self, query: torch.Tensor, length: int) -> None:
        """Remember queries ``[B, H, T, D]`` whose last one stands at position ``length - 1``."""
        newest = query[:, :, -QUERY_WINDOW:].detach()
        if self._ring is None or self._ring.shape[0] != query.shape[0]:
            b, heads, _, dim = query.shape
            with torch.inference_mode(False):
                self._ring = query.new_zeros((b, heads, QUERY_WINDOW, dim))
        if length - query.shape[2] != self._end:
            self.seen = 0  # tokens came in between without their queries
        slot = (length - 1) % QUERY_WINDOW
        if newest.shape[2] == 1:
            self._ring[:, :, slot] = newest[:, :, 0]
        else:
            slots = torch.arange(length - newest.shape[2], length, device=query.device)
            self._ring[:, :, slots % QUERY_WINDOW] = newest
        self.seen = min(self.seen + newest.shape[2], QUERY_WINDOW)
        self._end = length

    def in_order(self) -> tuple[torch.Tensor, range]:
        """The queries ``[B, H, seen, D]`` oldest first, and their positions."""
        positions = range(self._end - self.seen, self._end)
        slots = torch.tensor([p % QUERY_WINDOW for p in positions], device=self._ring.device)
        return self._ring[:, :, slots], positions

    def truncate(self, length: int) -> None:
        """Forget the queries at positions from ``length`` on."""
        self.seen = max(self.seen - max(self._end - length, 0), 0)
        self._end = min(self._end, length)

    @property
    def nbytes(self) -> int:
        return 0 if self._ring is None else self._ring.numel() * self._ring.element_size()

    def state_dict(self) -> dict:
        """Everything, as tensors and numbers."""
        return {"ring": self._ring, "seen": self.seen, "end": self._end}

    def load_state_dict(self, state: dict) -> None:
        """The inverse of :meth:`state_dict`."""
        ring, self.seen, self._end = state["ring"], state["seen"], state["end"]
        self._ring = None if ring is None else ring.clone()

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._ring is not None:
            with torch.inference_mode(False):
                self._ring = change(self._ring)


class AnchorIndex:
    """Anchors of the complete blocks of one layer, from slot 0 up to :attr:`blocks`.

    Built for a whole cache at once when it is first needed, so that anchors do not depend on how
    the prompt was cut into pieces, and extended as blocks complete while decoding.

    Args:
        config: block size, builder, anchors per head and their alignment.
        recent: the newest queries; perspectives are learned from them.
        visible: ``[B, L]``, False for padding; None when all tokens are real.
        paddings: left padding per row, as in :class:`Visible`.
        n_kv_heads: H_kv.
        scaling: softmax scale.
    """

    def __init__(
        self,
        config: AnchorConfig,
        recent: RecentQueries,
        visible: torch.Tensor | None,
        paddings: tuple[int, ...],
        n_kv_heads: int,
        scaling: float,
    ) -> None:
        self.config = config
        self.builder = BUILDERS[config.builder]()
        self.scaling = scaling
        self.blocks = 0
        self.paddings = paddings
        self.perspectives: torch.Tensor | None = None
        self.queries_seen = recent.seen
        if self.builder.query_dependent:
            self.perspectives = self._learn(recent, visible, n_kv_heads)
        self._anchors = GrowingStates()
        self._offsets = GrowingStates()
        self._bits = GrowingStates()
        self._scales = GrowingStates()
        self._padded = False

    def _learn(self, recent, visible, n_kv_heads) -> torch.Tensor:
        queries, positions = recent.in_order()
        valid = None if visible is None else visible[:, positions.start : positions.stop]
        by_query_head = self.config.anchor_heads == "query"
        centroids = learn_perspectives(
            queries * self.scaling,
            valid,
            queries.shape[1] if by_query_head else n_kv_heads,
            self.config.anchors_per_head,
        )
        return centroids.reshape(queries.shape[0], n_kv_heads, -1, queries.shape[-1])

    def wants_refresh(self, recent: RecentQueries) -> bool:
        """Whether the perspectives rest on few queries and many more have come since."""
        return self.builder.query_dependent and (
            recent.seen >= min(_REFRESH_FACTOR * self.queries_seen, QUERY_WINDOW)
            and self.queries_seen < QUERY_WINDOW
        )

    @property
    def anchors_per_kv_head(self) -> int:
        """P: anchors of one block that a key/value head's queries are scored against."""
        return 1 if self.perspectives is None else self.perspectives.shape[2]

    def extend(self, keys: GrowingStates, visible: torch.Tensor | None) -> None:
        """Give anchors to the blocks that have completed since the last call."""
        size = self.config.block_size
        shifts = [padding % size for padding in self.paddings]
        complete = (keys.length - max(shifts)) // size
        if complete <= self.blocks:
            return
        while self.blocks < complete:  # in pieces: what is computed here is larger than the keys
            stop = min(self.blocks + max(_TOKENS_AT_ONCE // size, 1), complete)
            self._extend(keys, visible, shifts, stop)

    def _extend(self, keys, visible, shifts: list[int], complete: int) -> None:
        size = self.config.block_size
        start, stop = self.blocks * size, complete * size
        b, heads = keys.shape[:2]
        if len(set(shifts)) == 1:
            tokens = slice(start + shifts[0], stop + shifts[0])
            blocks = keys.span(tokens.start, tokens.stop)
            valid = None if visible is None else visible[:, tokens]
        else:
            device, first = keys.model_device, start + min(shifts)
            tokens = torch.arange(start, stop, device=device)
            tokens = tokens + torch.tensor(shifts, device=device)[:, None]
            nearby = keys.span(first, stop + max(shifts)).contiguous()
            blocks = ops.gather_tokens(nearby, (tokens - first)[:, None].expand(b, heads, -1))
            valid = visible.gather(1, tokens)
        blocks = blocks.unflatten(2, (-1, size))
        if valid is not None:
            valid = valid.unflatten(1, (-1, size)).unsqueeze(1)
        weights = self.builder.weights(blocks, self.perspectives, valid)
        anchors, offsets = ops.build_anchors(blocks, weights)
        self._anchors.append(anchors.flatten(2, 3))
        self._offsets.append(offsets.flatten(2, 3).unsqueeze(-1))
        if self.config.refine == "sketch":
            bits, scales = ops.sketch_tokens(blocks - anchors.mean(3, keepdim=True))
            if valid is not None:
                self._padded = True
                scales = scales.masked_fill(~valid.unsqueeze(-1), float("nan"))
            self._bits.append(bits.flatten(3))
            self._scales.append(scales.flatten(3))
        self.blocks = complete

    def score(
        self, query: torch.Tensor, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score block slots ``first`` to ``last`` for the query ``[B, H, D]``.

        Returns:
            Their estimated log mass, and the logits of their centres, both
            ``[B, H_kv, G, last - first]``.
        """
        per_block = self.anchors_per_kv_head
        rows = slice(first * per_block, last * per_block)
        return ops.score_anchors(
            query * self.scaling,
            self._anchors.states[:, :, rows].unflatten(2, (-1, per_block)),
            self._offsets.states[:, :, rows, 0].unflatten(2, (-1, per_block)),
        )

    def _refined(self, query, bits, scales, centres) -> torch.Tensor:
        """Log mass ``[B, H_kv, G, C]`` of blocks by the sketches of their tokens."""
        size = self.config.block_size
        bits = bits.unflatten(3, (size, -1))
        return ops.score_sketches(query * self.scaling, bits, scales, centres, self._padded)

    def choose(self, query: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """The block slots to read, ``[B, H_kv, plan.blocks]``, for the query ``[B, H, D]``."""
        first, last, valid = plan.first_candidate, plan.last_candidate, plan.candidate_valid
        valid = None if valid is None else valid[:, None]
        scores, centres = self.score(query, first, last)
        if self.config.refine is None:
            return best_blocks(scores, plan.blocks, valid) + first
        if plan.proposes_all:
            bits, scales = (s.states[:, :, first:last] for s in (self._bits, self._scales))
            refined = self._refined(query, bits, scales, centres)
            return best_blocks(refined, plan.blocks, valid) + first
        proposed = best_blocks(scores, plan.proposals, valid)
        valid = None if plan.proposal_valid is None else plan.proposal_valid[:, None]
        slots = proposed + first
        bits, scales = self._bits.gather(slots), self._scales.gather(slots)
        groups = proposed.unsqueeze(2).expand(-1, -1, centres.shape[2], -1)
        refined = self._refined(query, bits, scales, centres.gather(3, groups))
        return slots.gather(2, best_blocks(refined, plan.blocks, valid))

    @property
    def anchors(self) -> torch.Tensor:
        """Article A's view of the index: ``[B, blocks, anchors per head, heads, D]``, with query
        heads or, for ``anchor_heads="key_value"`` and query-independent builders, key/value
        heads."""
        b, heads, _, dim = self._anchors.states.shape
        per_head = 1 if self.perspectives is None else self.config.anchors_per_head
        blocks = self._anchors.states.view(b, heads, self.blocks, -1, per_head, dim)
        return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3, 4)

    def truncate(self, length: int) -> None:
        """Drop the blocks that are no longer complete in a cache of ``length`` tokens."""
        shift = max(padding % self.config.block_size for padding in self.paddings)
        self.blocks = min(self.blocks, max(length - shift, 0) // self.config.block_size)
        for states in (self._anchors, self._offsets):
            states.truncate(self.blocks * self.anchors_per_kv_head)
        for states in (self._bits, self._scales):
            states.truncate(self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of anchors, offsets, sketches and perspectives."""
        perspectives = self.perspectives
        extra = 0 if perspectives is None else perspectives.numel() * perspectives.element_size()
        stored = (self._anchors, self._offsets, self._bits, self._scales)
        return extra + sum(states.nbytes for states in stored)

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension or the device."""
        for states in (self._anchors, self._offsets, self._bits, self._scales):
            states.map_(change)
        if self.perspectives is not None:
            self.perspectives = change(self.perspectives)
        if len(self.paddings) > 1:
            paddings = change(torch.tensor(self.paddings)).tolist()
            self.paddings = tuple(paddings) if len(set(paddings)) > 1 else (paddings[0],)
