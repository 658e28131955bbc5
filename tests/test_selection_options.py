"""Every way to select, at work in a model: limits that equal dense attention, budgets, audits."""

import copy
import math

import pytest
import torch
from anchor_cache.patches.readings import Reading
from families import random_ids, tiny_model
from test_anchor_cache_exact import SMALL, generate
from test_anchor_cache_rows import left_padded, rebuilt
from transformers import DynamicCache

from anchor_cache import AnchorBuilder, AnchorConfig, AnchorDynamicCache, AnchorLayer
from anchor_cache.anchors import Representative

pytestmark = pytest.mark.usefixtures("ranks_few")

OPTIONS = [
    dict(builder="tangent", anchors_per_head=2),
    dict(builder="representative"),
    dict(builder=Representative(tokens=3), refine=None),
    dict(builder="minmax", refine=None),
    dict(builder="minmax"),
    dict(anchor_dtype=None, sketch_bits=1),
    dict(refine="exact", refine_factor=2),
    dict(read_size=1, refine_factor=2),
    dict(read_size=8),
    dict(selection_heads="query"),
    dict(selection_heads="layer"),
    dict(selection_heads="query", coverage=0.5),
    dict(coverage=0.3),
    dict(tolerance=0.9),
    dict(reselect_every=4),
    dict(skipped="mean"),
    dict(skipped="mean", selection_heads="query"),
    dict(per_layer={0: {"budget": 1.0}, 1: {"builder": "tangent", "block_size": 16}}),
]


def ids_of(options):
    return "-".join(f"{k}={v}" for k, v in options.items())[:50]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("options", OPTIONS, ids=ids_of)
