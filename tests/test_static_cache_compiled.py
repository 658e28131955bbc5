"""Decoding with an AnchorStaticCache is traced once, and computes what it computes uncompiled."""

import shutil

import pytest
import torch
from families import random_ids, tiny_model
from test_static_cache import agree, decode, static

from anchor_cache.static_index import StaticAnchorIndex

STEPS = 200


class CountingBackend:
    """Runs graphs as they are traced, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check_index(cache):
    """What single blocks were written into is what all blocks at once give."""
    for layer in cache.anchor_layers.values():
        length, shifts = int(layer.cumulative_length), layer._first % layer.config.block_size
        visible = torch.arange(layer.max_cache_len) < length
        visible = visible & (torch.arange(layer.max_cache_len) >= layer._first[:, None])
        anew = StaticAnchorIndex(layer.config, layer.keys)
        anew.build(layer.keys, shifts, visible)
        complete = (length - int(shifts.max())) // layer.config.block_size
        for actual, expected in zip(layer.index.buffers, anew.buffers, strict=True):
            rows = actual.shape[2] // layer.index.blocks * complete
            torch.testing.assert_close(
                actual[:, :, :rows], expected[:, :, :rows], equal_nan=True, atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize(
    ("family", "implementation", "paddings"),
    [
        ("llama", "sdpa", None),
        ("llama", "sdpa", (0, 13)),
        ("llama", "eager", None),
        ("qwen3", "sdpa", None),
        ("gpt_neox", "sdpa", None),
        ("gemma3", "sdpa", None),
        ("gpt_oss", "eager", None),
    ],
)
def test_two_hundred_steps_are_traced_at_most_three_times(family, implementation, paddings):
    layers = dict(num_hidden_layers=2)
    if family in ("gemma3", "gpt_oss"):
        layers["layer_types"] = ["sliding_attention", "full_attention"]
    model = tiny_model(family, attn_implementation=implementation, **layers)
    ids, tokens, backend = random_ids(2, 61), random_ids(2, STEPS), CountingBackend()
    expected = decode(model, static(model, capacity=270), ids, tokens, paddings)
    cache = static(model, capacity=270)
    # Without a graph break anywhere: that would be an error.
    step = torch.compile(model.forward, backend=backend, fullgraph=True)
    agree(decode(model, cache, ids, tokens, paddings, step), expected)
    # The second one where layers with a sliding window become full.
    assert backend.graphs <= 3
    assert cache.report().sparse_steps == STEPS
    check_index(cache)
    # Nothing has to be traced anew for another prompt, in the same cache or in another.
    ids, tokens = random_ids(2, 90), random_ids(2, 40)
    expected = decode(model, static(model, capacity=270), ids, tokens, paddings)
    cache.reset()
    for again in (cache, static(model, capacity=270)):
        agree(decode(model, again, ids, tokens, paddings, step), expected)
        assert again.report().sparse_steps == 40
        check_index(again)
    assert backend.graphs <= 3


@pytest.mark.parametrize("early", [False, True])
def test_generate_with_a_compiled_forward(early):
    """The prompt is then traced, too; its buffers are made in the graph, or before."""
    model, ids, backend = tiny_model(num_hidden_layers=2), random_ids(1, 61), CountingBackend()
    options = dict(max_new_tokens=120, do_sample=False, attention_mask=torch.ones_like(ids))
    expected = model.generate(ids, past_key_values=static(model), **options)
    cache = static(model)
    if early:
        cache.early_initialization(1, 2, 12, torch.float32, torch.device("cpu"))
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    assert backend.graphs <= 3
    assert cache.report().sparse_steps > 100


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_computes_the_same(tmp_path, monkeypatch):
    # Not what another version of an operation left: the cache goes by the graph alone.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = tiny_model(num_hidden_layers=1)
    ids, tokens = random_ids(2, 90), random_ids(2, 20)
    expected = decode(model, static(model), ids, tokens, (0, 13))
    step = torch.compile(model.forward, fullgraph=True)
    agree(decode(model, static(model), ids, tokens, (0, 13), step), expected)
