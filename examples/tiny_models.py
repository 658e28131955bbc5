"""Tiny random decoder models of the real classes: what a cache does to a model depends on its
classes and its configuration, not on its weights. The tests and support_table.py build them.
"""

from __future__ import annotations

import torch
import transformers

# What the families share; None leaves a setting to the configuration class.
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
_NONE_IS_A_VALUE = {"eos_token_id", "sliding_window"}

_HEAD = dict(head_dim=16)
_ALL_HEADS = dict(num_key_value_heads=None)
_SLIDING = dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_LINEAR = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=24, mamba_d_state=8, mamba_chunk_size=16)
_LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
_GEMMA = dict(query_pre_attn_scalar=16, **_HEAD, **_SLIDING)
_GEMMA3N = dict(
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=96,
    **_HEAD,
    **_SLIDING,
)
_ALTUP = dict(altup_num_inputs=2, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4)
_LLAMA4 = dict(
    num_local_experts=2,
    num_experts_per_tok=1,
    intermediate_size_mlp=64,
    attention_chunk_size=32,
    layer_types=["chunked_attention", "full_attention"] * 2,
    no_rope_layers=[1, 0] * 2,
)
_GPT_OSS = dict(attn_implementation="eager", **_HEAD, **_SLIDING, **_LOCAL_EXPERTS)
_GRANITE_HYBRID = dict(
    num_local_experts=2,
    num_experts_per_tok=1,
    shared_intermediate_size=32,
    layer_types=["mamba", "attention"] * 2,
)
_FALCON_H1 = {**_MAMBA, "mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_groups": 1}
_ZAMBA2 = dict(
    mamba_d_state=8,
    n_mamba_heads=4,
    mamba_ngroups=1,
    layers_block_type=["mamba", "hybrid"] * 2,
    num_mem_blocks=1,
    chunk_size=16,
    num_key_value_heads=4,
)

# name -> (configuration class, what differs from the sizes above)
ALL_FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama4": ("Llama4TextConfig", {**_HEAD, **_LLAMA4}),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "mistral_sliding": ("MistralConfig", dict(sliding_window=24)),
    "ministral": ("MinistralConfig", {**_HEAD, **_SLIDING}),
    "mixtral": ("MixtralConfig", _LOCAL_EXPERTS),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", _HEAD),
    "qwen3_moe": ("Qwen3MoeConfig", {**_HEAD, **_EXPERTS}),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(shared_expert_intermediate_size=32, **_HEAD, **_EXPERTS, **_LINEAR),
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**_HEAD, **_LINEAR}),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gemma3n": ("Gemma3nTextConfig", {**_GEMMA3N, **_ALTUP}),
    "gemma4": ("Gemma4TextConfig", dict(global_head_dim=16, **_GEMMA3N)),
    "phi3": ("Phi3Config", dict(partial_rotary_factor=0.5)),
    "glm4": ("Glm4Config", _HEAD),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {**_HEAD, **_SLIDING}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", _SLIDING),
    "smollm3": ("SmolLM3Config", dict(no_rope_layers=[1, 0] * 2)),
    "exaone4": ("Exaone4Config", _SLIDING),
    "ernie4_5": ("Ernie4_5Config", _HEAD),
    "granite": ("GraniteConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "nemotron": ("NemotronConfig", {}),
    "gpt_oss": ("GptOssConfig", _GPT_OSS),
    "gpt_neox": ("GPTNeoXConfig", dict(rotary_pct=0.5, **_ALL_HEADS)),
    "gptj": ("GPTJConfig", dict(rotary_dim=8, **_ALL_HEADS)),
    "gpt2": ("GPT2Config", _ALL_HEADS),
    "gpt_bigcode": ("GPTBigCodeConfig", _ALL_HEADS),
    "opt": ("OPTConfig", dict(ffn_dim=64, word_embed_proj_dim=48, **_ALL_HEADS)),
    "diffllama": ("DiffLlamaConfig", {}),
    "jetmoe": ("JetMoeConfig", dict(kv_channels=16, num_attention_heads=None, **_LOCAL_EXPERTS)),
    "deepseek_v2": ("DeepseekV2Config", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "deepseek_v32": ("DeepseekV32Config", _LATENT),
    "lfm2": ("Lfm2Config", dict(layer_types=["conv", "full_attention"] * 2)),
    "bamba": ("BambaConfig", dict(attn_layer_indices=[1, 3], **_MAMBA)),
    "granite_hybrid": ("GraniteMoeHybridConfig", {**_MAMBA, **_GRANITE_HYBRID}),
    "zamba2": ("Zamba2Config", _ZAMBA2),
    "falcon_h1": ("FalconH1Config", {**_HEAD, **_FALCON_H1}),
}

# Families whose attention does not pass through the interface that transformers' models share.
BYPASSING = {
    "bloom": ("BloomConfig", dict(n_layer=4, n_head=4, **_ALL_HEADS)),
    "doge": ("DogeConfig", {}),
    "falcon": ("FalconConfig", {}),
    "gpt_neo": (
        "GPTNeoConfig",
        dict(num_layers=4, num_heads=4, attention_types=[[["global"], 4]], **_ALL_HEADS),
    ),
    "xglm": ("XGLMConfig", dict(d_model=48, ffn_dim=64, num_layers=4, attention_heads=4)),
}


def tiny_model(family: str = "llama", **changes) -> transformers.PreTrainedModel:
    """A random model with activations large enough for attention to be peaked.

    Args:
        family: a name above, or that of a configuration class.
        **changes: settings of the configuration, and ``attn_implementation``.
    """
    name, differences = {**ALL_FAMILIES, **BYPASSING}.get(family, (family, {}))
    settings = {**_SIZES, **differences, **changes}
    settings = {k: v for k, v in settings.items() if v is not None or k in _NONE_IS_A_VALUE}
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


def tiny_family(family: str, implementation: str) -> transformers.PreTrainedModel | None:
    """The family's model with that attention; None where this transformers does not have it."""
    name, _ = {**ALL_FAMILIES, **BYPASSING}[family]
    if not hasattr(transformers, name):
        return None
    model = tiny_model(family, attn_implementation="eager")
    if implementation == "eager":
        return model
    return tiny_model(family, attn_implementation=implementation) if model._supports_sdpa else None
