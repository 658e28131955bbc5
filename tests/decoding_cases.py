"""Calls of the operations of decoding, with everything nan that must not be read."""

import torch
from anchor_cache.kernels import ops

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def padded_view(tensor, dim):
    """The same numbers inside a larger buffer of nan, as a cache with room to grow has them."""
    shape = list(tensor.shape)
    shape[dim] += 3
    buffer = torch.full(shape, NAN if tensor.is_floating_point() else 77, dtype=tensor.dtype)
    buffer.narrow(dim, 2, tensor.shape[dim]).copy_(tensor)
    return buffer.narrow(dim, 2, tensor.shape[dim])


def anchor_case(dtype, h_kv=2, group=3, n_blocks=37, n_anchors=1, dim=16, int8=False):
    query = torch.randn(2, h_kv * group, dim, dtype=dtype)
    anchors = torch.randn(2, h_kv, n_blocks, n_anchors, dim, dtype=dtype)
    offsets = torch.randn(2, h_kv, n_blocks, 1).expand(-1, -1, -1, n_anchors)
    offsets = padded_view(offsets, 2)
    offsets[1, :, :2] = -INF
    scales = None
    if int8:
        anchors, scales = ops.quantize_int8(anchors)
        scales = padded_view(scales, 2)
    return query, padded_view(anchors, 2), offsets, scales


def sketch_case(
    dim=64, n_bits=1, size=6, h_kv=2, heads=None, group=3, n_slots=7, given=True, padded=True
):
    heads = h_kv if heads is None else heads
    residuals = torch.randn(2, h_kv, 13, size, dim)
    bits, scales = ops.sketch_tokens(residuals, n_bits)
    bits, scales = bits.flatten(3), scales.squeeze(-1)
    if padded:
        scales[0, 0, :, 0] = NAN
        scales[1, :, 3:5] = NAN
    else:  # never asked for
        bits, scales = padded_view(bits, 2), padded_view(scales, 2)
    slots = None
    if given:
        slots = torch.stack([torch.randperm(13)[:n_slots] for _ in range(2 * heads)])
        slots = slots.view(2, heads, n_slots)
    centres = torch.randn(2, heads, group, n_slots if given else 13)
    return torch.randn(2, heads * group, dim) / dim**0.5, bits, scales, centres, slots


def attention_case(
    dtype, size=4, n_blocks=9, chosen=5, dim=16, value_dim=8, h_kv=2, group=3, per_query_head=False
):
    heads = h_kv * (group if per_query_head else 1)
    length = size * n_blocks + 1
    numbers = [torch.randperm(n_blocks)[:chosen] for _ in range(2 * heads)]
    blocks = torch.stack(numbers).view(2, heads, chosen)
    blocks[0, 0, 1::3] = -1
    query = torch.randn(2, h_kv * group, dim, dtype=dtype)
    # As a model lays them out, heads after tokens, and with room to grow.
    states = [torch.randn(2, length, h_kv, d, dtype=dtype) for d in (dim, value_dim)]
    keys, values = (padded_view(x, 1).transpose(1, 2) for x in states)
    return query, keys, values, blocks, size, 0.3
