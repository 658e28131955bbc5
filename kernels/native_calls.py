"""Calls of the compiled library, and what they can take.

A call hands over one packed struct of 8-byte numbers (``csrc/*.h``), which costs a few
microseconds where ctypes' conversion of as many arguments would cost more than the smaller
operations themselves.
"""

from __future__ import annotations

import torch

from . import native

# As numbered in csrc/vectors.h.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def call(name: str, arguments: bytes) -> None:
    """Run a function of the library on its packed struct.

    Raises:
        MemoryError: there is no memory for intermediate results.
        IndexError: a slot is not that of a stored block.
    """
    status = getattr(native.library(), name)(arguments)
    if status == 1:
        raise MemoryError(f"{name}: no memory for intermediate results")
    if status == 2:
        raise IndexError(f"{name}: slots: a number is not that of a stored block")


def why_not_tensors(*tensors: torch.Tensor | None) -> str | None:
    """Reasons that hold for every operation."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return f"a tensor lies on {tensor.device}, not on the CPU"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "it has no gradients"
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return f"a tensor is a {type(tensor).__name__}"
    return None


def address(tensor: torch.Tensor | None) -> int:
    """0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
