"""Merging partial attention over splits of the tokens in Triton, always in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_SPLITS = 128


@triton.jit(do_not_specialize=["n_splits"])
def _merge_splits_kernel(
    outputs,
    masses,
    sinks,
    output,
    mass,
    n_splits,
    n_heads,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    masses += row * n_splits
    outputs += row * n_splits * VALUE_DIM
    every = tl.arange(0, MOST_SPLITS)
    logits = tl.load(masses + every, mask=every < n_splits, other=float("-inf"))
    largest = tl.max(logits, 0)
    if sinks is not None:
        sink = tl.load(sinks + row % n_heads).to(tl.float32)
        largest = tl.maximum(largest, sink)
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(logits - reference), 0)
    if sinks is not None:
        total += tl.exp(sink - reference)
    tl.store(mass + row, reference + tl.log(total))

    channel = tl.arange(0, VALUE_DIM_PADDED)
    inside = channel < VALUE_DIM
    merged = tl.zeros((VALUE_DIM_PADDED,), tl.float32)
    for start in tl.range(0, n_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        here = split < n_splits
        weight = tl.exp(tl.load(masses + split, mask=here, other=float("-inf")) - reference)
        part = tl.load(
            outputs + split[:, None] * VALUE_DIM + channel[None, :],
            mask=here[:, None] & inside[None, :],
            other=0.0,
        )
        merged += tl.sum(weight[:, None] * part, 0)
    merged /= tl.where(total == 0.0, 1.0, total)
    merged = merged.to(output.dtype.element_ty)
    tl.store(output + row * VALUE_DIM + channel, merged, mask=inside)


def merged_splits(
    outputs: torch.Tensor,
    masses: torch.Tensor,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all splits from that over each.

    Args:
        outputs: ``[B, H, splits, D_v]``, fp32, contiguous; at most :data:`MOST_SPLITS`.
        masses: the log-sum-exp of the logits, ``[B, H, splits]``, fp32, contiguous.
        sinks: ``[H]``, as in :func:`reference_attention.attend_blocks`.
        dtype: of the merged output.

    Returns:
        ``[B, H, D_v]`` and ``[B, H]`` in fp32.
    """
    b, heads, n_splits, value_dim = outputs.shape
    output = torch.empty((b, heads, value_dim), dtype=dtype, device=outputs.device)
    mass = torch.empty((b, heads), dtype=torch.float32, device=outputs.device)
    value_dim_padded = max(triton.next_power_of_2(value_dim), 16)
    _merge_splits_kernel[(b * heads,)](
        outputs,
        masses,
        None if sinks is None else sinks.contiguous(),
        output,
        mass,
        n_splits,
        heads,
        VALUE_DIM=value_dim,
        VALUE_DIM_PADDED=value_dim_padded,
        MOST_SPLITS=MOST_SPLITS,
        # As many loads at once as registers allow: to wait for them one by one would take longer
        # than everything before.
        SPLITS=min(4096 // value_dim_padded, MOST_SPLITS),
        num_warps=4,
    )
    return output, mass
