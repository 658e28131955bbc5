"""Blending in every family of models: right, or refused by name and with the reason."""

import copy
import functools
import math

import pytest
import torch
import transformers
from families import ALL_FAMILIES, BYPASSING, random_ids, tiny_family, tiny_model
from test_blend_hard_cases import ROPE
from test_blended_cache import (
    PREFIX,
    full_logits,
    naive_reuse,
    next_logits,
    prefill,
    row,
    same_kv,
)

from anchor_cache import BlendedCache, ChunkStore
from anchor_cache.rope import find_rotations

LINEAR = r"layers \[.*\] are linear attention"
POSITIONS = "it adds positions to its embeddings"
REFUSED = {
    **dict.fromkeys(["qwen3_next", "qwen3_5", "lfm2", "bamba"], LINEAR),
    **dict.fromkeys(["granite_hybrid", "zamba2", "falcon_h1"], LINEAR),
    **dict.fromkeys(["gpt2", "gpt_bigcode", "opt", "gpt_neo", "xglm"], POSITIONS),
    "deepseek_v32": "layer 0 keeps more than keys and values, in a DynamicIndexedLayer",
    "biases in the mask": "trying out its layers .*: the model changes the masks",
    "positions that nobody gives it": POSITIONS,
    "tables inside the layers": "layer 0 puts positions into its keys by other means",
    "layers run in loops": r"layer \d does not get the hidden states of the one before",
}
# GPT-J rotates by tables of its own until it joins the attention interface.
OWN_TABLES = {"gptj": "layer 0 puts positions into its keys by other means than the rotary tables"}
# Doge forgets in some versions that sdpa's missing mask means a causal one.
NOT_CAUSAL = "layer 0 gives single tokens other results than it gives them among all"


def rope(**parameters):
    return dict(rope_parameters=dict(rope_theta=1e4, **parameters))


PROPORTIONAL = rope(rope_type="proportional", partial_rotary_factor=0.5)
HALF_LONGROPE = rope(
    partial_rotary_factor=0.5,
    **ROPE["longrope"] | dict(short_factor=[1.0] * 3, long_factor=[1.0, 2, 4]),
)
PER_LAYER = dict(
    sliding_attention=dict(rope_type="default", rope_theta=50.0),
    full_attention=dict(rope_type="yarn", rope_theta=1e4, factor=4.0),
)
# What no family has by itself: name -> (family, settings).
TRAITS = {
    **{f"rope {kind}": ("llama", rope(**ROPE[kind])) for kind in ROPE},
    "rope dynamic": ("llama", dict(max_position_embeddings=40, **rope(**ROPE["dynamic"]))),
    "rope proportional": ("llama", PROPORTIONAL),
    "yarn of interleaved tables": ("deepseek_v3", rope(**ROPE["yarn"])),
    "longrope of half a head": ("phi3", dict(original_max_position_embeddings=40, **HALF_LONGROPE)),
    "another base per kind of layer": ("gemma3", dict(rope_parameters=PER_LAYER)),
    "temperature by position": ("llama4", dict(floor_scale=7, attn_scale=2.0)),
    "keys that are values": ("gemma4", dict(attention_k_eq_v=True)),
    "experts beside the dense block": (
        "gemma4",
        dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    ),
    "a key head per query group": ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2)),
    "a key head per query head": ("falcon", dict(multi_query=False, parallel_attn=False)),
    "parallel blocks, part of the head": ("PhiConfig", {}),
    "part of the head": ("StableLmConfig", dict(partial_rotary_factor=0.5)),
    "interleaved halves": ("GlmConfig", dict(head_dim=16)),
    "biases in the mask": ("falcon", dict(alibi=True)),
    "positions that nobody gives it": ("TrOCRConfig", {}),
    "tables inside the layers": ("MoshiConfig", {}),
    "layers run in loops": ("DoryConfig", dict(n_input_layers=1, n_output_layers=1)),
    "clipped keys": ("OlmoConfig", dict(clip_qkv=0.5)),
}
# Reuse by hand encodes chunks at their final positions, where these have longer tables.
OTHER_TABLES = {"rope dynamic", "rope longrope", "longrope of half a head"}
EVERY = {**{name: (name, {}) for name in [*ALL_FAMILIES, *BYPASSING]}, **TRAITS}

