"""In which dtype Triton kernels multiply."""

from __future__ import annotations

import torch
import triton.language as tl

from .lazy_triton import is_interpreting

_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
FLOATS = tuple(_DTYPES)


def operand_dtype(dtype: torch.dtype) -> tl.dtype:
    """The operands of products of this dtype; sums are always in fp32. The interpreter can convert
    bfloat16, but takes its bits for integers when it computes."""
    if dtype == torch.bfloat16 and is_interpreting():
        return tl.float32
    return _DTYPES[dtype]
