"""Triton implementations, imported when a call first can use them.

Importing triton takes as long as importing the rest of the library, and it may not be there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os

import torch

from .dispatch import Implementation, is_forced

_IS_INSTALLED = importlib.util.find_spec("triton") is not None
# Tensor cores for bfloat16, and copies to shared memory that do not block.
_LEAST_CAPABILITY = (8, 0)


def triton_kernel(module: str) -> Implementation:
    """The implementation in ``module`` of this folder: its ``why_not`` and its ``run``, which are
    asked about tensors that Triton can reach."""

    def why_not(*args, **kwargs) -> str | None:
        reason = out_of_reach([t for t in (*args, *kwargs.values()) if torch.is_tensor(t)])
        return reason or _imported(module).why_not(*args, **kwargs)

    def run(*args, **kwargs):
        # Triton launches on the current device, wherever the tensors are.
        index = args[0].get_device()
        with contextlib.nullcontext() if index < 0 else torch.cuda.device(index):
            return _imported(module).run(*args, **kwargs)

    return Implementation("triton", why_not, run)


def out_of_reach(tensors: list[torch.Tensor]) -> str | None:
    """Why Triton cannot read these tensors. On the CPU only its interpreter can, which is slow, so
    it has to be asked for with ``use_implementation("triton")``."""
    if not _IS_INSTALLED:
        return "triton is not installed"
    device = tensors[0].device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "a GPU of compute capability below 8.0"
    if any(t.device != device for t in tensors):
        return "tensors on different devices"
    if device.type == "cpu" and not (is_interpreting() and is_forced("triton")):
        return "tensors on the CPU"
    if device.type not in ("cpu", "cuda"):
        return f"tensors on {device}, not on a CUDA device"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient is wanted"
    return None


def is_interpreting() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _imported(module: str):
    return importlib.import_module(f".{module}", __package__)
