"""What summarises a block: anchor builders, and the perspectives they look from.

An anchor is a weighted mean of a block's keys; with the entropy of the weights as its offset it
bounds the block's log attention mass from below for every query (Gibbs' inequality). A builder
only chooses the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

_KMEANS_STEPS = 8


class AnchorBuilder(ABC):
    """Chooses the weights of a block's tokens. Override :meth:`weights`, nothing else.

    ``query_dependent`` builders get perspectives learned from the prompt's queries; the others
    see none, and their anchors are stored once per key/value head.
    """

    query_dependent = True

    @abstractmethod
    def weights(
        self,
        keys: torch.Tensor,
        perspectives: torch.Tensor | None,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """Weights on the simplex for every block.

        Args:
            keys: ``[B, H_kv, N, n, D]``, after RoPE.
            perspectives: typical queries, times the softmax scale, ``[B, H_kv, P, D]``; None when
                the builder is not query-dependent.
            valid: ``[B, 1, N, n]``, False for padding; None when all tokens are real.

        Returns:
            ``[B, H_kv or 1, N, P, n]``, fp32. Padding must weigh 0, and a block of nothing but
            padding must weigh 0 in total.
        """


class Tangent(AnchorBuilder):
    """Weights ``softmax(c . k)`` at a perspective c (article A's alignment to the query heads).

    The bound is tight where the query equals the perspective: the anchor is the tangent of the
    block's log mass there.
    """

    def weights(self, keys, perspectives, valid):
        logits = torch.matmul(keys, perspectives.unsqueeze(2).transpose(-1, -2).to(keys.dtype))
        logits = logits.float().transpose(-1, -2)
        if valid is None:
            return logits.softmax(-1)
        weights = logits.masked_fill(~valid.unsqueeze(3), float("-inf")).softmax(-1)
        return weights.nan_to_num_(0.0)


class Mean(AnchorBuilder):
    """Uniform weights: the mean key (MoBA, UCM)."""

    query_dependent = False

    def weights(self, keys, perspectives, valid):
        if valid is None:
            b, _, n_blocks, size, _ = keys.shape
            return torch.full((b, 1, n_blocks, 1, size), 1 / size, device=keys.device)
        weights = valid.unsqueeze(3).float()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1)


BUILDERS: dict[str, type[AnchorBuilder]] = {"tangent": Tangent, "mean": Mean}


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
