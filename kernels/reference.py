"""Every tensor operation of the library in plain PyTorch: the specification of the fast paths.

Shapes use B = batch, H = query heads, H_kv = key/value heads, G = H / H_kv, L = tokens in the
cache, N = blocks, n = tokens per block, P = anchors per block and key/value head, D = head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def build_anchors(keys: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summarise blocks of keys by weighted means.

    For weights w on the simplex, Gibbs' inequality gives
    ``log sum_j exp(q . k_j) >= q . (sum_j w_j k_j) - sum_j w_j log w_j``: the mean is the anchor,
    the entropy of w its offset.

    Args:
        keys: ``[B, H_kv, N, n, D]``.
        weights: ``[B, H_kv or 1, N, P, n]``, non-negative, each row summing to 1, or all zeros for
            a block that must never be read (its offset becomes ``-inf``).

    Returns:
        anchors ``[B, H_kv, N, P, D]`` in the keys' dtype and offsets ``[B, H_kv, N, P]`` in fp32.
    """
    anchors = torch.matmul(weights.to(keys.dtype), keys)
    offsets = torch.special.entr(weights.float()).sum(-1)
    offsets = offsets.masked_fill(weights.sum(-1) == 0, float("-inf"))
    return anchors, offsets.expand(anchors.shape[:-1])


