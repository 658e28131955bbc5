"""Sketches of keys at one or two bits per channel, in plain PyTorch (kin of RaBitQ, TurboQuant).

A key less the centre of its block is turned by a fixed random rotation, which spreads it evenly
over the channels, and only the sign of each channel is kept, or its sign and whether it is large.
Shapes as in :mod:`reference`.
"""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def sketch_rotation(dim: int, device: torch.device) -> torch.Tensor:
    """A fixed random orthogonal matrix ``[dim, dim]``, the same everywhere."""
    generator = torch.Generator().manual_seed(dim)
    matrix = torch.randn((dim, dim), generator=generator, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(matrix).Q.contiguous().to(device, torch.float32)


def _planes(rotated: torch.Tensor, n_bits: int) -> torch.Tensor:
    """Signs as booleans ``[..., n_bits, D]``: a channel stands for ``sum_p 2^(n_bits-1-p) sign_p``.

    With two bits the levels are -3, -1, 1, 3; the threshold between 1 and 3 is the root mean
    square of the channels, which is near the best for normally distributed ones.
    """
    positive = rotated > 0
    if n_bits == 1:
        return positive.unsqueeze(-2)
    large = rotated.abs() > rotated.square().mean(-1, keepdim=True).sqrt()
    return torch.stack((positive, large == positive), -2)


def _levels(planes: torch.Tensor) -> torch.Tensor:
    """What the channels stand for, ``[..., n_bits, D]`` -> ``[..., D]`` in fp32."""
    n_bits = planes.shape[-2]
    levels = torch.zeros(planes.shape[:-2] + planes.shape[-1:], device=planes.device)
    for plane in range(n_bits):
        levels += 2 ** (n_bits - 1 - plane) * (2.0 * planes[..., plane, :] - 1)
    return levels


def sketch_tokens(
    residuals: torch.Tensor, n_bits: int = 1, centres: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep ``n_bits`` per channel of rotated residuals, and one scale per token.

    Args:
        residuals: keys less the centre of their block, ``[..., D]``; or blocks of keys
            ``[..., n, D]``, where only the last dimension need be dense, with ``centres``.
        n_bits: 1 or 2.
        centres: what is to be taken from the keys, ``[..., D]`` in fp32.

    Returns:
        bits ``[..., n_bits * ceil(D / 8)]`` uint8, plane after plane, the first channel in the
        lowest bit, and scales ``[..., 1]`` fp16 with which the levels estimate inner products
        without bias along the residual.
    """
    residuals = residuals.float()
    if centres is not None:
        residuals = residuals - centres.unsqueeze(-2)
    rotated = residuals @ sketch_rotation(residuals.shape[-1], residuals.device)
    planes = _planes(rotated, n_bits)
    aligned = (rotated * _levels(planes)).sum(-1, keepdim=True)
    scales = rotated.square().sum(-1, keepdim=True) / aligned.clamp(min=1e-12)
    bits = torch.nn.functional.pad(planes, (0, -rotated.shape[-1] % 8)).unflatten(-1, (-1, 8))
    powers = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits * powers).sum(-1, dtype=torch.uint8).flatten(-2), scales.half()


def empty_sketches(residuals, n_bits=1, centres=None):
    """Tensors of the shapes that :func:`sketch_tokens` gives, for tracing."""
    *shape, dim = residuals.shape
    bits = residuals.new_empty((*shape, n_bits * -(-dim // 8)), dtype=torch.uint8)
    return bits, residuals.new_empty((*shape, 1), dtype=torch.float16)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _signs_of_bytes(device: torch.device) -> torch.Tensor:
    """``[256, 8]``: the signs that a byte of a sketch stands for."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return (2 * bits - 1).float()


def score_sketches(
    query: torch.Tensor,
    bits: torch.Tensor,
    scales: torch.Tensor,
    centres: torch.Tensor,
    slots: torch.Tensor | None = None,
    piece: int | None = None,
    padded: bool = False,
    softcap: float | None = None,
) -> torch.Tensor:
    """Estimate the log attention mass of blocks, or of pieces of them, from the sketches of their
    tokens.

    Every byte of a sketch looks up what its eight signs add to the inner product, so that the
    signs are never unpacked.

    Args:
        query: ``[B, H, D]``, times the softmax scale.
        bits: ``[B, H_kv, N, n * n_bits * ceil(D / 8)]``, those of :func:`sketch_tokens` token
            after token.
        scales: ``[B, H_kv, N, n]``; nan for padding.
        centres: logits of the centres of the blocks that are asked for, ``[B, H_r, H / H_r, C]``.
        slots: the blocks that are asked for, ``[B, H_r, C]`` int64, one set per key/value head or
            per query head; None for all N in order.
        piece: tokens per piece, a divisor of n; None for whole blocks.
        padded: whether there may be padding.
        softcap: of the logits, if the model has one.

    Returns:
        ``[B, H_r, H / H_r, n / piece * C]`` in fp32; -inf for nothing but padding.
    """
    b, h_r, group, n_blocks = centres.shape
    size = scales.shape[3]
    piece = size if piece is None else piece
    bits, scales = _picked(bits, slots, h_r), _picked(scales, slots, h_r)
    width = bits.shape[3] // size
    dim = query.shape[-1]
    per_plane = -(-dim // 8)
    n_bits = width // per_plane
    rotated = query.float() @ sketch_rotation(dim, query.device)
    rotated = torch.nn.functional.pad(rotated, (0, 8 * per_plane - dim))
    grouped = rotated.view(b * h_r, group, per_plane, 8).permute(0, 2, 3, 1)
    if n_bits > 1:
        grouped = torch.cat([2 ** (n_bits - 1 - p) * grouped for p in range(n_bits)], 1)
    sums = _signs_of_bytes(query.device) @ grouped  # [B H_r, width, 256, g]
    tables = 256 * torch.arange(b * h_r * width, dtype=torch.int32, device=query.device)
    index = bits.reshape(b * h_r, -1, width).int() + tables.view(b * h_r, 1, width)
    logits = torch.nn.functional.embedding_bag(
        index.view(-1, width), sums.flatten(0, 2), mode="sum"
    )
    # Query heads first, or none of the passes below runs over contiguous numbers.
    logits = logits.view(b, h_r, n_blocks * size, group).transpose(-1, -2).contiguous()
    scales = scales.float().reshape(b, h_r, 1, -1)
    logits = logits.mul_(scales).unflatten(-1, (n_blocks, -1))
    logits.add_(centres.unsqueeze(-1))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if padded:
        logits.masked_fill_(scales.isnan().view(b, h_r, 1, n_blocks, size), float("-inf"))
    # As rows and not as small blocks, or none of the passes below is vectorised.
    rows = logits.flatten(3)
    largest = rows.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    rows = rows.sub_(largest).exp_()
    # A matrix-vector product sums a few numbers at a time faster than sum() does.
    sums = torch.mv(rows.view(-1, piece), rows.new_ones(piece)).view(b, h_r, group, -1)
    return sums.log_().add_(largest)


def _picked(stored: torch.Tensor, slots: torch.Tensor | None, heads: int) -> torch.Tensor:
    """What is stored per block, ``[B, H_kv, N, X]``, by slot, ``[B, H_r, C, X]``."""
    per_head = heads // stored.shape[1]
    if slots is None:
        return stored.repeat_interleave(per_head, 1) if per_head > 1 else stored
    batch = torch.arange(slots.shape[0], device=slots.device)[:, None, None]
    head = torch.arange(heads, device=slots.device)[:, None] // per_head
    return stored[batch, head, slots]


def empty_sketch_scores(query, bits, scales, centres, slots=None, piece=None, *_, **__):
    """A tensor of the shape that :func:`score_sketches` gives, for tracing."""
    b, heads, group, n_blocks = centres.shape
    pieces = n_blocks * (scales.shape[3] // (scales.shape[3] if piece is None else piece))
    return query.new_empty((b, heads, group, pieces), dtype=torch.float32)
