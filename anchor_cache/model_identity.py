"""Telling models apart: stored keys and values belong to one set of weights."""

from __future__ import annotations

import hashlib
import json
import weakref

import torch
from transformers import PreTrainedModel

# Fields that say where a model came from or what it returns, not what it computes.
_INCIDENTAL = (
    "_name_or_path",
    "_attn_implementation",
    "bos_token_id",
    "eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "transformers_version",
    "use_cache",
)
_known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple, str]] = weakref.WeakKeyDictionary()


def model_identity(model: PreTrainedModel) -> str:
    """A digest of the model's configuration, dtype and weights, the same in every process.

    Every weight enters, through sums of its bits over rows and over columns. The digest is worked
    out anew when the model's tensors were replaced or changed in place since the last call.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = tuple(
        (t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype) for t in tensors.values()
    )
    if _known.get(model, (None,))[0] != state:
        _known[model] = (state, _digest(model))
    return _known[model][1]


@torch.no_grad()
def _digest(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _INCIDENTAL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    # Buffers outside the state are tables that forward may change (rotary frequencies).
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for sums in _bit_sums(tensor):
            digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()


def _bit_sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Integer sums, so that neither threads nor devices change them."""
    if tensor.numel() == 0:
        return []
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
    bits = bits.view(1, -1) if bits.dim() < 2 else bits.flatten(0, -2)
    return [bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)]
