"""What generate takes and returns beside ids, and the format of the cache it returns."""

import pytest
import torch
from families import tiny_model
from test_anchor_cache_exact import SMALL
from test_generate_modes import FAMILIES, MODES, anchors, call, dense, prompt
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from anchor_cache import AnchorDynamicCache


@pytest.mark.parametrize("budget", [1.0, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_give_what_ids_give(family, budget):
    model, ids = tiny_model(family), prompt()
    expected = call(model, ids, anchors(model, budget=budget))
    embeds = model.get_input_embeddings()(ids)
    options = dict(inputs_embeds=embeds, max_new_tokens=9, do_sample=False, eos_token_id=[5])
    out = model.generate(past_key_values=anchors(model, budget=budget), **options)
    assert torch.equal(out, expected[:, 120:])


class Collected(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens.append(value.reshape(-1))

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    "options", [dict(), dict(do_sample=True), dict(prompt_lookup_num_tokens=3)]
)
@pytest.mark.parametrize("budget", [1.0, 48])
def test_streamers_get_every_token(budget, options):
    model, ids, streamer = tiny_model(), prompt(), Collected()
    out = call(model, ids, anchors(model, budget=budget), streamer=streamer, **options)
    assert torch.equal(torch.cat(streamer.tokens), out[0]) and streamer.ended


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "assisted"])
def test_the_dictionary_of_outputs(mode):
    model, ids = tiny_model(attn_implementation="eager"), prompt()
    options = dict(
        MODES[mode],
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    expected, actual = (call(model, ids, c(model), **options) for c in (dense, anchors))
    assert actual.keys() == expected.keys()
    cache_key = next(key for key in actual if isinstance(actual[key], DynamicCache))
    for key in actual.keys() - {cache_key}:
        torch.testing.assert_close(actual[key], expected[key], atol=1e-4, rtol=1e-4)


def test_attentions_of_a_sparse_step_are_those_of_the_tokens_that_were_read():
    model, ids = tiny_model(attn_implementation="eager"), prompt()
    cache = anchors(model, budget=48)
    options = dict(return_dict_in_generate=True, output_attentions=True)
    out = call(model, ids, cache, tokens=5, **options)
    for step in out.attentions[1:]:
        for weights in step:
            assert weights.shape[-1] <= 48
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("budget", [1.0, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_equals_sdpa(family, budget):
    ids, scores = prompt(), []
    for implementation in ("eager", "sdpa"):
        model = tiny_model(family, attn_implementation=implementation)
        options = dict(return_dict_in_generate=True, output_logits=True)
        scores.append(
            torch.stack(call(model, ids, anchors(model, budget=budget), **options).logits)
        )
    torch.testing.assert_close(*scores, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("mode", ["greedy", "beams", "chunked prefill"])
@pytest.mark.parametrize("budget", [1.0, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(family, budget, mode):
    model, ids = tiny_model(family), prompt()
    padded = torch.cat((torch.zeros(1, 13, dtype=torch.long), ids), 1)
    mask = (torch.arange(133) >= 13).long()[None]
    expected = call(model, ids, anchors(model, budget=budget), **MODES[mode])
    out = call(model, padded, anchors(model, budget=budget), attention_mask=mask, **MODES[mode])
    assert torch.equal(out[:, 133:], expected[:, 120:])


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_of_the_cache_is_that_of_dynamic_cache(family, with_config):
    model, ids = tiny_model(family), prompt()
    config = model.config if with_config else None
    plain, cache = DynamicCache(config=config), AnchorDynamicCache(config, budget=48, **SMALL)
    names = "is_initialized is_compileable is_croppable is_sliding"
    sizes = " max_batch_size max_cache_len"  # upstream 5.17 fails on an empty cache
    methods = "get_max_length get_max_cache_shape"
    for filled in (False, True):
        if filled:
            out = call(model, ids, cache, return_dict_in_generate=True)
            assert any(value is cache for value in out.values())
            call(model, ids, plain)
        assert cache.get_seq_length() == plain.get_seq_length()
        assert type(cache.get_seq_length()) is int
        for i in range(len(plain)):
            assert cache.get_seq_length(i) == plain.get_seq_length(i)
            assert cache.get_mask_sizes(3, i) == plain.get_mask_sizes(3, i)
            for method in methods.split():
                if hasattr(plain, method):
                    assert getattr(cache, method)(i) == getattr(plain, method)(i)
        for name in (names + sizes * filled).split():
            if hasattr(plain, name):
                assert getattr(cache, name) == getattr(plain, name), name
        assert len(cache) == len(plain) == len(list(cache)) == len(list(plain))
    for i, (one, other) in enumerate(zip(cache, plain, strict=True)):
        assert len(one) == len(other)
        assert one[0].shape == other[0].shape and one[1].shape == other[1].shape
        assert one[0].dtype == other[0].dtype and one[0].device == other[0].device
        assert torch.equal(one[0], cache.layers[i].keys)
        assert cache.layers[i].is_initialized
