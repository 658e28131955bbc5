"""A second device where there is none: tensors on "meta" that do hold data.

Within :func:`second_device` tensors can be made on "meta" or copied there, and everything computes
as on the CPU. As on a real accelerator, an operation on tensors of both devices is an error, and
data passes only by explicit copies, which are counted.
"""

import contextlib
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")


class Elsewhere(torch.Tensor):
    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=DEVICE
        )

    def __init__(self, data):
        self.data_here = data

    def __repr__(self):
        return f"Elsewhere({self.data_here})"

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("used outside of second_device()")


class _Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.to_device, self.to_host = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        there = [isinstance(t, Elsewhere) for t in tensors]
        target = kwargs.get("device")
        goes = any(there)
        if func is torch.ops.aten._to_copy.default and target is not None:
            goes = target == DEVICE
            if goes != there[0]:
                (self.to_device if goes else self.to_host).append(tuple(tensors[0].shape))
        elif func is torch.ops.aten.copy_.default:
            goes = there[0]
            if there[0] != there[1]:
                (self.to_device if there[0] else self.to_host).append(tuple(tensors[1].shape))
        elif any(there) and not all(t or x.dim() == 0 for t, x in zip(there, tensors, strict=True)):
            raise RuntimeError(f"{func}: tensors on both devices, {[t.shape for t in tensors]}")
        elif target is not None:
            goes = target == DEVICE
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        plain = tree_map_only(Elsewhere, lambda t: t.data_here, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if not goes:
            return result
        known = {id(t.data_here): t for t in tensors if isinstance(t, Elsewhere)}

        def moved(tensor):
            return known[id(tensor)] if id(tensor) in known else Elsewhere(tensor)

        return tree_map_only(torch.Tensor, moved, result)


class _Literals(TorchFunctionMode):
    """``torch.tensor`` does not even look at the numbers for "meta"."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class _Autocast(torch.autocast):
    def __init__(self, device_type, *args, **kwargs):
        super().__init__("cpu" if device_type == DEVICE.type else device_type, *args, **kwargs)


@contextlib.contextmanager
def second_device(model):
    """Put a model on "meta", for good, and let it compute there; yields it, and the shapes of all
    tensors that are copied from one device to the other, as ``to_device`` and ``to_host``."""
    with mock.patch("torch.autocast", _Autocast), _Literals(), _Copies() as copies:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    moved = torch.nn.Parameter(Elsewhere(parameter.data), requires_grad=False)
                    module._parameters[name] = moved
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = Elsewhere(buffer)
        yield model, copies
