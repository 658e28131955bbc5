"""Attention in plain PyTorch: over chosen blocks, of chosen rows, and what it pays to each key.
Shapes as in :mod:`reference`."""

from __future__ import annotations

import torch


def log_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The true log attention mass of groups of keys.

    Args:
        query: ``[B, H, D]``, times the softmax scale.
        keys: ``[B, H_kv, N, n, D]``.
        valid: ``[B, 1 or H_kv, N, n]``; None when all count.
        softcap: of the logits, if the model has one.

    Returns:
        ``[B, H_kv, G, N]`` in fp32.
    """
    b, h_kv, n_blocks, size, dim = keys.shape
    grouped = query.float().reshape(b, h_kv, -1, dim)
    logits = torch.matmul(grouped, keys.float().flatten(2, 3).transpose(-1, -2))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.unflatten(-1, (n_blocks, size))
    if valid is not None:
        logits = logits.masked_fill(~valid.unsqueeze(2), float("-inf"))
    return logits.logsumexp(-1)


def _attention_logits(query, keys, scaling, mask, softcap) -> torch.Tensor:
    """In fp32, ``[B, H, R, D]``, ``[B, H_kv, L, D]`` -> ``[B, H, R, L]``; the mask is boolean or
    additive and broadcasts to that."""
    b, heads, rows, dim = query.shape
    grouped = (query.float() * scaling).reshape(b, keys.shape[1], -1, dim)
    logits = torch.matmul(grouped, keys.float().transpose(-1, -2)).view(b, heads, rows, -1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    # In place: fresh memory for so many numbers costs more than the arithmetic.
    if mask is not None and mask.dtype == torch.bool:
        logits.masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        logits += mask
    return logits


def attention_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The true attention weights of one query token: ``[B, H, D]``, ``[B, H_kv, L, D]`` ->
    ``[B, H, L]`` in fp32. ``mask``, if any, is boolean ``[B, L]``."""
    mask = None if mask is None else mask[:, None, None]
    logits = _attention_logits(query.unsqueeze(2), keys, scaling, mask, softcap)
    return logits.softmax(-1)[:, :, 0]


# Attention weights held at once, in numbers (64 MiB in fp32).
_ATTENTION_FLOATS = 2**24


