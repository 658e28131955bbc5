"""What stands for a block in the index: anchors, offsets, sketches, in the form they are stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .anchor_config import AnchorConfig
from .anchors import builder_of
from .kernels import ops


class BlockSummary(NamedTuple):
    """N blocks of P anchors each, in the index's number formats.

    anchors: ``[B, H_kv, N P, D]``, int8 or the keys' dtype.
    offsets: ``[B, H_kv, N P, 1]``, fp32.
    anchor_scales: ``[B, H_kv, N P, 1]`` of anchors in int8, otherwise None.
    bits: the sketches of the tokens, ``[B, H_kv, N, n * bytes]``; None without them.
    sketch_scales: ``[B, H_kv, N, n]``, nan for padding; None without sketches.
    centres: points amid the blocks, as they follow from the stored anchors, ``[B, H_kv, N, D]``.
    """

    anchors: torch.Tensor
    offsets: torch.Tensor
    anchor_scales: torch.Tensor | None
    bits: torch.Tensor | None
    sketch_scales: torch.Tensor | None
    centres: torch.Tensor


def summarise_blocks(
    blocks: torch.Tensor,
    valid: torch.Tensor | None,
    config: AnchorConfig,
    perspectives: torch.Tensor | None = None,
) -> BlockSummary:
    """Summarise blocks of keys ``[B, H_kv, N, n, D]``.

    Args:
        blocks: the keys, after RoPE.
        valid: ``[B, 1, N, n]``, False for padding; None when all tokens are real.
        config: builder and number formats.
        perspectives: ``[B, H_kv, P, D]`` for builders that look at queries.
    """
    builder = builder_of(config.builder)
    anchors, offsets = builder.summarise(blocks, perspectives, valid)
    offsets = offsets.flatten(2, 3).unsqueeze(-1)
    stored, anchor_scales = anchors, None
    if config.anchor_dtype == "int8":
        stored, scales = ops.quantize_int8(anchors)
        anchor_scales = scales.flatten(2, 3).unsqueeze(-1)
        anchors = stored * scales.unsqueeze(-1)
    # Sketches and radii are relative to the anchors as they will be read.
    centres = builder.centre(anchors.float())
    bits = sketch_scales = None
    if config.refine == "sketch":
        bits, sketch_scales = ops.sketch_tokens(blocks, config.sketch_bits, centres)
        if valid is not None:
            sketch_scales = sketch_scales.masked_fill(~valid.unsqueeze(-1), float("nan"))
        bits, sketch_scales = bits.flatten(3), sketch_scales.flatten(3)
    return BlockSummary(stored.flatten(2, 3), offsets, anchor_scales, bits, sketch_scales, centres)
