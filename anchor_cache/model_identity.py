"""Telling models apart: stored keys and values belong to one set of weights."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

_SAMPLES = 64
# Fields that say where a model came from or how it is run, not what it computes.
_INCIDENTAL = ("_name_or_path", "transformers_version", "use_cache", "_attn_implementation")


@torch.no_grad()
def model_identity(model: PreTrainedModel) -> str:
    """A digest of the model's configuration, dtype and weights, the same in every process.

    Weights enter by name, shape and 64 evenly spaced values of every parameter and buffer, so an
    adapter or a fine-tuned copy has another identity.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _INCIDENTAL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    samples = []
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.flatten()
        step = max(flat.numel() // _SAMPLES, 1)
        samples.append(flat[::step][: _SAMPLES + 1].to(torch.float32))
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()
