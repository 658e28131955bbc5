"""Blending on tiny random models of six families."""

import pytest
import torch
from families import FAMILIES, random_ids, tiny_model
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache, BlendedCache, ChunkStore
from anchor_cache.token_selectors import SELECTORS

PREFIX = [1, 5, 9, 4, 7]


def row(n):
    return random_ids(n).tolist()


@pytest.fixture(params=FAMILIES)
def setting(request, tmp_path):
    """A model, its store, and a prompt longer than the sliding windows."""
    model = tiny_model(request.param)
    if request.param == "gpt_oss":
        model = tiny_model(request.param, attn_implementation="eager")
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    documents = [row(n) for n in (19, 30, 1, 26)]
    store.add(documents, progress=False)
    return model, store, [PREFIX, *documents, row(8)]


def prefill(model, ids):
    cache = DynamicCache(config=model.config)
    model(torch.tensor([ids]), past_key_values=cache)
    return cache


def next_logits(model, cache):
    return model(cache.input_ids[:, -1:], past_key_values=cache).logits[0, -1]


def full_logits(model, segments):
    return model(torch.tensor([sum(segments, [])])).logits[0, -1]


def same_kv(one, other, atol):
    for a, b in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=atol, rtol=atol)
        torch.testing.assert_close(a.values, b.values, atol=atol, rtol=atol)


def test_ratio_1_equals_full_prefill(setting):
    model, store, segments = setting
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    same_kv(blended, prefill(model, sum(segments, [])[:-1]), 1e-4)
    torch.testing.assert_close(
        next_logits(model, blended), full_logits(model, segments), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_recomputes_what_it_says(setting, selector):
    model, store, segments = setting
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=0.25, selector=selector)
    report = blended.report()
    reference = prefill(model, sum(segments, [])[:-1])
    inexact = sum(map(len, segments[2:-1]))
    wanted = 0 if selector == "none" else -(-inexact // 4)
    assert len(report.selected) == report.recomputed_tokens[-1] == wanted
    # Layer 1 sees only exact keys and values of layer 0: what was computed there is exact.
    rows = report.selected
    if blended.layers[1].keys.shape[2] == blended.get_seq_length():
        torch.testing.assert_close(
            blended.layers[1].keys[:, :, rows],
            reference.layers[1].keys[:, :, rows],
            atol=1e-4,
            rtol=1e-4,
        )


def test_query_selector_recomputes_what_the_question_attends_to(tmp_path):
    """Against a naive loop over all layers, heads and question tokens."""
    model = tiny_model(attn_implementation="eager")
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    documents = [row(20), row(20), row(20)]
    store.add(documents, progress=False)
    segments = [PREFIX, *documents, row(6)]
    options = dict(recompute_ratio=0.25, selector="query")
    chosen = BlendedCache.blend(model, store, segments, **options).report().selected
    reused = BlendedCache.blend(model, store, segments, recompute_ratio=0)
    reused.crop(-5)
    question = torch.tensor([segments[-1][:-1]])
    weights = model(question, past_key_values=reused, output_attentions=True).attentions
    attention = sum(layer[0].amax((0, 1)) for layer in weights)[:65]
    candidates = torch.arange(25, 65)
    # 60 % of the 10: the first tokens of each chunk, weighed by the attention to the chunk.
    chunks = attention[25:45].sum(), attention[45:65].sum()
    front = torch.cat([chunk / torch.arange(1, 21) for chunk in chunks])
    first = candidates[front.topk(6).indices]
    rest = attention[candidates]
    rest[first - 25] = float("-inf")
    expected = torch.cat((first, candidates[rest.topk(4).indices]))
    assert chosen == sorted(expected.tolist())


def naive_reuse(model, segments):
    """Full reuse by hand: every chunk is prefilled after the prefix at its final position, so that
    no rotation is needed; the question then runs over the joined keys and values."""
    prefix, documents, question = segments[0], segments[1:-1], segments[-1]
    joined = DynamicCache()
    start = len(prefix)
    pieces = [prefill_at(model, prefix, [], 0)]
    for document in documents:
        pieces.append(prefill_at(model, document, prefix, start))
        start += len(document)
    for layer in range(len(pieces[0])):
        joined.update(*(torch.cat([p[layer][i] for p in pieces], 2) for i in (0, 1)), layer)
    ids = torch.tensor([question])
    length = start + len(question)
    return model(
        ids,
        past_key_values=joined,
        attention_mask=torch.ones(1, length, dtype=torch.long),
        position_ids=torch.arange(start, length)[None],
    ).logits[0, -1]


def prefill_at(model, ids, prefix, start):
    """Keys and values of ids that follow the prefix at positions from ``start`` on. Rotary
    attention sees only distances, so the prefix stands right before them."""
    cache = DynamicCache()
    first = start - len(prefix)
    model(
        torch.tensor([prefix + ids]),
        past_key_values=cache,
        position_ids=torch.arange(first, start + len(ids))[None],
    )
    own = slice(len(prefix), None)
    return [(layer.keys[:, :, own], layer.values[:, :, own]) for layer in cache.layers]


def test_ratio_0_equals_naive_reuse_and_recomputes_nothing(setting):
    model, store, segments = setting
    computed = []
    embed = model.get_decoder()
    layer = next(m for m in embed.modules() if isinstance(m, torch.nn.ModuleList))[0]
    hook = layer.register_forward_hook(lambda m, args, out: computed.append(out.shape[1]))
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=0)
    hook.remove()
    assert sum(computed[1:]) == len(segments[-1]) - 1  # the first call is the dry run
    assert blended.report().recomputed_tokens == [0] * len(blended.layers)
    torch.testing.assert_close(
        next_logits(model, blended), naive_reuse(model, segments), atol=1e-4, rtol=1e-4
    )