every_one = pytest.mark.parametrize("name", EVERY)
every_blended_one = pytest.mark.parametrize("name", [name for name in EVERY if name not in REFUSED])
both_implementations = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


@functools.cache
def build(name, implementation):
    family, changes = EVERY[name]
    if family in ALL_FAMILIES or family in BYPASSING:
        model = tiny_family(family, implementation)
        if model is None or not changes:
            return model
    if family.endswith("Config") and not hasattr(transformers, family):
        return None
    eager = tiny_model(family, attn_implementation="eager", **changes)
    if implementation == "eager":
        return eager
    return (
        tiny_model(family, attn_implementation="sdpa", **changes) if eager._supports_sdpa else None
    )


def model_of(name, implementation):
    model = build(name, implementation)
    if model is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name} in {implementation}")
    return model


@functools.cache
def is_causal(name, implementation):
    ids = random_ids(1, 20)
    other = torch.cat((ids[:, :-1], 97 - ids[:, -1:]), 1)
    with torch.no_grad():
        one, changed = (build(name, implementation)(i).logits[:, :-1] for i in (ids, other))
    return torch.allclose(one, changed, atol=1e-4)


def reason(name, implementation):
    """Why the model is refused; None where it is blended."""
    model = model_of(name, implementation)
    if name in OWN_TABLES and not model._can_set_attn_implementation():
        return OWN_TABLES[name]
    return REFUSED.get(name) or (None if is_causal(name, implementation) else NOT_CAUSAL)


class Setting:
    """A model, its store, and a prompt longer than all windows, the chunks in another order than
    they were stored in, and one of them twice."""

    def __init__(self, name, implementation, folder):
        self.model = model_of(name, implementation)
        if reason(name, implementation):
            pytest.skip("refused: see test_refused_by_name_and_with_the_reason")
        self.store = ChunkStore(folder, self.model, prefix=PREFIX)
        a, b, c, d = (row(n) for n in (19, 30, 1, 26))
        self.store.add([a, b, c, d], progress=False)
        self.segments = [PREFIX, d, a, c, b, a, row(8)]
        self.ids = sum(self.segments, [])
        self.full = prefill(self.model, self.ids[:-1])

    def blend(self, **options):
        return BlendedCache.blend(self.model, self.store, self.segments, **options)


@pytest.fixture
def setting(name, implementation, tmp_path):
    return Setting(name, implementation, tmp_path)


@both_implementations
@every_blended_one
def test_ratio_1_equals_full_prefill(setting):
    blended = setting.blend(recompute_ratio=1)
    for one, other in zip(blended.layers, setting.full.layers, strict=True):
        if one.keys is not None:  # a layer that reads another one's keys has none
            torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=1e-4)
    assert blended.get_seq_length() == len(setting.ids) - 1
    last = torch.tensor([setting.ids[-1:]])
    expected = setting.model(last, past_key_values=setting.full).logits[0, -1]
    actual = next_logits(setting.model, blended)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager"])
@pytest.mark.parametrize(
    "name", ["llama4", "gemma3n", "gemma4", "bloom", "falcon", "gptj", "deepseek_v3", "ministral"]
)
def test_generate_goes_on_across_windows_and_attention_chunks(setting):
    ids = torch.tensor([setting.ids])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    blended = setting.blend(recompute_ratio=1)
    actual = setting.model.generate(ids, past_key_values=blended, **options)
    assert torch.equal(actual, setting.model.generate(ids, **options))


def test_a_mask_made_of_the_values(tmp_path):
    """Doge reads the ``keep_window_size`` tokens that its values weigh most. Where they weigh the
    same, as in an untrained model or for equal tokens, it is undefined which."""
    model = tiny_model("doge", attn_implementation="eager", keep_window_size=24, vocab_size=128)
    for layer in model.model.layers:
        layer.self_attn.A.normal_()
    prefix, *documents, question = (
        ids.tolist() for ids in torch.randperm(128).split((5, 19, 30, 26, 48))
    )
    store = ChunkStore(tmp_path, model, prefix=prefix)
    store.add(documents, progress=False)
    segments = [prefix, *documents[::-1], question[:8]]
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    same_kv(blended, prefill(model, sum(segments, [])[:-1]), 1e-4)
    torch.testing.assert_close(
        next_logits(model, blended), full_logits(model, segments), atol=1e-4, rtol=1e-4
    )


