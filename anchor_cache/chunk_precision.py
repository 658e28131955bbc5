"""The dtypes in which keys and values are stored."""

from __future__ import annotations

import torch

MODEL, INT8 = "model", "int8"
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def storage_dtype(dtype: torch.dtype | str | None, model: torch.dtype) -> str:
    """The name of a storage dtype, as :class:`ChunkKey` has it.

    Args:
        dtype: None for the model's own, ``"int8"``, or a float dtype that is not wider.
        model: the model's dtype.

    Raises:
        ValueError: any other dtype.
    """
    name = MODEL if dtype is None else str(dtype).removeprefix("torch.")
    if name in (MODEL, str(model).removeprefix("torch.")):
        return MODEL
    if name == INT8 or name in _FLOATS and _FLOATS[name].itemsize <= model.itemsize:
        return name
    raise ValueError(
        f"dtype={dtype!r} is not valid: use None for the model's own dtype ({model}), 'int8', "
        "or torch.bfloat16 or torch.float16 where that is no wider than the model's own"
    )


def pack(states: torch.Tensor, dtype: str, name: str) -> dict[str, torch.Tensor]:
    """Keys or values ``[1, H_kv, T, D]`` as the tensors that are stored for them.

    int8 is symmetric, with one fp32 scale per token and head: no number is off by more than half
    a step, the largest one of its token and head by 127.

    Args:
        states: what to store.
        dtype: from :func:`storage_dtype`.
        name: "keys" or "values", the name of the tensor.

    Raises:
        ValueError: they do not fit into ``dtype``.
    """
    if dtype == MODEL:
        return {name: states}
    if dtype != INT8:
        packed = {name: states.to(_FLOATS[dtype])}
    else:
        scales = states.float().abs().amax(-1, keepdim=True) / 127
        steps = states.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)
        packed = {f"{name}_scales": scales, name: steps.round().clamp(-127, 127).to(torch.int8)}
    if not all(torch.isfinite(tensor).all() for tensor in packed.values()):
        raise ValueError(
            f"dtype={dtype!r} cannot hold these {name}, which reach "
            f"{states.abs().max().item():.4g}: make the store with dtype=None, or with "
            "torch.bfloat16 or 'int8' if they are finite"
        )
    return packed


def unpack(packed: dict[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`pack`, up to its rounding, in the model's dtype."""
    states, scales = packed[name], packed.get(f"{name}_scales")
    return (states if scales is None else states * scales).to(dtype)
