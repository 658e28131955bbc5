"""Uses of the selection that once went wrong: each is a kind of fault, not one instance."""

import pytest
import torch
from anchor_cache.patches.attention import Reading
from families import random_ids, tiny_model
from test_anchor_cache_exact import SMALL, generate
from test_anchor_cache_rows import left_padded
from test_selection import mass_read, situation
from test_selection_options import Attention, attend, read_once

from anchor_cache import AnchorBuilder, AnchorConfig, AnchorDynamicCache, AnchorLayer
from anchor_cache.anchors import Representative
from anchor_cache.block_choice import choose_pieces
from anchor_cache.certificate import read_until_certain
from anchor_cache.token_reading import select_tokens

pytestmark = pytest.mark.usefixtures("ranks_few")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_a_tolerance_is_proven_in_half_precision_too(dtype, dim):
    """Two blocks far above all others, of which one is skipped: exactly half of the mass."""
    keys = torch.zeros(1, 1, 120, dim, dtype=dtype)
    keys[..., 0] = -20
    keys[:, :, 48:56, 0] = keys[:, :, 80:88, 0] = 10
    query = torch.zeros(1, 1, 1, dim, dtype=dtype)
    for size in torch.linspace(1, 1.2, 9):
        query[..., 0] = 60 * size
        layer = AnchorLayer(AnchorConfig(**SMALL, budget=39, tolerance=0.5, read_size=8))
        stored, kept = layer.update(keys, keys)
        layer.read(Attention(), query, stored, kept, None, {})
        if layer.record.sparse_steps:
            # Found enough: then both blocks were read, or half is what can have been skipped.
            read_both = layer.record.max_attended >= 39
            assert read_both or layer.record.skipped_share >= 0.5 - 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings",
    [
        dict(anchor_dtype="int8"),
        dict(anchor_dtype=None),
        dict(builder="minmax", anchor_dtype=None),
    ],
)
def test_bounds_hold_for_the_rounded_centres(dtype, settings):
    index, tokens, _, _ = situation(peaked=40.0, tolerance=0.1, **settings)
    keys = tokens.keys.states.to(dtype) + 3
    layer = AnchorLayer(AnchorConfig(**SMALL, budget=72, tolerance=0.1, **settings))
    layer.update(keys, keys)
    index.__init__(layer.config, None, (0,), index.scaling)
    index.extend(layer._keys, layer._values, None)
    query = tokens.query.to(dtype)
    bounds = index.upper_bounds(query, 0, 36, None)
    exact = (query.float() * index.scaling).unflatten(1, (2, -1)) @ keys.float().mT
    assert (bounds >= exact[..., :288].unflatten(-1, (36, 8)).amax(-1) - 1e-4).all()


@pytest.mark.parametrize("audit_every", [0, 1])
def test_a_selection_that_serves_on_in_a_padded_batch(audit_every):
    model = tiny_model(num_hidden_layers=1)
    ids, mask = left_padded([random_ids(150), random_ids(133)])
    cache = AnchorDynamicCache(budget=80, reselect_every=4, audit_every=audit_every, **SMALL)
    generate(model, ids, cache, tokens=12, attention_mask=mask)
    report = cache.report()
    assert report.sparse_steps == 11 and report.max_tokens_attended <= 80
    assert not audit_every or 0 < report.recall <= 1


