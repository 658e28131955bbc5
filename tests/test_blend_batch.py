"""Several prompts blended into one left-padded cache."""

import pytest
import torch
from families import FAMILIES, tiny_model
from test_blended_cache import PREFIX, row

from anchor_cache import AnchorDynamicCache, BlendedCache, ChunkStore


@pytest.fixture(params=FAMILIES)
def setting(request, tmp_path):
    """Prompts of different chunks and lengths, one all missing and one of a single token."""
    changes = dict(attn_implementation="eager") if request.param == "gpt_oss" else {}
    model = tiny_model(request.param, **changes)
    store = ChunkStore(tmp_path, model, prefix=PREFIX)
    a, b, c = (row(n) for n in (19, 33, 26))
    store.add([a, b, c], progress=False)
    prompts = [[PREFIX, a, b, row(8)], [PREFIX, c, row(3)], [row(12), row(4)], [row(1)]]
    return model, store, [*prompts, [PREFIX, c, b, a, c, row(5)]]


OPTIONS = dict(max_new_tokens=8, do_sample=False)


def continued(model, cache):
    length = cache.input_ids.shape[1]
    out = model.generate(
        **cache.inputs,
        past_key_values=cache,
        output_logits=True,
        return_dict_in_generate=True,
        **OPTIONS,
    )
    return out.sequences[:, length:], torch.stack(out.logits, 1)


@pytest.mark.parametrize("options", [dict(), dict(selector="hkvd", schedule=(0.5,))])
def test_each_row_is_what_it_is_alone(setting, options):
    model, store, prompts = setting
    alone = [BlendedCache.blend(model, store, prompt, **options) for prompt in prompts]
    batch = BlendedCache.blend_batch(model, store, prompts, **options)
    for report, one in zip(batch.reports(), alone, strict=True):
        assert report.selected == one.report().selected
        assert report.reasons == one.report().reasons
    ids, logits = continued(model, batch)
    for i, one in enumerate(alone):
        own_ids, own_logits = continued(model, one)
        assert torch.equal(ids[i], own_ids[0])
        torch.testing.assert_close(logits[i], own_logits[0], atol=2e-4, rtol=2e-4)


def test_a_batch_tells_generate_its_padding(setting):
    model, store, prompts = setting
    cache = BlendedCache.blend_batch(model, store, prompts)
    lengths = [len(sum(prompt, [])) for prompt in prompts]
    assert cache.inputs["attention_mask"].sum(1).tolist() == lengths
    for ids, prompt in zip(cache.input_ids, prompts, strict=True):
        flat = sum(prompt, [])
        assert ids[-len(flat) :].tolist() == flat
    assert cache.get_seq_length() == max(lengths) - 1


def test_a_batch_of_one_is_a_blend(setting):
    model, store, prompts = setting
    batch = BlendedCache.blend_batch(model, store, prompts[:1])
    one = BlendedCache.blend(model, store, prompts[0])
    assert torch.equal(continued(model, batch)[1], continued(model, one)[1])
    assert len(batch.reports()) == 1 and batch.report().selected


def test_a_batch_is_decoded_sparsely(tmp_path):
    model = tiny_model()
    store = ChunkStore(tmp_path, model)
    documents = [row(60), row(45)]
    store.add(documents, progress=False)
    prompts = [[*documents, row(5)], [documents[1], row(9)]]
    cache = BlendedCache.blend_batch(model, store, prompts)
    expected = continued(model, BlendedCache.blend_batch(model, store, prompts))
    everything = AnchorDynamicCache.from_cache(
        cache, block_size=8, budget=1.0, dense_below=0, dense_above=1
    )
    ids = cache.inputs
    out = model.generate(**ids, past_key_values=everything, **OPTIONS)
    assert torch.equal(out[:, cache.input_ids.shape[1] :], expected[0])


@pytest.mark.parametrize("prompts", [[], "one string"])
def test_no_prompts_are_named(tmp_path, prompts):
    model = tiny_model()
    with pytest.raises(ValueError, match="prompts must be a list of lists"):
        BlendedCache.blend_batch(model, ChunkStore(tmp_path, model), prompts)


def test_the_report_of_a_batch_is_asked_for_by_another_name(tmp_path):
    model = tiny_model()
    cache = BlendedCache.blend_batch(model, ChunkStore(tmp_path, model), [[row(3)], [row(4)]])
    with pytest.raises(RuntimeError, match=r"holds 2 blended prompts.*reports\(\)"):
        cache.report()
