"""Perspectives: the typical queries from which query-dependent builders look at a block."""

from __future__ import annotations

from collections.abc import Callable

import torch

QUERY_WINDOW = 64
"""Newest queries kept per layer to learn perspectives from."""

_KMEANS_STEPS = 8
# Perspectives are learned again when there are this many times as many queries, or when the mean
# cosine of the newest ones to their nearest perspective has fallen by so much.
_FIRST_LOOK, _GROWN, _DRIFT = 7, 8, 0.1
_NEW_PROMPT = 16


class RecentQueries:
    """The last :data:`QUERY_WINDOW` queries of a layer, in a ring indexed by position."""

    def __init__(self) -> None:
        self._ring: torch.Tensor | None = None
        self.seen = 0
        self.total = 0
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
        self.total += query.shape[2]
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
        return {"ring": self._ring, "seen": self.seen, "total": self.total, "end": self._end}

    def load_state_dict(self, state: dict) -> None:
        """The inverse of :meth:`state_dict`."""
        with torch.inference_mode(False):
            self._ring = None if state["ring"] is None else state["ring"].clone()
        self.seen, self.total, self._end = state["seen"], state["total"], state["end"]

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._ring is not None:
            with torch.inference_mode(False):
                self._ring = change(self._ring)


class Perspectives:
    """Perspectives of one layer: learned from its newest queries, and learned again for the rows
    of the batch whose queries have drifted away from them.

    Args:
        anchors_per_head: perspectives per head.
        by_query_head: one set per query head, or one per key/value head.
    """

    def __init__(self, anchors_per_head: int, by_query_head: bool) -> None:
        self.anchors_per_head = anchors_per_head
        self.by_query_head = by_query_head
        self.recent = RecentQueries()
        self.centres: torch.Tensor | None = None
        """``[B, H_kv, P, D]``, times the softmax scale."""
        self._fit: torch.Tensor | None = None  # [B], mean cosine to the nearest perspective
        self._learned_from: torch.Tensor | None = None  # [B], real queries
        self._look_at = 0  # count of queries at which drift is looked at next

    def observe(self, query: torch.Tensor, length: int) -> None:
        """Remember queries ``[B, H, T, D]`` up to position ``length - 1``."""
        self.recent.append(query, length)
        if query.shape[2] >= _NEW_PROMPT:
            self.centres = None  # its queries are better perspectives than the old ones

    def refresh(self, visible: torch.Tensor | None, n_kv_heads: int, scaling: float) -> bool:
        """Learn what is not learned yet or has drifted; whether anything changed.

        Drift is looked at after fixed numbers of queries and row by row, so that a row of a batch
        is treated as it would be alone.

        Args:
            visible: ``[B, L]``, False for padding; None when all tokens are real.
            n_kv_heads: H_kv.
            scaling: softmax scale.
        """
        recent, first = self.recent, self.centres is None
        if not first and recent.total < self._look_at:
            return False
        self._look_at = recent.total + (_FIRST_LOOK if first else QUERY_WINDOW)
        queries, positions = recent.in_order()
        queries = queries.float() * scaling
        valid = torch.ones(queries.shape[0], len(positions), device=queries.device).bool()
        if visible is not None:
            valid = visible[:, positions.start : positions.stop]
        grouped, count = queries.unflatten(1, (n_kv_heads, -1)), valid.sum(1)
        if not first:
            few = self._learned_from
            grown = (few < QUERY_WINDOW) & (count >= (_GROWN * few).clamp(max=QUERY_WINDOW))
            stale = grown | (_fit(grouped, self.centres, valid) < self._fit - _DRIFT)
            if not stale.any():
                return False
        groups = queries.shape[1] if self.by_query_head else n_kv_heads
        learned = learn_perspectives(queries, valid, groups, self.anchors_per_head)
        learned = learned.reshape(queries.shape[0], n_kv_heads, -1, queries.shape[-1])
        fit = _fit(grouped, learned, valid)
        if not first:
            learned = torch.where(stale[:, None, None, None], learned, self.centres)
            fit = torch.where(stale, fit, self._fit)
            count = torch.where(stale, count, self._learned_from)
        self.centres, self._fit, self._learned_from = learned, fit, count
        return True

    def truncate(self, length: int) -> None:
        """Forget the queries at positions from ``length`` on, and what was learned if none are
        left."""
        self.recent.truncate(length)
        if self.recent.seen == 0:
            self.centres = None

    @property
    def nbytes(self) -> int:
        """Bytes of the perspectives and of the queries kept to learn them."""
        return self.recent.nbytes + (0 if self.centres is None else 4 * self.centres.numel())

    def state_dict(self) -> dict:
        """Everything, as tensors and numbers."""
        learned = {name: getattr(self, name) for name in ("centres", "_fit", "_learned_from")}
        layout = [self.by_query_head, self.anchors_per_head]
        look_at, recent = self._look_at, self.recent.state_dict()
        return {"recent": recent, "look_at": look_at, "layout": layout, **learned}

    def load_state_dict(self, state: dict) -> None:
        """The inverse of :meth:`state_dict`; of other settings only the queries are taken."""
        self.recent.load_state_dict(state["recent"])
        centres = state["centres"]
        if centres is not None and state["layout"] == [self.by_query_head, self.anchors_per_head]:
            self.centres, self._look_at = centres.clone(), state["look_at"]
            self._fit, self._learned_from = state["_fit"].clone(), state["_learned_from"].clone()

    def map_(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension or the device."""
        self.recent.map_(change)
        if self._fit is not None:
            self.centres = None if self.centres is None else change(self.centres)
            self._fit = change(self._fit)
            self._learned_from = change(self._learned_from)


def _fit(queries: torch.Tensor, centres: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """How near queries ``[B, H_kv, G, W, D]`` are to their nearest perspective: mean cosine of the
    ``valid`` ones ``[B, W]``, ``[B]``."""
    cosine = torch.nn.functional.cosine_similarity(
        queries.flatten(2, 3).unsqueeze(3), centres.unsqueeze(2), dim=-1
    )
    nearest = cosine.amax(-1).unflatten(-1, (-1, queries.shape[3])).mean((1, 2))
    return (nearest * valid).sum(-1) / valid.sum(-1).clamp(min=1)


def learn_perspectives(
    queries: torch.Tensor, valid: torch.Tensor | None, n_groups: int, n_per_group: int
) -> torch.Tensor:
    """Typical queries of each group: k-means centroids of the newest ones.

    Args:
        queries: ``[B, H, W, D]``, in order of position, times the softmax scale.
        valid: ``[B, W]``, False for padding; None when all are real. Each row needs at least one.
        n_groups: H for perspectives per query head, H_kv for perspectives per key/value head.
        n_per_group: centroids wanted.

    Returns:
        ``[B, n_groups, n_per_group, D]`` in fp32.
    """
    b, heads, window, dim = queries.shape
    if valid is None:
        valid = torch.ones((b, window), dtype=torch.bool, device=queries.device)
    per_group = heads // n_groups
    points = queries.float().view(b, n_groups, per_group * window, dim)
    # [B, 1, 1, heads of the group x W]: padding takes no part in any centroid.
    weight = valid.float().repeat(1, per_group)[:, None, None]
    start = _spread_over_valid(valid, per_group, n_per_group)
    start = start[:, None, :, None].expand(b, n_groups, n_per_group, dim)
    centroids = points.gather(2, start)
    for _ in range(1 if n_per_group == 1 else _KMEANS_STEPS):
        nearest = torch.cdist(centroids, points).argmin(2, keepdim=True)
        member = torch.zeros((b, n_groups, n_per_group, points.shape[2]), device=points.device)
        member = member.scatter_(2, nearest, 1.0) * weight
        count = member.sum(-1, keepdim=True)
        centroids = torch.where(
            count > 0, torch.matmul(member, points) / count.clamp(min=1), centroids
        )
    return centroids


def _spread_over_valid(valid: torch.Tensor, per_group: int, wanted: int) -> torch.Tensor:
    """Indices ``[B, wanted]`` of real queries, evenly spread over heads and positions."""
    b, window = valid.shape
    count = valid.sum(1, keepdim=True).clamp(min=1)
    step = torch.arange(wanted, device=valid.device)
    flat = (2 * step + 1) * (count * per_group) // (2 * wanted)
    head, place = flat // count, flat % count
    # Padding is on the left or between turns: the i-th real query, counted from the left.
    order = valid.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return head * window + order.gather(1, place)
