"""Selectors, their combinations, gradual filtering and the automatic ratio."""

import json
import math

import pytest
import torch
from families import tiny_model
from test_blended_cache import PREFIX, prefill, row, same_kv

from anchor_cache import BlendConfig, BlendedCache, ChunkStore, Combined, TokenSelector
from anchor_cache.token_selectors import SELECTORS, Candidates, selector_of

DOCUMENTS = 3 * [24]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    model = tiny_model(num_hidden_layers=6)
    store = ChunkStore(tmp_path_factory.mktemp("chunks"), model, prefix=PREFIX)
    documents = [row(n) for n in DOCUMENTS]
    store.add(documents, progress=False)
    return model, store, [PREFIX, *documents, row(6)]


INEXACT = 48  # the first document stands right after the prefix, so it is exact


def blend(setting, **fields):
    model, store, segments = setting
    return BlendedCache.blend(model, store, segments, **fields)


@pytest.mark.parametrize("selector", ["hkvd", "query", "first", "random", "oracle"])
@pytest.mark.parametrize("schedule", [(), (0.5,), (0.5, 0.25)])
def test_each_layer_recomputes_what_its_step_of_the_schedule_keeps(setting, selector, schedule):
    computed = []
    layers = setting[0].model.layers
    hooks = [
        m.register_forward_hook(lambda m, args, out, i=i: computed.append((i, out.shape[1])))
        for i, m in enumerate(layers)
    ]
    report = blend(setting, selector=selector, schedule=schedule, recompute_ratio=0.125).report()
    for hook in hooks:
        hook.remove()
    counts = [math.ceil(share * INEXACT) for share in (*schedule, 0.125)]
    first = 1 if selector == "hkvd" else 0
    ran = [INEXACT] * first + counts + [counts[-1]] * 6
    measured = [INEXACT] * (first + 1) + counts + [counts[-1]] * 6
    assert report.recomputed_tokens == (measured if selector == "hkvd" else ran)[:6]
    # Whole layers, question included; the last layer stops after its keys and values.
    runs = computed[-5:]
    assert runs == [(i, ran[i] + 5) for i in range(5)]
    assert report.recompute_ratio == pytest.approx(counts[-1] / INEXACT)


def test_gradual_filtering_measures_survivors_again(setting):
    """Against the deviations that the report holds: each filter keeps the largest of its layer."""
    report = blend(setting, selector="hkvd", schedule=(0.5, 0.25), recompute_ratio=0.125).report()
    left = torch.arange(29, 77)
    for layer, count in ((1, 24), (2, 12), (3, 6)):
        deviation = report.deviation[layer, left]
        assert not deviation.isnan().any()
        assert torch.isfinite(report.deviation[layer]).sum() == len(left)
        left = left[deviation.topk(count).indices].sort().values
    assert report.selected == left.tolist()


def test_a_schedule_of_ones_is_full_prefill(setting):
    blended = blend(setting, selector="hkvd", schedule=(1, 1), recompute_ratio=1)
    same_kv(blended, prefill(setting[0], sum(setting[2], [])[:-1]), 1e-4)


def test_oracle_takes_the_largest_true_deviation(setting):
    model, _, segments = setting
    report = blend(setting, selector="oracle", recompute_ratio=0.25).report()
    truth = prefill(model, sum(segments, [])[:-1])
    reused = blend(setting, recompute_ratio=0)
    deviation = sum(
        (a.values - b.values).square().sum((0, 1, 3)).sqrt()
        for a, b in zip(truth.layers, reused.layers, strict=True)
    )[29:77]
    assert report.selected == sorted((deviation.topk(12).indices + 29).tolist())


class Last(TokenSelector):
    """The last tokens of every chunk: a selector of one's own."""

    def scores(self, candidates):
        return -candidates.after.float()


def test_a_selector_of_ones_own(setting):
    report = blend(setting, selector=Last(), recompute_ratio=0.125).report()
    assert report.selected == [50, 51, 52, 74, 75, 76]


def test_combined_takes_from_each_part_what_is_not_taken_yet(setting):
    both = Combined(("first", 0.5), (Last(), 0.5))
    report = blend(setting, selector=both, recompute_ratio=8 / INEXACT).report()
    assert report.selected == [29, 30, 51, 52, 53, 54, 75, 76]
    twice = Combined(("first", 0.5), ("first", 0.5))
    report = blend(setting, selector=twice, recompute_ratio=8 / INEXACT).report()
    assert report.selected == [29, 30, 31, 32, 53, 54, 55, 56]


