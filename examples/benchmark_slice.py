"""A slice of a large model: a few layers of its shapes with random weights, to decode with.

Eight of Llama-3.1-8B's 32 layers and a small vocabulary, so that the part that a whole model would
spend on its head does not hide what its layers cost.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# No divisor of a width, so that no two rows of a weight are alike.
_BLOCK = (1 << 22) - 3


def slice_config(layers: int = 8, **fields) -> LlamaConfig:
    """Shapes of Llama-3.1-8B; ``fields`` replace some."""
    shapes = dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1024,
        max_position_embeddings=1 << 18,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    return LlamaConfig(num_hidden_layers=layers, **{**shapes, **fields})


@torch.no_grad()
def slice_model(
    config: LlamaConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> LlamaForCausalLM:
    """A model with random weights, made in seconds: they repeat one block of random numbers.

    Args:
        config: its shapes; None for :func:`slice_config`.
        dtype, device: of the weights.
    """
    config = config or slice_config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # What is not a weight was computed on "meta", that is, not at all.
    rotary = type(model.model.rotary_emb)(config)
    model = model.to(dtype).to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    generator = torch.Generator().manual_seed(0)
    block = (0.02 * torch.randn(_BLOCK, generator=generator)).to(device, dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        for part in parameter.view(-1).split(_BLOCK):
            part.copy_(block[: len(part)])
    return model.eval()
