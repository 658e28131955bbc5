"""A chunk is encoded in a batch to what it is encoded to alone, and stored as soon as it is."""

import itertools
import signal
from pathlib import Path

import pytest
import torch
from anchor_cache.patches.partial_forward import PartialForward
from families import random_ids, tiny_model
from test_blend_hard_cases import ROPE

from anchor_cache import SINK, BlendedCache, ChunkStore
from anchor_cache.chunk_encoder import ChunkEncoder

PREFIX = (1, 5, 9, 7, 3)
DYNAMIC = dict(max_position_embeddings=40)
# Rotary tables of its own for every layer type, one of them for long contexts.
PER_LAYER_TYPE = dict(
    rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
        full_attention=dict(rope_theta=1e5, **ROPE["dynamic"]),
    ),
    **DYNAMIC,
)
MODELS = {
    "llama": ("llama", {}),
    "eager": ("llama", dict(attn_implementation="eager")),
    "gemma2": ("gemma2", dict(attn_implementation="eager")),
    **{name: (name, {}) for name in ("gemma3", "mistral_sliding", "gpt_oss", "gpt_neox")},
    **{name: (name, {}) for name in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")},
    **{kind: ("llama", dict(rope_parameters=dict(rope_theta=1e4, **ROPE[kind]))) for kind in ROPE},
    "dynamic": (
        "llama",
        dict(rope_parameters=dict(rope_theta=1e4, **ROPE["dynamic"]), **DYNAMIC),
    ),
    "dynamic per layer type": ("gemma3", PER_LAYER_TYPE),
}


def row(n):
    return tuple(random_ids(n).tolist())


def whole_pass(model, prefix, chunk):
    """Keys before RoPE and values of a plain pass over the prefix and one chunk."""
    kv, projected = [], {}
    forward = PartialForward(model, torch.tensor([[*prefix, *chunk]]))
    hidden = forward.embedded

    class Recorder:
        def update(self, keys, values, *args, **kwargs):
            projected["kv"] = keys, values
            return keys, values

    for layer in range(forward.layers):
        forward.run(layer, hidden, None, Recorder(), rotate=False)
        kv.append([states[:, :, len(prefix) :] for states in projected["kv"]])
        hidden = forward.run(layer, hidden, None, Recorder())
    return kv, forward.rotary_digest()


def encode(model, prefix, chunks, batch_tokens=None):
    encoded = dict(ChunkEncoder(model, prefix, batch_tokens).encode(chunks))
    assert sorted(encoded) == list(range(len(chunks)))
    return [encoded[i] for i in range(len(chunks))]


@pytest.mark.parametrize("prefix", [(), PREFIX, PREFIX * 9], ids=["alone", "short", "long"])
@pytest.mark.parametrize("name", MODELS)
def test_a_chunk_does_not_depend_on_its_company(name, prefix):
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    chunks = [row(n) for n in (33, 7, 60, 1, 33, 50)]
    together = encode(model, prefix, chunks)
    encode(model, prefix, [row(90)])  # some models remember the longest pass
    for chunk, batched in reversed(list(zip(chunks, together, strict=True))):
        (alone,) = encode(model, prefix, [chunk])
        assert batched.rotary == alone.rotary
        for kind in ("keys", "values"):
            for ours, other in zip(getattr(batched, kind), getattr(alone, kind), strict=True):
                assert ours.shape[2] == len(chunk) and ours.is_contiguous()
                torch.testing.assert_close(ours, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("prefix", [(), PREFIX, PREFIX * 9], ids=["alone", "short", "long"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_a_plain_pass_gives(name, prefix):
    family, changes = MODELS[name]
    chunks = [row(n) for n in (60, 12, 30)]
    encoded = encode(tiny_model(family, **changes), prefix, chunks)
    for chunk, ours in zip(chunks, encoded, strict=True):
        kv, digest = whole_pass(tiny_model(family, **changes), prefix, chunk)
        assert ours.rotary == digest
        for layer, (keys, values) in enumerate(kv):
            torch.testing.assert_close(ours.keys[layer], keys, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(ours.values[layer], values, atol=2e-5, rtol=2e-5)


def passes(model):
    """The shapes of what passes through the first layer to its end."""
    shapes = []
    layer = model.model.layers[0].mlp
    layer.register_forward_hook(lambda module, args, output: shapes.append(args[0].shape[:2]))
    return shapes


@pytest.mark.parametrize(
    ("batch_tokens", "expected"),
    [
        (1, [(1, 60), (1, 20), (1, 20), (1, 19), (1, 4), (1, 3)]),
        (100, [(1, 60), (2, 20), (2, 19), (1, 3)]),
        (10_000, [(6, 60)]),
    ],
)
def test_batches_keep_to_their_budget_and_pad_little(batch_tokens, expected):
    model, prefix = tiny_model(), PREFIX * 5
    shapes = passes(model)
    encode(model, prefix, [row(n) for n in (20, 3, 20, 4, 19, 60)], batch_tokens)
    assert shapes == [(1, len(prefix)), *expected]


def test_a_short_prefix_is_carried_by_long_chunks_and_shared_by_others():
    model = tiny_model()
    shapes = passes(model)
    encode(model, PREFIX, [row(60), row(20), row(20)], batch_tokens=50)
    assert shapes == [(1, len(PREFIX) + 60), (1, len(PREFIX)), (2, 20)]


def files(store):
    return {path.name: path.stat().st_mtime_ns for path in Path(store.url).iterdir()}


@pytest.fixture
def store(tmp_path):
    return ChunkStore(tmp_path / "chunks", tiny_model(), prefix=PREFIX)


@pytest.mark.parametrize("source", [list, iter], ids=["list", "generator"])
def test_after_an_interruption_only_the_rest_is_encoded(store, source):
    documents = [row(20) for _ in range(12)]
    budget = 3 * (20 + len(PREFIX))
    shapes = passes(store.model)
    calls = itertools.count()

    def interrupt(module, args):
        if next(calls) == 5:  # the prefix twice (as a chunk, and before others), then batches
            signal.raise_signal(signal.SIGINT)

    hook = store.model.model.layers[2].mlp.register_forward_pre_hook(interrupt)
    # A run in the background inherits from its shell that the signal is ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.add(source(documents), progress=False, batch_tokens=budget)
    finally:
        signal.signal(signal.SIGINT, inherited)
    hook.remove()
    stored = files(store)
    assert len(stored) == 1 + 9
    shapes.clear()
    keys = store.add(source(documents), progress=False, batch_tokens=budget)
    assert [key.ids for key in keys] == documents and all(key in store for key in keys)
    assert shapes == [(1, len(PREFIX)), (3, 20)]
    assert {name: time for name, time in files(store).items() if name in stored} == stored
    shapes.clear()
    assert store.add(source(documents), progress=False) == keys and shapes == []


def test_a_stream_is_stored_while_it_is_read(store):
    seen = []

    def stream():
        for _ in range(300):
            seen.append(len(store))
            yield row(20)
        yield []

    with pytest.raises(ValueError, match=r"documents\[300\] is empty"):
        store.add(stream(), progress=False, batch_tokens=50)
    assert seen[0] == 1 and seen[-1] > 200 and len(store) > 200


def test_a_column_of_a_data_set_and_a_tensor_are_documents(store):
    from datasets import Dataset

    column = Dataset.from_dict({"ids": [[3, 4], [5, 6]]})["ids"]
    assert store.add(column, progress=False) == store.add(torch.tensor([[3, 4], [5, 6]]))


def test_the_progress_bar_counts_what_is_there_already(store, capsys):
    documents = [row(5) for _ in range(4)]
    store.add(documents[:3], progress=False)
    store.add([*documents, documents[3]])
    assert "5/5" in capsys.readouterr().err


def test_several_prefixes_side_by_side(store):
    document, other = row(12), (4, 4, 8)
    keys = [store.add([document], prefix=p, progress=False)[0] for p in (None, other, ())]
    assert [key.prefix for key in keys] == [PREFIX, other, ()]
    assert len(store) == 5 and store.key(other, ()) in store
    for key in keys:
        same = store.encode(key)
        for ours, expected in zip(store.get(key)[0].values, same.values, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


class Tokenizer:
    def __init__(self, bos, eos=None):
        self.bos_token_id, self.eos_token_id = bos, eos


@pytest.mark.parametrize(
    ("tokenizer", "config", "expected"),
    [
        (Tokenizer(7), {}, 7),
        (Tokenizer(None, 8), {}, 1),
        (None, {}, 1),
        (Tokenizer(None, 8), dict(bos_token_id=None), 8),
        (None, dict(eos_token_id=[9, 10]), 9),
    ],
)
def test_sink_is_the_token_that_begins_prompts(tmp_path, tokenizer, config, expected):
    model = tiny_model()
    if config:
        model.config.bos_token_id = None
        model.config.eos_token_id = config.get("eos_token_id")
    store = ChunkStore(tmp_path, model, tokenizer, prefix=SINK)
    assert store.prefix == (expected,)
    document = row(9)
    assert store.add([document], progress=False) == [store.key(document, (expected,))]
    segments = [[expected], document, row(3)]
    report = BlendedCache.blend(model, store, segments).report()
    assert report.exact_prefix_tokens == 1 + len(document)


def test_without_such_a_token_sink_says_what_to_pass(tmp_path):
    model = tiny_model()
    model.config.bos_token_id = None
    with pytest.raises(ValueError, match=r"pass the ids .* prefix=\[id\]"):
        ChunkStore(tmp_path, model, prefix=SINK)


@pytest.mark.parametrize("batch_tokens", [0, 2.5, True, "many"])
def test_a_budget_is_a_positive_int(store, batch_tokens):
    with pytest.raises(ValueError, match="batch_tokens"):
        store.add([row(3)], batch_tokens=batch_tokens)
    assert len(store) == 0