@pytest.mark.parametrize(
    "settings", [dict(reselect_every=4), dict(skipped="mean"), dict(), dict(coverage=0.9)]
)
def test_tokens_that_a_mask_hides_later_on_are_not_read(settings):
    model = tiny_model(num_hidden_layers=1)
    ids, tokens = random_ids(1, 150), random_ids(2, 1, 1)
    logits = []
    for value in (0.0, 100.0):
        cache = AnchorDynamicCache(budget=72, **SMALL, **settings)
        model(ids, past_key_values=cache)
        model(tokens[0], past_key_values=cache)
        hidden = [*range(2, 6), *range(40, 60)]
        cache.layers[0].values[:, :, hidden] = value
        mask = torch.ones(1, 152, dtype=torch.long)
        mask[:, hidden] = 0
        logits.append(model(tokens[1], past_key_values=cache, attention_mask=mask).logits)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    "settings", [dict(coverage=0.3), dict(tolerance=0.95), dict(coverage=0.3, dense_below=80)]
)
def test_rows_that_alone_would_be_dense_stay_whole(settings):
    model = tiny_model(num_hidden_layers=1)
    rows = [random_ids(180), random_ids(60)]
    ids, mask = left_padded(rows)
    settings = {"budget": 72, **SMALL, **settings}
    cache = AnchorDynamicCache(**settings)
    together = generate(model, ids, cache, attention_mask=mask, tokens=3)[1]
    assert "rows of a batch that alone would be dense read everything" in cache.report().reasons
    alone = generate(model, rows[1][None], AnchorDynamicCache(**settings), tokens=3)[1]
    torch.testing.assert_close(together[:, 1], alone[:, 0], atol=1e-4, rtol=1e-4)


def test_a_dense_row_does_not_use_up_what_others_may_still_read():
    model = tiny_model(num_hidden_layers=2)
    ids, mask = left_padded([random_ids(163), random_ids(160)])
    settings = {**SMALL, "budget": 72, "tolerance": 1.0, "dense_below": 162}
    cache = AnchorDynamicCache(**settings)
    generate(model, ids, cache, attention_mask=mask, tokens=3)
    assert cache.report().sparse_steps == 2


@pytest.mark.parametrize("softcap", [2.0, 20.0])
@pytest.mark.parametrize("refine", [None, "sketch"])
def test_estimates_know_soft_caps(softcap, refine):
    keys = 3 * torch.randn(1, 2, 50, 32).repeat_interleave(8, 2)
    values, query = torch.randn(1, 2, 400, 32), 3 * torch.randn(1, 6, 1, 32)
    values = values[:, :, ::8].repeat_interleave(8, 2)
    settings = dict(budget=72, skipped="mean", refine=refine, anchor_dtype=None)
    layer = AnchorLayer(AnchorConfig(**{**SMALL, **settings}))
    stored, kept = layer.update(keys, values)
    reading = layer.read(Attention(), query, stored, kept, None, {"softcap": softcap})

    def capped(reading):
        keys, values = (x.repeat_interleave(3, 1) for x in (reading.keys, reading.values))
        logits = softcap * torch.tanh(query @ keys.mT * 32**-0.5 / softcap)
        logits = logits if reading.mask is None else logits + reading.mask
        return logits.softmax(-1) @ values

    expected = capped(Reading(keys, values, None))
    torch.testing.assert_close(capped(reading), expected, atol=1e-4, rtol=1e-4)


def test_a_tolerance_with_a_coverage_of_heads_that_read_all():
    index, tokens, plan, config = situation(peaked=25.0, padding=(0, 250), tolerance=0.9)
    choice, skipped = read_until_certain(index, tokens, plan, choose_pieces(index, tokens, plan))
    if choice is not None:
        held = mass_read(select_tokens(choice, tokens, plan), tokens)
        assert (1 - held <= skipped + 1e-4).all()


class Odd(AnchorBuilder):
    query_dependent = False

    def __init__(self, made):
        self.made = made

    def weights(self, keys, perspectives, valid):
        return self.made(keys)


@pytest.mark.parametrize(
    "made", [lambda keys: None, lambda keys: keys.mean(-1), lambda keys: torch.ones(1, 1, 1, 1, 3)]
)
def test_weights_of_a_wrong_shape_are_refused_by_class(made):
    cache = AnchorDynamicCache(budget=72, builder=Odd(made), **SMALL)
    with pytest.raises(ValueError, match=r"Odd.weights must return a tensor \[B, H_kv or 1, N"):
        generate(tiny_model(num_hidden_layers=1), random_ids(1, 150), cache)