def mask_of_rows(
    length: int,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    window: int | None,
    visible: torch.Tensor | None,
) -> torch.Tensor | None:
    """What rows see of ``length`` keys: all that every argument allows, ``[..., R, length]``.

    Args:
        length: keys.
        mask: ``[..., R, length]``, boolean or additive.
        positions: a row's own place among the keys ``[R]``; it sees nothing behind it.
        window: only the newest so many keys up to that place are seen.
        visible: ``[length]``, False for keys that nobody sees.

    Raises:
        ValueError: ``window`` without ``positions``.
    """
    if window is not None and positions is None:
        raise ValueError(f"window={window} needs the positions of the rows")
    seen = None if visible is None else visible[None]
    if positions is not None:
        behind = positions[:, None] - torch.arange(length, device=positions.device)
        causal = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        seen = causal if seen is None else causal & seen
    if seen is None or mask is None:
        return mask if seen is None else seen[None, None]
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def attention_received(
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    positions: torch.Tensor | None = None,
    window: int | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """The largest attention weight that any head and query pays to each key.

    Args:
        query: ``[1, H, R, D]``.
        keys: ``[1, H_kv, L, D]``.
        scaling: softmax scale.
        mask: ``[1, 1, R, L]``, boolean or additive; None when all keys are seen.
        softcap: of the logits, if the model has one.
        positions, window, visible: limits besides ``mask``, see :func:`mask_of_rows`.

    Returns:
        ``[L]`` in fp32.
    """
    heads, length = query.shape[1], keys.shape[2]
    received = torch.zeros(length, device=keys.device)
    rows = max(_ATTENTION_FLOATS // (heads * length), 1)
    for start in range(0, query.shape[2], rows):
        part = slice(start, start + rows)
        own = None if mask is None else mask[:, :, part]
        places = None if positions is None else positions[part]
        own = mask_of_rows(length, own, places, window, visible)
        logits = _attention_logits(query[:, :, part], keys, scaling, own, softcap)
        largest = logits.log_softmax(-1).flatten(0, 2).amax(0)
        received = torch.maximum(received, largest.exp())
    return received


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    scaling: float | None = None,
    positions: torch.Tensor | None = None,
    window: int | None = None,
    visible: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of some rows of a prompt. Every row has to see some key.

    In bfloat16 on a CPU the logits are rounded to it, as in the models' eager attention: torch's
    own attention, which is written for many rows, takes 1.5 x as long for 64.

    Args:
        query: ``[B, H, R, D]``.
        keys: ``[B, H_kv, L, D]``.
        values: ``[B, H_kv, L, D_v]``.
        mask: ``[1 or B, 1, R, L]``, boolean or additive; None when all keys are seen.
        scaling: softmax scale; None for ``D ** -0.5``.
        positions: a row's own place among the keys ``[R]``, int64, ascending; it sees nothing
            behind it. None when that is no limit.
        window: only the newest so many keys up to that place are seen; None for all.
        visible: ``[L]``, False for keys that nobody sees; None when all are seen.
        softcap: of the logits, if the model has one.
        sinks: ``[H]``, a logit per head that takes attention without a value, if the model has one.

    Returns:
        ``[B, H, R, D_v]`` in the query's dtype.

    Raises:
        ValueError: ``window`` without ``positions``.
    """
    b, heads, rows, dim = query.shape
    scaling = dim**-0.5 if scaling is None else scaling
    mask = mask_of_rows(keys.shape[2], mask, positions, window, visible)
    if softcap is not None or sinks is not None:
        logits = _attention_logits(query, keys, scaling, mask, softcap)
        if sinks is not None:
            own = sinks.float().view(1, heads, 1, 1).expand(b, -1, rows, 1)
            logits = torch.cat((logits, own), -1)
        weights = logits.softmax(-1)[..., : keys.shape[2]]
        grouped = weights.reshape(b, keys.shape[1], -1, keys.shape[2])
        return torch.matmul(grouped, values.float()).view(b, heads, rows, -1).to(query.dtype)
    if query.dtype != torch.bfloat16 or query.device.type != "cpu":
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, mask, scale=scaling, enable_gqa=bool(heads != keys.shape[1])
        ).contiguous()
    grouped = (query * scaling).reshape(b, keys.shape[1], -1, dim)
    logits = torch.matmul(grouped, keys.transpose(-1, -2)).view(b, heads, rows, -1)
    if mask is not None and mask.dtype == torch.bool:
        logits.masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        logits.add_(mask)
    weights = logits.softmax(-1).view(b, keys.shape[1], -1, keys.shape[2])
    return torch.matmul(weights, values).view(b, heads, rows, -1)


def attend_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    block_size: int,
    scaling: float,
    shifts: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    length: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token over chosen blocks of tokens, without a gathered copy.

    Args:
        query: ``[B, H, D]``.
        keys: ``[B, H_kv, L, D]``, where only the last dimension need be dense.
        values: ``[B, H_kv, L, D_v]`` likewise.
        blocks: ``[B, H_kv, K]`` or, with a choice per query head, ``[B, H, K]``, int64: block g
            holds the tokens ``shift + g * block_size`` and on. Distinct; -1 for none.
        block_size: tokens per block.
        scaling: softmax scale.
        shifts: ``[B]``, the token at which block 0 of each row starts; None for 0.
        visible: ``[B, L]``, False for tokens that nobody sees; None when all are seen.
        length: tokens of the cache, int64 ``[]``; the rest of the buffers is not read. None for L.
        window: only the newest so many tokens are seen; None for all.
        softcap: of the logits, if the model has one.
        sinks: ``[H]``, a logit per head that takes attention without a value, if the model has one.

    Returns:
        The output ``[B, H, D_v]`` in the query's dtype and the log-sum-exp of the logits
        ``[B, H]`` in fp32, sinks included. A head that sees nothing gives 0 and -inf.
    """
    b, heads, dim = query.shape
    n_kv_heads, capacity = keys.shape[1], keys.shape[2]
    end = capacity if length is None else length
    starts = blocks * block_size
    if shifts is not None:
        starts = starts + shifts[:, None, None]
    tokens = starts.unsqueeze(-1) + torch.arange(block_size, device=blocks.device)
    seen = ((blocks >= 0).unsqueeze(-1) & (tokens < end)).flatten(2)
    if window is not None:
        seen = seen & (tokens >= end - window).flatten(2)
    tokens = tokens.flatten(2).clamp(0, capacity - 1)
    if visible is not None:
        seen = seen & visible[:, None].expand(-1, tokens.shape[1], -1).gather(2, tokens)

    def chosen(states: torch.Tensor) -> torch.Tensor:  # [B, H_r, 1, S, D]
        per_head = tokens.shape[1] // n_kv_heads
        each = states.repeat_interleave(per_head, 1) if per_head > 1 else states
        index = tokens.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1])
        return each.gather(2, index).unsqueeze(2).float()

    grouped = query.float().reshape(b, tokens.shape[1], -1, 1, dim)
    logits = torch.matmul(grouped * scaling, chosen(keys).transpose(-1, -2))  # [B, H_r, g, 1, S]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen[:, :, None, None], float("-inf"))
    if sinks is not None:
        own = sinks.float().view(1, tokens.shape[1], -1, 1, 1).expand(b, -1, -1, -1, -1)
        logits = torch.cat((logits, own), -1)
    mass = logits.logsumexp(-1, keepdim=True)
    weights = (logits - mass).exp().nan_to_num(0.0)[..., : tokens.shape[2]]
    # What is not seen may be anything, also nan, which no weight of 0 would keep out.
    seen_values = chosen(values).masked_fill(~seen[:, :, None, :, None], 0.0)
    output = torch.matmul(weights, seen_values)
    return output.view(b, heads, -1).to(query.dtype), mass.view(b, heads)