def test_rows_of_a_padded_batch_equal_rows_alone_and_budgets_hold(options, implementation):
    model = tiny_model(num_hidden_layers=2, attn_implementation=implementation)
    rows = [random_ids(180), random_ids(131)]
    ids, mask = left_padded(rows)
    cache = AnchorDynamicCache(budget=72, **SMALL, **options)
    # The padding token's embedding is zero, and a zero query finds all blocks alike.
    together = generate(model, ids, cache, attention_mask=mask, suppress_tokens=[0])[1]
    report = cache.report()
    assert report.sparse_steps == 19 and torch.isfinite(together).all()
    if "tolerance" not in options:
        assert 0 < report.tokens_attended <= report.max_tokens_attended <= 72
    if "reselect_every" in options or "tolerance" in options:
        return  # steps of a row then depend on its length, or on what other rows need
    for i, row in enumerate(rows):
        cache = AnchorDynamicCache(budget=72, **SMALL, **options)
        alone = generate(model, row[None], cache, suppress_tokens=[0])[1]
        torch.testing.assert_close(together[:, i], alone[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=ids_of)
def test_the_index_kept_while_decoding_equals_a_rebuilt_one(options):
    if options.get("builder") in ("tangent", "representative") or "per_layer" in options:
        pytest.skip("a rebuilt index looks from newer queries")
    if isinstance(options.get("builder"), Representative) or "reselect_every" in options:
        pytest.skip("a rebuilt index looks from newer queries, or selects at another step")
    model = tiny_model(num_hidden_layers=2)
    cache = AnchorDynamicCache(budget=72, **SMALL, **options)
    generate(model, random_ids(2, 150), cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-5)
    other = rebuilt(copy.deepcopy(cache))
    token = random_ids(2, 1)
    logits = [model(token, past_key_values=c).logits for c in (cache, other)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_tolerance_zero_is_dense(family):
    model = tiny_model(family, attn_implementation="eager")
    ids = random_ids(2, 150)
    expected = generate(model, ids, DynamicCache(config=model.config))
    cache = AnchorDynamicCache(model.config, budget=72, tolerance=0, **SMALL)
    actual = generate(model, ids, cache)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-5)
    assert "tolerance=0 allows nothing to be left out" in cache.report().reasons


@pytest.mark.parametrize("options", [dict(coverage=1.0), dict(skipped=None)])
def test_full_coverage_reads_the_whole_budget(options):
    model, ids = tiny_model(), random_ids(2, 150)
    expected = generate(model, ids, AnchorDynamicCache(budget=72, **SMALL))[1]
    cache = AnchorDynamicCache(budget=72, **SMALL, **options)
    torch.testing.assert_close(generate(model, ids, cache)[1], expected, atol=1e-5, rtol=1e-5)


def test_a_layer_of_its_own_settings():
    model, ids = tiny_model(), random_ids(1, 150)
    for config in (None, model.config):
        cache = AnchorDynamicCache(config, budget=72, per_layer={1: {"budget": 1.0}}, **SMALL)
        generate(model, ids, cache)
        records = {i: layer.record for i, layer in cache.anchor_layers.items()}
        assert [r.dense_steps for r in records.values()] == [0, 19, 0, 0]
        again = AnchorDynamicCache.from_cache(cache, cache.anchor_config)
        assert again.layers[1].config.budget == 1.0 and again.layers[2].config.budget == 72


def test_a_selection_serves_several_steps_and_sees_every_new_token():
    model, ids = tiny_model(num_hidden_layers=1), random_ids(1, 150)
    cache = AnchorDynamicCache(budget=72, reselect_every=4, **SMALL)
    model(ids, past_key_values=cache)
    layer, chosen = cache.layers[0], []
    for step in range(12):
        model(random_ids(1, 1), past_key_values=cache)
        positions = layer.reader.selection.positions
        assert set(range(135 + step, 151 + step)) <= set(positions[0, 0].tolist())
        assert torch.equal(positions[0, 0].max(), torch.tensor(150 + step))
        assert len(set(positions[0, 0].tolist())) == positions.shape[2] <= 72
        chosen.append(layer.reader.selection.choice.pieces)
    assert all(torch.equal(chosen[i], chosen[i - i % 4]) for i in range(12))
    assert not torch.equal(chosen[0], chosen[4]) or not torch.equal(chosen[4], chosen[8])
    cache.crop(-1)
    model(random_ids(1, 1), past_key_values=cache)  # a crop ends it
    assert layer.reader._serves == 3


class Attention(torch.nn.Module):
    layer_idx = 0


def read_once(settings, keys, values, query):
    layer = AnchorLayer(AnchorConfig(**{**SMALL, **settings}))
    stored, kept = layer.update(keys, values)
    return layer.read(Attention(), query, stored, kept, None, {}).gathered()


def attend(reading: Reading, query):
    group = query.shape[1] // reading.keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (reading.keys, reading.values))
    logits = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    if reading.mask is not None and reading.mask.dtype == torch.bool:
        logits = logits.masked_fill(~reading.mask, float("-inf"))
    elif reading.mask is not None:
        logits = logits + reading.mask
    return logits.softmax(-1) @ values


@pytest.mark.parametrize("heads", ["key_value", "query", "layer"])
def test_skipped_blocks_of_equal_tokens_lose_nothing_by_their_mean(heads):
    keys, values = (torch.randn(2, 2, 50, 32).repeat_interleave(8, 2) for _ in range(2))
    query = torch.randn(2, 6, 1, 32)
    settings = dict(budget=72, skipped="mean", selection_heads=heads, refine=None)
    settings["anchor_dtype"] = None
    reading = read_once(settings, keys, values, query)
    assert reading.keys.shape[2] < 300
    expected = attend(Reading(keys, values, None), query)
    torch.testing.assert_close(attend(reading, query), expected, atol=1e-5, rtol=1e-5)
    without = attend(read_once({**settings, "skipped": None}, keys, values, query), query)
    assert (without - expected).norm() > 0.1 * expected.norm()


def test_a_selection_per_query_head_is_each_heads_own():
    keys, values = torch.randn(2, 2, 400, 32), torch.randn(2, 2, 400, 32)
    query = 2 * torch.randn(2, 6, 1, 32)
    together = attend(
        read_once(dict(budget=72, selection_heads="query"), keys, values, query), query
    )
    for head in range(6):
        own = slice(head // 3, head // 3 + 1)
        alone = read_once(dict(budget=72), keys[:, own], values[:, own], query[:, head, None])
        expected = attend(alone, query[:, head, None])
        torch.testing.assert_close(together[:, head, None], expected, atol=1e-5, rtol=1e-5)


def test_audits_of_an_oracle_are_perfect():
    model, ids = tiny_model(), random_ids(2, 150)
    settings = dict(budget=72, refine="exact", refine_factor=100, audit_every=1, **SMALL)
    cache = AnchorDynamicCache(**settings)
    generate(model, ids, cache)
    report = cache.report()
    assert report.recall == 1.0
    assert math.isclose(report.coverage, report.estimated_coverage, abs_tol=1e-4)
    assert 0 < report.output_error < 1
    per_head = report.per_head("output_error")
    assert list(per_head) == [0, 1, 2, 3] and len(per_head[0]) == 4
    assert len(report.per_head("recall")[0]) == 2


@pytest.mark.parametrize("heads", ["key_value", "query", "layer"])
def test_output_error_is_the_distance_from_dense_attention(heads):
    keys, values = torch.randn(2, 2, 400, 32), torch.randn(2, 2, 400, 32)
    query = 2 * torch.randn(2, 6, 1, 32)
    settings = dict(budget=72, audit_every=1, selection_heads=heads)
    layer = AnchorLayer(AnchorConfig(**SMALL, **settings))
    stored, kept = layer.update(keys, values)
    reading = layer.read(Attention(), query, stored, kept, None, {})
    sparse, dense = attend(reading, query), attend(Reading(keys, values, None), query)
    reading.compare(sparse.transpose(1, 2), dense.transpose(1, 2))
    (audit,) = layer.record.audits
    expected = (sparse - dense).norm(dim=-1) / dense.norm(dim=-1)
    torch.testing.assert_close(audit.output_error, expected[..., 0])
    weights = (query @ keys.repeat_interleave(3, 1).transpose(-1, -2) * 32**-0.5).softmax(-1)
    read = torch.zeros(2, 6, 400, dtype=torch.bool)
    for b in range(2):
        for head in range(6):
            seen = reading.keys[b, head // 3]
            if reading.mask is not None:
                seen = seen[reading.mask[b, head, 0]]
            read[b, head] = (keys[b, head // 3][:, None] == seen[None]).all(-1).any(-1)
    torch.testing.assert_close(audit.mass, (weights[:, :, 0] * read).sum(-1))


def test_pictures_of_every_audited_figure(tmp_path):
    model, ids = tiny_model(), random_ids(1, 150)
    cache = AnchorDynamicCache(budget=72, **SMALL)
    generate(model, ids, cache)
    with pytest.raises(ValueError, match="set audit_every=1"):
        cache.report().plot(tmp_path / "none.png", figure="mass")
    cache = AnchorDynamicCache(budget=72, audit_every=5, **SMALL)
    generate(model, ids, cache)
    for figure in ("blocks", "mass", "recall", "output_error", "calibration"):
        path = cache.report().plot(tmp_path / f"{figure}.png", figure=figure)
        assert path.stat().st_size > 5000
    with pytest.raises(ValueError, match="figure='masses' is not valid: one of blocks"):
        cache.report().plot(tmp_path / "x.png", figure="masses")
    with pytest.raises(ValueError, match="name='masses' is not valid"):
        cache.report().per_head("masses")


def test_a_builder_of_ones_own():
    class Newest(AnchorBuilder):
        """The newest key of a block stands for it."""

        query_dependent = False

        def weights(self, keys, perspectives, valid):
            b, _, n_blocks, size, _ = keys.shape
            weights = torch.zeros(b, 1, n_blocks, 1, size)
            weights[..., -1] = 1
            return weights if valid is None else weights * valid.unsqueeze(3)

    model, ids = tiny_model(), random_ids(2, 150)
    for refine in (None, "sketch"):
        cache = AnchorDynamicCache(budget=72, builder=Newest(), refine=refine, **SMALL)
        generate(model, ids, cache)
        anchors, keys = cache.layers[0].index.anchors[:, 3, 0], cache.layers[0].keys[:, :, 31]
        torch.testing.assert_close(anchors, keys, atol=keys.abs().max() / 250, rtol=0)
        assert cache.report().sparse_steps == 19


def test_flash_attention_refuses_what_needs_a_mask():
    from anchor_cache.patches.attention import _mask_for

    mask, query = torch.ones(1, 4, 1, 9, dtype=torch.bool), torch.randn(1, 4, 1, 8)
    assert _mask_for("flash_attention_2", None, query) is None
    with pytest.raises(NotImplementedError, match="flash_attention_2' takes no mask .*'sdpa'"):
        _mask_for("flash_attention_2", mask, query)
