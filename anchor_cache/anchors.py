"""What summarises a block: anchor builders.

An anchor is a weighted mean of a block's keys; with the entropy of the weights as its offset it
bounds the block's log attention mass from below for every query (Gibbs' inequality). A builder
only chooses the weights.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any

import torch

from .kernels import ops
from .validation import is_int, require


class AnchorBuilder(ABC):
    """Chooses the weights of a block's tokens. Override :meth:`weights`, nothing else.

    ``query_dependent`` builders get perspectives learned from the queries; the others see none,
    and their anchors are stored once per key/value head.

    Example:
        >>> class Newest(AnchorBuilder):
        ...     query_dependent = False
        ...     def weights(self, keys, perspectives, valid):
        ...         weights = torch.zeros(keys.shape[0], 1, keys.shape[2], 1, keys.shape[3])
        ...         weights[..., -1] = 1
        ...         return weights
        >>> AnchorDynamicCache(builder=Newest())
    """

    query_dependent = True
    bounds_from_below = True
    """Whether scores never exceed the true log mass; so it is for every choice of weights."""

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

    def summarise(self, keys, perspectives, valid) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchors ``[B, H_kv, N, P, D]`` and offsets ``[B, H_kv, N, P]`` from the weights."""
        weights = self.weights(keys, perspectives, valid)
        b, heads, n_blocks, size, _ = keys.shape
        shape = tuple(weights.shape) if isinstance(weights, torch.Tensor) else ()
        fits = len(shape) == 5 and (shape[0], shape[2], shape[4]) == (b, n_blocks, size)
        if not fits or shape[1] not in (1, heads):
            raise ValueError(
                f"{type(self).__name__}.weights must return a tensor [B, H_kv or 1, N, P, n], here "
                f"[{b}, {heads} or 1, {n_blocks}, P, {size}], not "
                + (f"{list(shape)}" if shape else f"a {type(weights).__name__}")
            )
        return ops.build_anchors(keys, weights)

    def lift(self, query: torch.Tensor) -> torch.Tensor:
        """The query ``[B, H, D]`` in the form in which it meets the anchors."""
        return query

    def centre(self, anchors: torch.Tensor) -> torch.Tensor:
        """A point amid the block, ``[B, H_kv, N, D]``, that its sketches are relative to."""
        return anchors.mean(3)

    def centre_logits(self, query, anchors, mean_logits) -> torch.Tensor:
        """Logits of the centres, ``[B, H_kv, G, N]``; ``mean_logits`` are those of the mean
        anchors."""
        return mean_logits


@dataclasses.dataclass(frozen=True)
class Tangent(AnchorBuilder):
    """Weights ``softmax(c . k)`` at a perspective c (article A's alignment to the query heads).

    The bound is tight where the query equals the perspective: the anchor is the tangent of the
    block's log mass there.
    """

    def weights(self, keys, perspectives, valid):
        return ops.tangent_weights(keys, perspectives, valid)

    def summarise(self, keys, perspectives, valid):
        if type(self) is not Tangent:  # another class may choose other weights
            return super().summarise(keys, perspectives, valid)
        return ops.tangent_anchors(keys, perspectives, valid)


@dataclasses.dataclass(frozen=True)
class Mean(AnchorBuilder):
    """Uniform weights: the mean key (MoBA, UCM)."""

    query_dependent = False

    def weights(self, keys, perspectives, valid):
        return ops.uniform_weights(keys, valid)

    def summarise(self, keys, perspectives, valid):
        if type(self) is not Mean:  # another class may choose other weights
            return super().summarise(keys, perspectives, valid)
        return ops.tangent_anchors(keys, None, valid)


@dataclasses.dataclass(frozen=True)
class Representative(AnchorBuilder):
    """The tokens that a perspective attends to most: one is KTransformers' DYNAMIC retrieval,
    the mean of several is akin to InfLLM's representative tokens.

    Args:
        tokens: how many, at least 1.
    """

    tokens: int = 1

    def __post_init__(self):
        require(is_int(self.tokens, 1), "tokens", self.tokens, "an int of at least 1")

    def weights(self, keys, perspectives, valid):
        logits = ops.perspective_logits(keys, perspectives)
        if valid is not None:
            logits = logits.masked_fill(~valid.unsqueeze(3), float("-inf"))
        best = logits.topk(min(self.tokens, keys.shape[3]), -1)
        weights = torch.zeros_like(logits).scatter_(-1, best.indices, 1.0)
        weights = weights.masked_fill_(logits == float("-inf"), 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1)


@dataclasses.dataclass(frozen=True)
class MinMax(AnchorBuilder):
    """The box around a block's keys (Quest): least and largest value of every channel.

    Not a weighting, but an upper bound of the log mass, ``log n + sum_d max(q_d min_d, q_d
    max_d)``. It is an inner product all the same: of (relu(q), -relu(-q)) with (max, min).
    """

    query_dependent = False
    bounds_from_below = False

    def weights(self, keys, perspectives, valid):
        raise NotImplementedError("a box is not a weighting of the block's tokens")

    def summarise(self, keys, perspectives, valid):
        if valid is None:
            offsets = torch.full(keys.shape[:3], math.log(keys.shape[3]), device=keys.device)
            box = torch.cat((keys.amax(3), keys.amin(3)), -1)
        else:
            count = valid.sum(-1).expand(keys.shape[:3])
            offsets = count.float().log()
            inside, limits = valid.unsqueeze(-1), torch.finfo(keys.dtype)
            largest = keys.masked_fill(~inside, limits.min).amax(3)
            least = keys.masked_fill(~inside, limits.max).amin(3)
            box = torch.cat((largest, least), -1).masked_fill(count.unsqueeze(-1) == 0, 0.0)
        return box.unsqueeze(3), offsets.unsqueeze(3)

    def lift(self, query):
        return torch.cat((query.relu(), -(-query).relu()), -1)

    def centre(self, anchors):
        return anchors.squeeze(3).unflatten(-1, (2, -1)).mean(-2)

    def centre_logits(self, query, anchors, mean_logits):
        centres = self.centre(anchors).unsqueeze(3)
        no_offset = torch.zeros(centres.shape[:4], device=centres.device)
        return ops.score_anchors(query, centres, no_offset)[1]


BUILDERS: dict[str, type[AnchorBuilder]] = {
    "tangent": Tangent,
    "mean": Mean,
    "representative": Representative,
    "minmax": MinMax,
}


def describe_builder(value: Any) -> Any:
    """A built-in builder object as a JSON-serialisable dictionary, one of your own by its class
    name; any other value as it is."""
    if not isinstance(value, AnchorBuilder):
        return value
    for name, cls in BUILDERS.items():
        if type(value) is cls:
            return {"builder": name, **dataclasses.asdict(value)}
    return type(value).__name__


def described_builder(value: Any) -> Any:
    """The inverse of :func:`describe_builder` for built-in builders."""
    if isinstance(value, dict) and value.get("builder") in tuple(BUILDERS):
        return BUILDERS[value["builder"]](**{k: v for k, v in value.items() if k != "builder"})
    return value


def builder_of(builder: str | AnchorBuilder) -> AnchorBuilder:
    """The builder that a configuration names, or carries itself."""
    return BUILDERS[builder]() if isinstance(builder, str) else builder