def test_combined_asks_for_the_signals_of_its_parts():
    assert Combined(("hkvd", 0.2), ("query", 0.8)).needs == ("deviation", "attention")
    with pytest.raises(ValueError, match="must sum to 1"):
        Combined(("first", 0.5), ("hkvd", 0.6))


def test_hkvd_combined_with_attention(setting):
    both = Combined(("hkvd", 0.5), ("attended", 0.5))
    report = blend(setting, selector=both, recompute_ratio=0.25).report()
    assert report.recomputed_tokens[1:3] == [INEXACT, 12] and len(report.selected) == 12
    assert {what for what, *_ in report.trace} == {"load", "listen", "measure", "recompute"}


@pytest.mark.parametrize("selector", ["hkvd", "query", "attended", "oracle"])
def test_automatic_ratio_holds_the_target_with_the_fewest_tokens(setting, selector):
    limits = dict(auto_limits=(0, 1))
    options = dict(recompute_ratio="auto", selector=selector, **limits)
    few, more = (blend(setting, quality_target=target, **options).report() for target in (0.4, 0.8))
    assert 0 < len(few.selected) < len(more.selected) < INEXACT
    everything = blend(setting, quality_target=1.0, **options).report()
    assert len(everything.selected) >= INEXACT - 1  # a deviation may be 0
    if selector == "hkvd":
        scores = few.deviation[1, 29:77]
        held = scores[torch.tensor(few.selected) - 29]
        assert held.sum() >= 0.4 * scores.sum() > (held.sum() - held.min())


def test_automatic_ratio_stays_within_its_limits(setting):
    options = dict(recompute_ratio="auto", selector="hkvd")
    for target in (0.01, 1.0):
        report = blend(setting, quality_target=target, auto_limits=(0.25, 0.5), **options).report()
        assert report.recompute_ratio == pytest.approx(0.25 if target < 1 else 0.5)


def test_automatic_ratio_needs_something_to_measure(setting):
    with pytest.raises(ValueError, match="recompute_ratio='auto' needs a selector that measures"):
        blend(setting, recompute_ratio="auto", selector="first")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(schedule=(0.1,)), "do not fall below recompute_ratio"),
        (dict(schedule=(0.2, 0.3)), "never grow"),
        (dict(schedule=0.3), "one for each layer"),
        (dict(schedule=(1.5,)), "one for each layer"),
        (dict(schedule=(0.5,), recompute_ratio="auto"), "'auto' takes none"),
        (dict(recompute_ratio="much"), "or 'auto'"),
        (dict(selector="best"), "or a TokenSelector object"),
        (dict(selector=SELECTORS["hkvd"]), "TokenSelector object"),
        (dict(auto="speed"), "one of quality, loading"),
        (dict(auto="loading", recompute_ratio="auto"), "known only when all is read"),
        (dict(quality_target=0), "a share in"),
        (dict(auto_limits=(0.5, 0.1)), "the smaller one first"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        BlendConfig(**fields)


def test_a_schedule_longer_than_the_model_is_refused(setting):
    for selector, fits in (("hkvd", 4), ("first", 5)):
        blend(setting, selector=selector, schedule=(0.5,) * fits)
        with pytest.raises(ValueError, match="its last filter would stand at layer 6"):
            blend(setting, selector=selector, schedule=(0.5,) * (fits + 1))


@pytest.mark.parametrize(
    "config",
    [
        BlendConfig(),
        BlendConfig(selector="hkvd", schedule=(0.3, 0.2), auto_limits=(0.1, 0.2)),
        BlendConfig(selector=Combined(("first", 0.25), (Combined(("hkvd", 1)), 0.75))),
    ],
)
def test_settings_survive_json(config):
    data = json.loads(json.dumps(config.to_dict()))
    again = BlendConfig.from_dict(data)
    assert again.to_dict() == config.to_dict()
    n = 10
    candidates = Candidates(
        *(torch.arange(n) for _ in range(3)), 4, torch.rand(n), torch.rand(n), torch.rand(n)
    )
    one, other = (selector_of(c.selector).select(candidates) for c in (config, again))
    assert torch.equal(one, other)