def test_saved_with_a_builder_object(tmp_path):
    model, ids = tiny_model(num_hidden_layers=2), random_ids(1, 150)
    layers = {1: {"builder": Representative(2), "selection_heads": "query"}}
    cache = AnchorDynamicCache(budget=72, builder=Representative(4), per_layer=layers, **SMALL)
    generate(model, ids, cache)
    cache.save_pretrained(tmp_path)
    again = AnchorDynamicCache.from_pretrained(tmp_path)
    assert again.anchor_config == cache.anchor_config
    token = random_ids(1, 1)
    torch.testing.assert_close(
        *(model(token, past_key_values=c).logits for c in (cache, again)), atol=1e-5, rtol=1e-5
    )
    own = Odd(lambda keys: torch.full((1, 1, keys.shape[2], 1, 8), 1 / 8))
    cache = AnchorDynamicCache.from_cache(cache, budget=72, builder=own, **SMALL)
    cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="builder='Odd' is not valid: .* object of your own"):
        AnchorDynamicCache.from_pretrained(tmp_path)
    again = AnchorDynamicCache.from_pretrained(tmp_path, builder=own)
    assert torch.isfinite(model(token, past_key_values=again).logits).all()


def test_heads_that_read_no_block_have_no_recall(tmp_path):
    cache = AnchorDynamicCache(
        **{**SMALL, "budget": 72, "coverage": 0.01, "refine": "exact", "audit_every": 1}
    )
    generate(tiny_model(num_hidden_layers=1), random_ids(1, 150), cache)
    report = cache.report()
    assert report.recall is None or report.recall != report.recall or report.recall == 1.0
    layers = {1: {"selection_heads": "query"}}
    cache = AnchorDynamicCache(budget=72, audit_every=5, per_layer=layers, **SMALL)
    generate(tiny_model(num_hidden_layers=2), random_ids(1, 150), cache)
    assert cache.report().plot(tmp_path / "recall.png", figure="recall").is_file()


def test_queries_taken_over_in_inference_mode():
    model, ids = tiny_model(num_hidden_layers=1), random_ids(1, 150)
    cache = AnchorDynamicCache(budget=72, builder="tangent", **SMALL)
    generate(model, ids, cache, tokens=3)
    with torch.inference_mode():
        cache = AnchorDynamicCache.from_cache(cache, budget=72, builder="tangent", **SMALL)
    for token in random_ids(3, 1, 1):
        assert torch.isfinite(model(token, past_key_values=cache).logits).all()


def test_a_crop_that_takes_every_kept_query():
    model = tiny_model(num_hidden_layers=1)
    cache = AnchorDynamicCache(budget=72, builder="tangent", **SMALL)
    model(random_ids(1, 300), past_key_values=cache)
    cache.crop(-100)
    for token in random_ids(3, 1, 1):
        assert torch.isfinite(model(token, past_key_values=cache).logits).all()
    assert cache.report().sparse_steps == 3


def test_per_layer_beyond_the_model_is_refused():
    model = tiny_model(num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"per_layer=\[9\] is not valid: .* layers 0 to 1"):
        AnchorDynamicCache(model.config, per_layer={9: {"budget": 1.0}})


def test_one_selection_is_that_of_naive_attention():
    """Reading and attending as the caches do, against a loop over heads."""
    keys, values = torch.randn(1, 2, 400, 32), torch.randn(1, 2, 400, 32)
    query = 2 * torch.randn(1, 6, 1, 32)
    reading = read_once(dict(budget=72, coverage=0.7), keys, values, query)
    output = attend(reading, query)
    for head in range(6):
        seen = reading.mask[0, head, 0] if reading.mask is not None else slice(None)
        own_keys, own_values = (x[0, head // 3][seen] for x in (reading.keys, reading.values))
        weights = (own_keys @ query[0, head, 0] * 32**-0.5).softmax(0)
        torch.testing.assert_close(output[0, head, 0], weights @ own_values)
