"""Telling models apart: stored keys and values belong to one set of weights."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

# Fields that say where a model came from or what it returns, not what it computes; its tensors say
# their dtypes themselves.
_INCIDENTAL = (
    "_name_or_path",
    "_attn_implementation",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "transformers_version",
    "use_cache",
)
_SAMPLES = 3  # of every tensor, to notice changes that are not counted
_MODULE = frozenset(vars(torch.nn.Module()))  # fields that every module has
_known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple, str]] = weakref.WeakKeyDictionary()


def model_identity(model: PreTrainedModel) -> str:
    """A digest of the model's class, configuration and weights, the same in every process.

    Every weight enters, through sums of its bits over rows and over columns, and so does which
    adapters are switched on, merged and scaled how. The digest is worked out anew when any of this
    changed since the last call. What is written through ``.data`` or to inference tensors is not
    counted by PyTorch: it is noticed by a few samples of every tensor.
    """
    described = _description(model)
    # Buffers outside the state are tables that forward may change (rotary frequencies).
    tensors = model.state_dict(keep_vars=True)
    state = (
        described,
        _samples(tensors.values()),
        *((t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype) for t in tensors.values()),
    )
    if _known.get(model, (None,))[0] != state:
        _known[model] = (state, _digest(described, tensors))
    return _known[model][1]


def _description(model: PreTrainedModel) -> str:
    about = [type(model).__qualname__, _essential(model.config.to_dict())]
    return json.dumps(about, sort_keys=True, default=str) + _adapter_settings(model)


def _essential(config: dict) -> dict:
    own = {k: v for k, v in config.items() if k not in _INCIDENTAL}
    return {k: _essential(v) if isinstance(v, dict) else v for k, v in own.items()}


@torch.no_grad()
def _samples(tensors: Iterable[torch.Tensor]) -> bytes:
    """The bits of a few numbers of every tensor, fetched from each device at once."""
    groups: dict[tuple, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            flat = tensor if tensor.is_contiguous() else tensor.contiguous()
            some = flat.view(-1)[:: max(1, tensor.numel() // _SAMPLES)]
            groups.setdefault((tensor.device, tensor.dtype), []).append(some)
    return b"".join(torch.cat(g).view(torch.uint8).cpu().numpy().tobytes() for g in groups.values())


@torch.no_grad()
def _digest(described: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(described.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for sums in _bit_sums(tensor):
            digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()


def _adapter_settings(model: PreTrainedModel) -> str:
    """What modules with adapters say of themselves besides tensors: PEFT's layers keep there what
    is active, disabled, merged and scaled. Other modules may keep what changes from call to call.
    """
    settings = {}
    for name, module in model.named_modules():
        if any("adapter" in field for field in vars(module)):
            own = {k: v for k, v in vars(module).items() if k not in _MODULE and v and _is_plain(v)}
            settings[name] = own
    return json.dumps(settings, sort_keys=True, default=sorted) if settings else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def _bit_sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Integer sums, so that neither threads nor devices change them."""
    if tensor.numel() == 0:
        return []
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
    bits = bits.view(1, -1) if bits.dim() < 2 else bits.flatten(0, -2)
    return [bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)]


def require_inference(model: PreTrainedModel) -> None:
    """Raise ValueError where the model would compute something else than its identity says, or is
    none."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model={model!r} is not valid: a model of transformers")
    if model.training:  # its dropout would be stored
        raise ValueError("model is in training mode: call model.eval() first")
    device = model.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise ValueError(
            "torch.autocast is on, so that keys and values would not be in the model's dtype, and "
            "chunks not what their store says: leave it, or load the model in the smaller dtype"
        )
