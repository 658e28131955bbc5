"""Chunks are read layer by layer while the layers compute; which chunk is read for a segment."""

import time

import pytest
import torch
from families import tiny_model
from slow_storage import SlowStorage
from test_blended_cache import PREFIX, full_logits, next_logits, row

from anchor_cache import SINK, BlendedCache, ChunkStore
from anchor_cache.prompt_layout import OTHER_PREFIX

LAYERS = 12


@pytest.fixture
def slow(tmp_path):
    """A store behind a wire that takes about as long per layer as the layer computes."""
    SlowStorage.use(bytes_per_second=1e9, latency=0.01)
    model = tiny_model(num_hidden_layers=LAYERS)
    store = ChunkStore(f"slow://{tmp_path}/chunks", model, prefix=PREFIX, memory_bytes=0)
    documents = [row(n) for n in (19, 30, 26)]
    store.add(documents, progress=False)
    SlowStorage.ranges.clear()
    return model, store, [PREFIX, *documents, row(8)]


@pytest.mark.parametrize("selector", ["hkvd", "query", "first"])
def test_layers_are_read_while_others_compute(slow, selector):
    model, store, segments = slow
    report = BlendedCache.blend(model, store, segments, selector=selector).report()
    loads = [entry for entry in report.trace if entry[0] == "load"]
    runs = [entry for entry in report.trace if entry[0] != "load"]
    assert sorted(layer for _, layer, _, _ in loads) == list(range(LAYERS))
    last_load = max(end for _, _, _, end in loads)
    assert min(start for _, _, start, _ in runs) < last_load
    ready = {layer: end for _, layer, _, end in loads}
    assert all(start >= ready[layer] for _, layer, start, _ in runs)
    assert report.seconds >= report.load_seconds > 0 and report.compute_seconds > 0


def test_a_trace_is_drawn(slow, tmp_path):
    pytest.importorskip("matplotlib")
    model, store, segments = slow
    report = BlendedCache.blend(model, store, segments).report()
    assert report.plot_trace(tmp_path / "trace.png").stat().st_size > 1000


def test_a_chunk_that_stands_there_twice_is_read_once(slow):
    model, store, segments = slow
    prefix, a, b, c, question = segments
    BlendedCache.blend(model, store, [prefix, a, b, a, b, b, question], recompute_ratio=0)
    layer_reads = [r for r in SlowStorage.ranges if r[2] - r[1] > 1000]
    assert len(layer_reads) == len(set(layer_reads))


@pytest.mark.parametrize("slower", ["reading", "computing"])
def test_the_ratio_that_hides_behind_loading(slow, slower):
    """Much is recomputed behind a slow wire, little by a slow model."""
    model, store, segments = slow
    if slower == "reading":
        SlowStorage.latency = 0.3
    else:
        SlowStorage.latency = 0.0
        model.model.layers[0].register_forward_hook(lambda *_: time.sleep(0.5))
    options = dict(recompute_ratio="auto", auto="loading", selector="hkvd", auto_limits=(0, 1))
    report = BlendedCache.blend(model, store, segments, **options).report()
    assert report.recompute_ratio == 1 if slower == "reading" else report.recompute_ratio < 1


def damage_last_layer(store, key):
    path = f"{store.url.removeprefix('slow://')}/{key.digest}.safetensors"
    with open(path, "r+b") as file:
        file.seek(-40, 2)
        file.write(b"\xff" * 40)


@pytest.mark.parametrize("selector", ["hkvd", "query"])
def test_damage_that_is_found_while_layers_compute_is_a_miss(slow, selector):
    model, store, segments = slow
    damage_last_layer(store, store.key(segments[2]))
    options = dict(selector=selector, recompute_ratio=1)
    blended = BlendedCache.blend(model, store, segments, **options)
    assert blended.report().reasons == {"chunk file is damaged": 1}
    assert blended.report().fresh_tokens == 30 + 8
    torch.testing.assert_close(
        next_logits(model, blended), full_logits(model, segments), atol=1e-4, rtol=1e-4
    )
    BlendedCache.blend(model, store, segments, add_missing=True, **options)
    assert BlendedCache.blend(model, store, segments).report().reasons == {}


def test_no_thread_is_left_when_a_blend_fails(slow, monkeypatch):
    import threading

    model, store, segments = slow

    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(model.model.layers[3], "forward", fail)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no memory"):
        BlendedCache.blend(model, store, segments)
    assert threading.active_count() == before


def test_several_prefixes_side_by_side(tmp_path):
    """The chunk that was encoded after the prompt's own first segment is the one that is used."""
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    other, documents, question = [2, 8, 3], [row(12), row(15)], row(4)
    store.add(documents, progress=False)
    store.add(documents, prefix=other, progress=False)
    for prefix in (PREFIX, other):
        report = BlendedCache.blend(model, store, [prefix, *documents, question]).report()
        assert report.exact_prefix_tokens == len(prefix) + 12 and report.reasons == {}
    unknown = BlendedCache.blend(model, store, [[7, 7], *documents, question]).report()
    assert unknown.reused_tokens == 27 and unknown.exact_prefix_tokens == 0
    assert unknown.reasons == {"chunk not in the store": 1, OTHER_PREFIX: 2}


def test_a_chunk_in_its_real_context_is_exact_wherever_it_stands(tmp_path):
    """An exact prefix that is longer than the first segment."""
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    a, b, c, question = row(12), row(15), row(9), row(4)
    store.add([a, c], progress=False)
    store.add([b], prefix=PREFIX + a, progress=False)
    segments = [PREFIX, a, b, c, question]
    report = BlendedCache.blend(model, store, segments, recompute_ratio=0).report()
    assert report.exact_prefix_tokens == 5 + 12 + 15
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    torch.testing.assert_close(
        next_logits(model, blended), full_logits(model, segments), atol=1e-4, rtol=1e-4
    )


def test_chunks_encoded_after_a_sink_fit_any_prompt(tmp_path):
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=SINK)
    documents, question = [row(12), row(15)], row(4)
    store.add(documents, progress=False)
    bos = model.config.bos_token_id
    report = BlendedCache.blend(model, store, [[bos, 5, 6], *documents, question]).report()
    assert report.reused_tokens == 27 and report.reasons == {"chunk not in the store": 1}