def test_moved_keys_equal_fresh_keys_at_layer_0(setting):
    model, store, segments = setting
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=0)
    fresh = prefill(model, sum(segments, [])[:-1])
    torch.testing.assert_close(blended.layers[0].keys, fresh.layers[0].keys, atol=1e-5, rtol=1e-5)


def test_one_chunk_at_offset_0_is_an_ordinary_cache(setting):
    model, store, _ = setting
    alone = ChunkStore(store.url, model)
    document, question = row(40), row(2)
    alone.add([document], progress=False)
    blended = BlendedCache.blend(model, alone, [document, question], recompute_ratio=0)
    assert blended.report().exact_prefix_tokens == 40
    same_kv(blended, prefill(model, document + question[:-1]), 1e-4)


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_a_later_token_never_changes_an_earlier_row(setting, ratio):
    model, store, segments = setting
    changed = [*segments[:-2], row(26), row(8)]
    store.add([changed[-2]], progress=False)
    # "first" selects the same rows whatever the tokens are.
    options = dict(recompute_ratio=ratio, selector="first")
    one, other = (BlendedCache.blend(model, store, s, **options) for s in (segments, changed))
    assert one.report().selected == other.report().selected
    before = sum(map(len, segments[:-2]))
    compared = 0
    for a, b in zip(one.layers, other.layers, strict=True):
        if a.get_seq_length() == a.keys.shape[2]:  # sliding layers keep only the newest tokens
            torch.testing.assert_close(a.keys[:, :, :before], b.keys[:, :, :before])
            torch.testing.assert_close(a.values[:, :, :before], b.values[:, :, :before])
            compared += 1
    assert compared >= 2


def test_missing_chunks_are_computed_in_the_same_pass(setting):
    model, store, segments = setting
    files = len(store)
    unknown = [*segments[:2], row(13), *segments[2:]]
    blended = BlendedCache.blend(model, store, unknown, recompute_ratio=1)
    report = blended.report()
    assert report.fresh_tokens == 13 + 8
    assert report.reasons == {"chunk not in the store": 1}
    torch.testing.assert_close(
        next_logits(model, blended), full_logits(model, unknown), atol=1e-4, rtol=1e-4
    )
    assert len(store) == files
    BlendedCache.blend(model, store, unknown, add_missing=True)
    again = BlendedCache.blend(model, store, unknown)
    assert len(store) == files + 1 and again.report().fresh_tokens == 8


def test_generate_goes_on_from_a_blend(setting):
    model, store, segments = setting
    ids = torch.tensor([sum(segments, [])])
    mask = torch.ones_like(ids)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    expected = model.generate(ids, **options)
    assert torch.equal(
        model.generate(blended.input_ids, past_key_values=blended, **options), expected
    )


