"""Behaviour on a real pretrained model (SmolLM2-135M-Instruct, fp32)."""

import pytest
import torch
from demo import QUESTION, fact, greedy, long_document, manual

from anchor_cache import AnchorDynamicCache, BlendedCache, ChunkStore, segments_from_chat


def kl(truth, other):
    return (truth.exp() * (truth - other)).sum(-1).mean().item()


def test_a_fact_in_a_long_document_is_found_at_a_tenth_of_the_context(small_model):
    model, tokenizer = small_model
    ids, _ = long_document(model, tokenizer, tokens=2500, depth=0.25)
    settings = dict(budget=0.1, sink_size=16, window_size=128, dense_below=0, dense_above=1.0)
    cache = AnchorDynamicCache(model.config, audit_every=4, **settings)
    assert "7463343" in greedy(model, tokenizer, ids, cache, 20)
    report = cache.report()
    assert report.sparse_steps > 10 and report.dense_steps == 0
    assert report.max_tokens_attended <= 0.1 * report.tokens_seen
    assert report.coverage > 0.75
    assert report.index_bytes < 0.08 * report.kv_bytes


@pytest.fixture(scope="module")
def rag(small_model, tmp_path_factory):
    """A store, a chat prompt over four documents, and full prefill's next distributions."""
    model, tokenizer = small_model
    text, documents = manual(skip=200_000), []
    for i, city in enumerate(["Oslo", "Lima", "Paris", "Cairo"]):
        start = 900 * i
        middle = text.index(" ", start + 450)
        documents.append(text[start:middle] + fact(city) + text[middle : start + 900])
    content = "Answer from these notes.\n\n" + "\n\n".join([*documents, QUESTION])
    segments = segments_from_chat(tokenizer, [{"role": "user", "content": content}], documents)
    store = ChunkStore(tmp_path_factory.mktemp("chunks"), model, tokenizer, prefix=segments[0])
    with torch.no_grad():
        store.add(documents, progress=False)
        ids = [store.token_ids(segment) for segment in segments]
        reply = tokenizer("The special magic number for Paris is", add_special_tokens=False)
        flat = torch.tensor([sum(ids, ()) + tuple(reply["input_ids"])])
        truth = model(flat).logits[0, -len(reply["input_ids"]) - 1 :].log_softmax(-1)
    return store, segments, flat, truth


def blended_kl(model, rag, **settings):
    store, segments, flat, truth = rag
    cache = BlendedCache.blend(model, store, segments, **settings)
    rest = flat[:, cache.get_seq_length() :]
    return kl(truth, model(rest, past_key_values=cache).logits[0].log_softmax(-1))


@pytest.mark.parametrize("selector", ["query", "hkvd"])
def test_recomputing_a_little_brings_the_blend_nearer_to_full_prefill(small_model, rag, selector):
    model, _ = small_model
    reuse = blended_kl(model, rag, recompute_ratio=0)
    little = blended_kl(model, rag, recompute_ratio=0.15, selector=selector)
    full = blended_kl(model, rag, recompute_ratio=1)
    assert full < 1e-6 < little < reuse


def test_chunks_encoded_after_the_prefix_are_nearer_than_chunks_encoded_alone(small_model, rag):
    model, _ = small_model
    store, segments, flat, truth = rag
    alone = ChunkStore(store.url, model, store.tokenizer)
    alone.add(segments[:-1], progress=False)
    reuse = dict(recompute_ratio=0)
    assert blended_kl(model, rag, **reuse) < blended_kl(
        model, (alone, segments, flat, truth), **reuse
    )


def test_the_blend_answers_as_full_prefill_does(small_model, rag):
    model, tokenizer = small_model
    store, segments, _, _ = rag
    blended = BlendedCache.blend(model, store, segments)
    assert "7463343" in greedy(model, tokenizer, blended.input_ids, blended, 20)
    report = blended.report()
    assert report.reused_tokens > 0.9 * blended.input_ids.shape[1]