def tangent_weights(
    keys: torch.Tensor, perspectives: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """``softmax(c . k)`` over the tokens of every block; arguments as for
    :func:`tangent_anchors`. ``[B, H_kv, N, P, n]`` in fp32."""
    logits = perspective_logits(keys, perspectives)
    if valid is None:
        return logits.softmax(-1)
    weights = logits.masked_fill(~valid.unsqueeze(3), float("-inf")).softmax(-1)
    return weights.nan_to_num_(0.0)


def perspective_logits(keys: torch.Tensor, perspectives: torch.Tensor) -> torch.Tensor:
    """Inner products of every key with its head's perspectives, ``[B, H_kv, N, P, n]`` in fp32."""
    logits = torch.matmul(keys, perspectives.unsqueeze(2).transpose(-1, -2).to(keys.dtype))
    return logits.float().transpose(-1, -2)


def uniform_weights(keys: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """The same weight for every real token of a block, ``[B, 1, N, 1, n]`` in fp32."""
    if valid is None:
        b, _, n_blocks, size, _ = keys.shape
        return torch.full((b, 1, n_blocks, 1, size), 1 / size, device=keys.device)
    weights = valid.unsqueeze(3).float()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1)


def tangent_anchors(
    keys: torch.Tensor,
    perspectives: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors and offsets as of :func:`build_anchors`, for the weights ``softmax(c . k)`` at every
    perspective c, or for uniform ones.

    Args:
        keys: ``[B, H_kv, N, n, D]``, where only the last dimension need be dense.
        perspectives: typical queries, times the softmax scale, ``[B, H_kv, P, D]`` in fp32; None
            for the plain mean, P = 1.
        valid: ``[B, 1, N, n]``, False for padding; None when all tokens are real.

    Returns:
        anchors ``[B, H_kv, N, P, D]`` in the keys' dtype and offsets ``[B, H_kv, N, P]`` in fp32,
        0 and ``-inf`` for a block of nothing but padding.
    """
    if perspectives is None:
        weights = uniform_weights(keys, valid)
    else:
        weights = tangent_weights(keys, perspectives, valid)
    anchors, offsets = build_anchors(keys, weights)
    return anchors, offsets.contiguous()


def score_anchors(
    query: torch.Tensor,
    anchors: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the log attention mass of every block: ``max_p (q . a_p + offset_p)``.

    Args:
        query: ``[B, H, D]``, times the softmax scale.
        anchors: ``[B, H_kv, N, P, D]``.
        offsets: ``[B, H_kv, N, P]``, fp32.
        scales: ``[B, H_kv, N, P]`` for anchors in int8, as :func:`quantize_int8` gives them.
        softcap: of the logits, if the model has one.

    Returns:
        The scores and the uncapped logits of the means of the blocks' anchors, both
        ``[B, H_kv, G, N]`` in fp32. Each query head uses all anchors of its key/value head: every
        one of them bounds the mass from below.
    """
    b, h_kv, n_blocks, n_anchors, dim = anchors.shape
    grouped = query.reshape(b, h_kv, -1, dim)
    rows = anchors.reshape(b, h_kv, -1, dim).to(query.dtype)
    logits = torch.matmul(rows, grouped.transpose(-1, -2))
    logits = logits.view(b, h_kv, n_blocks, n_anchors, -1).float()
    if scales is not None:
        logits = logits * scales[..., None]
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    scores = (capped + offsets[..., None]).amax(dim=3)
    means = logits.mean(dim=3)
    return scores.transpose(-1, -2).contiguous(), means.transpose(-1, -2).contiguous()


def quantize_int8(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round vectors ``[..., D]`` to int8 with one scale each, ``[...]`` fp32.

    Every channel is off by at most half a scale, 1/254 of the vector's largest channel.
    """
    largest = vectors.abs().amax(-1, keepdim=True).float()
    # Devices divide by a number in two ways, and multiply in one.
    scales = (largest * (1 / 127)).clamp(min=torch.finfo(torch.float32).tiny)
    return (vectors.float() / scales).round().to(torch.int8), scales.squeeze(-1)


def block_radii(
    blocks: torch.Tensor, centres: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest distance of a block's keys from its centre.

    By Cauchy-Schwarz no logit of the block exceeds ``q . centre + |q| radius``.

    Args:
        blocks: ``[B, H_kv, N, n, D]``.
        centres: ``[B, H_kv, N, D]``.
        valid: ``[B, 1, N, n]``, False for padding; None when all tokens are real.

    Returns:
        ``[B, H_kv, N]`` in fp32.
    """
    distances = (blocks.float() - centres.float().unsqueeze(3)).norm(dim=-1)
    if valid is not None:
        distances = distances.masked_fill(~valid, 0.0)
    return distances.amax(-1) * (1 + 1e-5)  # never below the true one by rounding


def gather_tokens(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pick tokens per batch row and head: ``[B, H, C, D]``, ``[B, H, S]`` -> ``[B, H, S, D]``.

    ``states`` must be contiguous; ``index`` is int64.
    """
    b, h, capacity, dim = states.shape
    base = torch.arange(b * h, device=states.device).view(b, h, 1) * capacity
    return states.view(-1, dim).index_select(0, (index + base).flatten()).view(b, h, -1, dim)


class RotaryLayout(NamedTuple):
    """How a model applies its rotary tables.

    pairing: "half" turns channel i with i + R/2, "interleaved" 2i with 2i + 1.
    table: "halves" when the two halves of the tables are equal, "repeated" when every entry
        stands twice in a row, "compact" when there is one entry per channel pair.
    """

    pairing: str
    table: str

    def pair_table(self, table: torch.Tensor) -> torch.Tensor:
        """One entry per channel pair: ``[..., T, R/2]``."""
        if self.table == "compact":
            return table
        return table[..., ::2] if self.table == "repeated" else table.chunk(2, -1)[0]


ROTARY_LAYOUTS = tuple(
    RotaryLayout(pairing, table)
    for pairing in ("half", "interleaved")
    for table in ("halves", "repeated", "compact")
)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout
) -> torch.Tensor:
    """Apply a rotary embedding (RoFormer) in the dtype of ``x``, as the models do.

    Args:
        x: ``[B, H, T, D]``; the first R channels are rotated, the rest passes through.
        cos, sin: the model's tables, ``[B or 1, T, R]``, or ``[B or 1, T, R/2]`` when compact.
        layout: which channels form a pair, and how the tables are laid out.
    """
    cos, sin = (layout.pair_table(t).unsqueeze(1) for t in (cos, sin))
    rotated = 2 * cos.shape[-1]
    if rotated > x.shape[-1]:
        raise ValueError(f"cos: {rotated} rotated channels do not fit a head of {x.shape[-1]}")
    head, rest = x[..., :rotated], x[..., rotated:]
    if layout.pairing == "half":
        first, second = head.chunk(2, -1)
    else:
        first, second = head[..., ::2], head[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if layout.pairing == "half":
        return torch.cat((*turned, rest), -1).to(x.dtype)
    return torch.cat((torch.stack(turned, -1).flatten(-2), rest), -1).to(x.dtype)


def rotate_into(
    out: torch.Tensor,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: int,
    pairing: str,
    table: str,
) -> None:
    """Write ``x``, rotated to the positions that follow ``start``, to these positions of ``out``.

    Args:
        out: ``[B, H, L, D]``, of the dtype of ``x``; the rest of it stays what it is.
        x: ``[B, H, T, D]``.
        cos, sin: tables of all L positions, as for :func:`rotate`.
        start: position of the first token.
        pairing, table: those of :class:`RotaryLayout`.
    """
    span = slice(start, start + x.shape[2])
    out[:, :, span] = rotate(x, cos[:, span], sin[:, span], RotaryLayout(pairing, table))


def replace_tokens(states: torch.Tensor, fresh: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Put fresh states in the place of old ones, and tell how far apart they were.

    Args:
        states: ``[B, H, L, D]``, written to.
        fresh: ``[B, H, R, D]``.
        rows: where they belong ``[R]``, int64, no two alike.

    Returns:
        The deviation of :func:`token_deviation`, ``[B, R]`` in fp32.
    """
    deviation = token_deviation(fresh, states.index_select(2, rows))
    states.index_copy_(2, rows, fresh)
    return deviation


def token_deviation(fresh: torch.Tensor, reused: torch.Tensor) -> torch.Tensor:
    """KV deviation (CacheBlend): the Euclidean distance of each token's states over all heads,
    ``[B, H, T, D]`` twice -> ``[B, T]`` in fp32."""
    return (fresh.float() - reused.float()).square().sum((1, 3)).sqrt()