def test_report_counts_add_up(setting):
    model, store, segments = setting
    tokens = sum(map(len, segments))
    options = dict(recompute_ratio=0.25, selector="hkvd")
    blended = BlendedCache.blend(model, store, segments, **options)
    report = blended.report()
    exact = len(segments[0]) + len(segments[1])  # the prefix, and the document right after it
    inexact = tokens - exact - len(segments[-1])
    assert report.exact_prefix_tokens == exact
    assert report.reused_tokens + report.fresh_tokens == tokens
    wanted = -(-inexact // 4)
    layers = len(blended.layers)
    assert report.recomputed_tokens == [inexact] * 2 + [wanted] * (layers - 2)
    assert len(report.selected) == wanted and min(report.selected) >= exact
    assert not report.deviation[1, report.selected].isnan().any()
    rest = report.deviation[1].clone()
    rest[report.selected] = float("-inf")
    assert rest.nan_to_num(float("-inf")).max() <= report.deviation[1, report.selected].min()


def test_deviation_is_zero_where_nothing_depends_on_the_context(setting):
    model, store, segments = setting
    report = BlendedCache.blend(model, store, segments, recompute_ratio=1).report()
    measured = report.deviation[:, sum(map(len, segments[:2])) : -7]
    assert not measured.isnan().any()
    assert measured[0].max() < 1e-4 < measured[1:].max()


def test_permuted_and_repeated_chunks():
    import tempfile

    model = tiny_model()
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore(folder, model, prefix=PREFIX)
        a, b = row(12), row(15)
        store.add([a, b], progress=False)
        segments = [PREFIX, b, a, b, a, row(3)]
        blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
        assert blended.report().reused_tokens == 5 + 2 * 27
        torch.testing.assert_close(
            next_logits(model, blended), full_logits(model, segments), atol=1e-4, rtol=1e-4
        )


def test_add_missing_stores_the_prefix_as_a_prefix(tmp_path):
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    segments = [PREFIX, row(9), row(11), row(4)]
    first = BlendedCache.blend(model, store, segments, add_missing=True)
    assert first.report().reasons == {"chunk not in the store": 3} and len(store) == 3
    again = BlendedCache.blend(model, store, segments, add_missing=True).report()
    assert again.reasons == {} and again.exact_prefix_tokens == 5 + 9 and len(store) == 3


def test_all_missing_and_no_chunk_at_all(tmp_path):
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    for segments in ([row(9), row(11), row(4)], [row(6)], [row(1)]):
        blended = BlendedCache.blend(model, store, segments)
        torch.testing.assert_close(
            next_logits(model, blended), full_logits(model, segments), atol=1e-5, rtol=1e-5
        )


def test_a_blend_can_be_decoded_sparsely(tmp_path):
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    documents = [row(50) for _ in range(3)]
    store.add(documents, progress=False)
    segments = [PREFIX, *documents, row(8)]
    blended = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    ids = blended.input_ids
    sizes = dict(block_size=8, sink_size=8, window_size=16, dense_below=0, dense_above=1.0)
    cache = AnchorDynamicCache.from_cache(blended, budget=56, **sizes)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    model.generate(ids, past_key_values=cache, **options)
    assert cache.report().sparse_steps == 12


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "segments must be a list"),
        ("a question", "segments must be a list"),
        ([[3], []], r"segments\[1\] is empty"),
        ([[3], [4, 999]], r"segments\[1\] has ids outside"),
        (["text", [3]], r"segments\[0\] is text, but the store has no tokenizer"),
    ],
)
def test_bad_segments_are_named(tmp_path, segments, message):
    model = tiny_model()
    store = ChunkStore(tmp_path, model)
    with pytest.raises(ValueError, match=message):
        BlendedCache.blend(model, store, segments)


def test_another_model_is_refused(tmp_path):
    store = ChunkStore(tmp_path, tiny_model())
    with pytest.raises(ValueError, match="not the store's model"):
        BlendedCache.blend(tiny_model(), store, [[3]])


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt2", "GPT2LMHeadModel cannot be blended"),
        ("qwen3_next", "Qwen3NextForCausalLM cannot be blended: .*linear"),
    ],
)
def test_models_that_cannot_be_blended_are_refused_by_name(tmp_path, family, message):
    with pytest.raises(NotImplementedError, match=message):
        ChunkStore(tmp_path, tiny_model(family))
