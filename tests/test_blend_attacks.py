"""Uses that went wrong without a word, or with an error that did not say what was wrong."""

import copy
import pickle

import pytest
import torch
from anchor_cache.patches.attention import is_patched
from families import tiny_model
from test_blended_cache import PREFIX, full_logits, next_logits, row

from anchor_cache import BlendedCache, ChunkStore, Combined, TokenSelector
from anchor_cache.recompute import NO_QUESTION

OPTIONS = dict(max_new_tokens=8, do_sample=False)


@pytest.fixture
def setting(tmp_path):
    model = tiny_model()
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    documents = [row(n) for n in (19, 30, 26)]
    store.add(documents, progress=False)
    return model, store, [PREFIX, *documents, row(8)]


def continuation(model, cache, **options):
    return model.generate(**cache.inputs, past_key_values=cache, **OPTIONS, **options)


@pytest.mark.parametrize("way", ["prompt lookup", "assisted", "twice"])
def test_a_prompt_that_generate_reads_again_is_refused(setting, way):
    """Assisted and prompt-lookup decoding feed all ids whatever the cache holds."""
    model, store, segments = setting
    cache = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    options = {}
    if way == "twice":
        continuation(model, cache)
    elif way == "assisted":
        options = dict(assistant_model=model)
    else:
        options = dict(prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="would be read twice"):
        continuation(model, cache, **options)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_of_a_blend_route_attention_themselves(setting, copied):
    model, store, segments = setting
    cache = BlendedCache.blend(model, store, segments, recompute_ratio=1)
    other = copied(cache)
    expected = continuation(model, cache)
    del cache
    assert not is_patched(model)
    assert torch.equal(continuation(model, other), expected)
    assert is_patched(model)


@pytest.mark.parametrize("indices", [[1, 0], [1], [0, 1, 1]])
def test_selected_rows_keep_their_prompts(setting, indices):
    model, store, (prefix, a, b, c, question) = setting
    prompts = [[prefix, a, b, question], [prefix, c, row(3)]]
    expected = continuation(model, BlendedCache.blend_batch(model, store, prompts))
    cache = BlendedCache.blend_batch(model, store, prompts)
    tokens = [report.reused_tokens for report in cache.reports()]
    cache.batch_select_indices(torch.tensor(indices))
    assert [report.reused_tokens for report in cache.reports()] == [tokens[i] for i in indices]
    assert torch.equal(continuation(model, cache), expected[indices])


def test_rows_that_were_repeated_are_selected_for_beams(setting):
    model, store, segments = setting
    cache = BlendedCache.blend(model, store, segments)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert continuation(model, cache, num_beams=2).shape[0] == 1


@pytest.mark.parametrize("selector", ["hkvd", "first", "random", "oracle", "none"])
@pytest.mark.parametrize("context", ["missing", "exact", "exact, question of one token"])
def test_an_automatic_ratio_of_nothing(setting, selector, context):
    model, store, (prefix, first, *_, question) = setting
    segments = [row(9), question] if context == "missing" else [prefix, first, question]
    segments[-1] = question[:1] if "one" in context else question
    options = dict(recompute_ratio="auto", auto="loading", selector=selector)
    cache = BlendedCache.blend(model, store, segments, **options)
    assert cache.report().recompute_ratio == 0 and cache.report().selected == []
    torch.testing.assert_close(
        next_logits(model, cache), full_logits(model, segments), atol=1e-4, rtol=1e-4
    )


def test_a_question_that_cannot_be_listened_to_is_reported(setting):
    model, store, segments = setting
    segments = [*segments[:-1], [7]]
    assert BlendedCache.blend(model, store, segments).report().reasons == {NO_QUESTION: 1}
    for options in (dict(selector="hkvd"), dict(recompute_ratio=0)):
        assert BlendedCache.blend(model, store, segments, **options).report().reasons == {}


class Scored(TokenSelector):
    """A selector of one's own, by a function of the number of candidates."""

    def __init__(self, scores):
        self._scores = scores

    def scores(self, candidates):
        return self._scores(len(candidates))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda n: torch.full((n,), float("nan")), "returned nan"),
        (lambda n: torch.rand(n // 2), r"each of the 56 candidates.*\(28,\)"),
        (lambda n: torch.rand(n + 9), r"each of the 56 candidates.*\(65,\)"),
        (lambda n: torch.rand(n, 1), r"each of the 56 candidates.*\(56, 1\)"),
        (lambda n: torch.rand(n, device="meta"), "on cpu, not .* on meta"),
        (lambda n: torch.rand(n).to(torch.complex64), "one real number"),
        (lambda n: [1.0] * n, "must return a tensor, not a list"),
        (lambda n: None, "must return a tensor, not a NoneType"),
    ],
)
@pytest.mark.parametrize("combined", [False, True])
def test_scores_that_rank_nothing_are_named(setting, scores, message, combined):
    model, store, segments = setting
    selector = Scored(scores)
    selector = Combined((selector, 0.5), ("first", 0.5)) if combined else selector
    with pytest.raises(ValueError, match=f"Scored.scores .*{message}"):
        BlendedCache.blend(model, store, segments, selector=selector)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.float64])
def test_scores_of_any_real_dtype(setting, dtype):
    model, store, segments = setting
    selector = Scored(lambda n: (torch.arange(n) >= n - 3).to(dtype))
    report = BlendedCache.blend(
        model, store, segments, selector=selector, recompute_ratio=3 / 56
    ).report()
    assert report.selected == [77, 78, 79]


def test_combined_chooses_no_token_twice(setting):
    """Also where the scores of all that is left are the lowest there are."""
    model, store, segments = setting
    last = Scored(lambda n: torch.full((n,), float("-inf")))
    selector = Combined((last, 0.5), (last, 0.5))
    report = BlendedCache.blend(model, store, segments, selector=selector).report()
    assert len(report.selected) == len(set(report.selected)) == 9


@pytest.mark.parametrize("needs", [("devation",), "deviation"])
def test_signals_that_there_are_not_are_named(setting, needs):
    model, store, segments = setting
    selector = Scored(torch.rand)
    selector.needs = needs
    for own in (selector, lambda: Combined((selector, 1))):
        with pytest.raises(ValueError, match=r"Scored.needs=.* some of deviation, attention"):
            own = own() if callable(own) else own
            BlendedCache.blend(model, store, segments, selector=own)


def test_autocast_is_refused(setting):
    """What it computes would be stored as the model's own."""
    model, store, segments = setting
    with torch.autocast("cpu", torch.bfloat16):
        for use in (
            lambda: BlendedCache.blend(model, store, segments),
            lambda: store.add([row(5)], progress=False),
            lambda: ChunkStore(store.url, model),
        ):
            with pytest.raises(ValueError, match="torch.autocast is on"):
                use()


@pytest.mark.parametrize("segment", [None, 5, range(4), {1: 2}])
def test_segments_of_a_wrong_kind_are_named(setting, segment):
    model, store, _ = setting
    with pytest.raises(ValueError, match=r"segments\[1\] must be text or a flat sequence"):
        BlendedCache.blend(model, store, [PREFIX, segment, [3]])
