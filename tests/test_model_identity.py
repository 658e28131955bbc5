"""What tells models apart beside their weights."""

import pytest
import torch
from families import random_ids, tiny_model
from test_blend_hard_cases import ROPE
from torch import nn

from anchor_cache import BlendedCache, ChunkStore
from anchor_cache.model_identity import model_identity


class AdaptedLinear(nn.Module):
    """A linear layer with low-rank adapters, whose fields are named as PEFT's are."""

    def __init__(self, base_layer, names=("one", "other"), rank=2):
        super().__init__()
        self.base_layer = base_layer
        self._disable_adapters, self._active_adapter, self.merged_adapters = False, names[0], []
        self.scaling = dict.fromkeys(names, 1.0)
        generator = torch.Generator().manual_seed(1)
        sizes = dict(A=(rank, base_layer.in_features), B=(base_layer.out_features, rank))
        for name in names:
            for half, size in sizes.items():
                weight = torch.randn(size, generator=generator)
                self.register_parameter(f"lora_{half}_{name}", nn.Parameter(weight))

    def forward(self, x):
        y, name = self.base_layer(x), self._active_adapter
        if self._disable_adapters:
            return y
        a, b = (getattr(self, f"lora_{half}_{name}") for half in "AB")
        return y + self.scaling[name] * (x @ a.T @ b.T)


def adapted():
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    attention.k_proj = AdaptedLinear(attention.k_proj)
    return model, attention.k_proj


CHANGES = {
    "disabled": dict(_disable_adapters=True),
    "another": dict(_active_adapter="other"),
    "scaled": dict(scaling={"one": 0.5, "other": 1.0}),
    "merged": dict(merged_adapters=["one"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_set_otherwise_are_another_model(tmp_path, change):
    model, layer = adapted()
    before, old = model_identity(model), dict(vars(layer))
    assert model_identity(adapted()[0]) == before
    prefix, document, question = [1, 5, 9], random_ids(19).tolist(), random_ids(4).tolist()
    store = ChunkStore(tmp_path, model, prefix=prefix)
    store.add([document], progress=False)
    for name, value in CHANGES[change].items():
        setattr(layer, name, value)
    assert model_identity(model) != before
    segments = [prefix, document, question]
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=0)
    assert blended.report().reasons == {"chunk not in the store": 2}
    expected = model(blended.input_ids).logits[0, -1]
    actual = model(blended.input_ids[:, -1:], past_key_values=blended).logits[0, -1]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for name in CHANGES[change]:
        setattr(layer, name, old[name])
    assert model_identity(model) == before
    assert BlendedCache.blend(model, store, segments).report().reasons == {}


def test_what_a_module_notes_while_it_runs_is_no_part_of_its_identity():
    model = tiny_model()
    before = model_identity(model)
    model(random_ids(1, 9))
    model.model.layers[0].calls = 1
    assert model_identity(model) == before


@torch.no_grad()
def through_data(model):
    for weight in model.parameters():
        weight.data.mul_(1.01)


def through_config(model):
    model.config.rms_norm_eps = 0.1


def through_class(model):
    model.__class__ = type("Changed", (type(model),), {})


@pytest.mark.parametrize("change", [through_data, through_config, through_class])
def test_changes_that_pytorch_does_not_count_are_noticed(change):
    model = tiny_model()
    before = model_identity(model)
    change(model)
    after = model_identity(model)
    assert after != before
    if change is through_data:
        model.load_state_dict(tiny_model().state_dict())
        assert model_identity(model) == before


def test_weights_written_in_inference_mode_are_noticed():
    with torch.inference_mode():
        model = tiny_model().to(torch.bfloat16)
        before = model_identity(model)
        for weight in model.parameters():
            weight.mul_(2)
        assert model_identity(model) != before


def test_how_a_model_came_to_its_dtype_does_not_matter(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    load = type(tiny_model()).from_pretrained
    cast = tiny_model().to(torch.bfloat16)
    assert model_identity(load(tmp_path, dtype=torch.bfloat16)) == model_identity(cast)
    assert model_identity(load(tmp_path)) != model_identity(cast)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_that_forward_changes_do_not_cost_a_digest(kind, monkeypatch):
    """Summing up all weights takes seconds for large models."""
    from anchor_cache import model_identity as module

    rope = dict(rope_theta=1e4, **ROPE[kind])
    model = tiny_model(max_position_embeddings=40, rope_parameters=rope)
    before, digests = model_identity(model), []
    monkeypatch.setattr(module, "_digest", lambda *args: digests.append(args))
    for tokens in (90, 5, 120):
        model(random_ids(1, tokens))
        assert model_identity(model) == before
    assert not digests