@both_implementations
@every_blended_one
def test_ratio_0_equals_reuse_at_the_final_positions(setting, name):
    blended = setting.blend(recompute_ratio=0)
    moved, fresh = blended.layers[0].keys, setting.full.layers[0].keys
    torch.testing.assert_close(moved, fresh, atol=1e-5, rtol=1e-5)
    reused = next_logits(setting.model, blended)
    if name not in OTHER_TABLES:
        expected = naive_reuse(setting.model, setting.segments)
        torch.testing.assert_close(reused, expected, atol=1e-4, rtol=1e-4)
    assert (reused - full_logits(setting.model, setting.segments)).abs().max() > 1e-3


@pytest.mark.parametrize("implementation", ["eager"])
@pytest.mark.parametrize("selector", ["query", "hkvd"])
@every_blended_one
def test_selected_tokens_are_what_they_are_in_a_full_prefill(setting, selector):
    """In layer 1, which reads only exact keys and values of layer 0."""
    blended = setting.blend(recompute_ratio=0.3, selector=selector)
    report, own, exact = blended.report(), blended.layers[1], setting.full.layers[1]
    assert len(report.selected) == math.ceil(0.3 * (100 - report.exact_prefix_tokens))
    if own.keys.shape[2] == len(setting.ids) - 1:
        for one, other in ((own.keys, exact.keys), (own.values, exact.values)):
            one, other = one[:, :, report.selected], other[:, :, report.selected]
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@both_implementations
@every_one
def test_refused_by_name_and_with_the_reason(name, implementation, tmp_path):
    model, why = model_of(name, implementation), reason(name, implementation)
    if why is None:
        assert len(find_rotations(model)) in (2, 4)
        return
    with pytest.raises(
        NotImplementedError, match=f"{type(model).__name__} cannot be blended: {why}"
    ):
        ChunkStore(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_blended_one
def test_no_rounding_makes_a_model_refused(name, dtype):
    if reason(name, "eager") is None:
        find_rotations(copy.deepcopy(model_of(name, "eager")).to(dtype))


class Faulty:
    """What a model that no one foresaw might do in its layer 2."""

    @staticmethod
    def runs_twice(layers):
        layers[3] = layers[2]

    @staticmethod
    def mixes_tokens(layers):
        layers[2].mlp.register_forward_hook(lambda _, args, output: output + output.sum(1, True))

    @staticmethod
    def counts_rows(layers):
        def add(module, args, output):
            return output * torch.arange(1, 1 + output.shape[1])[:, None]

        layers[2].self_attn.q_proj.register_forward_hook(add)

    @staticmethod
    def adds_positions(layers):
        def add(module, args, kwargs):
            shifted = kwargs["hidden_states"] + kwargs["position_ids"][..., None]
            return args, {**kwargs, "hidden_states": shifted}

        layers[2].self_attn.register_forward_pre_hook(add, with_kwargs=True)

    @staticmethod
    def turns_the_tables(layers):
        def turn(module, args, kwargs):
            tables = tuple(table.flip(-1) for table in kwargs["position_embeddings"])
            return args, {**kwargs, "position_embeddings": tables}

        layers[2].self_attn.register_forward_pre_hook(turn, with_kwargs=True)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Faulty.runs_twice, "its own prefill fills the cache otherwise than its layers in turn"),
        (Faulty.mixes_tokens, "layer 2 gives single tokens other results"),
        (Faulty.counts_rows, "layer 2 gives single tokens other results"),
        (Faulty.adds_positions, "layer 2 puts positions into its keys by other means"),
        (Faulty.turns_the_tables, "the rotary embedding of layer 2 is of no known layout"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_finds_what_no_one_foresaw(fault, why, dtype):
    model = tiny_model().to(dtype)
    fault(model.model.layers)
    with pytest.raises(NotImplementedError, match=f"LlamaForCausalLM cannot be blended: {why}"):
        find_rotations(model)
