"""Tiny random models of real classes, one per trait that matters to a cache."""

import torch
import transformers

_SIZES = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_GEMMA3 = dict(
    head_dim=16,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention"] * 2,
    query_pre_attn_scalar=16,
)
_GPT_OSS = dict(
    head_dim=16,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_local_experts=4,
    num_experts_per_tok=2,
    attn_implementation="eager",
)
_GPT_NEOX = dict(rotary_pct=0.5, num_key_value_heads=None)

# name -> (configuration class, what differs from the sizes above)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "gemma3": ("Gemma3TextConfig", _GEMMA3),
    "phi3": ("Phi3Config", dict(partial_rotary_factor=0.5)),
    "gpt_neox": ("GPTNeoXConfig", _GPT_NEOX),
    "gpt_oss": ("GptOssConfig", _GPT_OSS),
}


def tiny_model(family="llama", **changes):
    """A random model with activations large enough for attention to be peaked."""
    name, differences = FAMILIES[family] if family in FAMILIES else (family, {})
    settings = {**_SIZES, **differences, **changes}
    settings = {key: value for key, value in settings.items() if value is not None or "eos" in key}
    implementation = settings.pop("attn_implementation", "sdpa")
    torch.manual_seed(0)
    config = getattr(transformers, name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


def random_ids(*shape, low=2, high=96):
    """Token ids that are neither padding nor beginning of text."""
    return torch.randint(low, high, shape)
