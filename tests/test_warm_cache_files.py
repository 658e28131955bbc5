"""A cache that was saved and loaded goes on as if it had never left."""

import json

import pytest
import torch
from families import random_ids, tiny_model
from safetensors.torch import load_file
from test_anchor_cache_exact import SMALL, generate
from test_anchor_cache_rows import left_padded, step
from transformers.cache_utils import DynamicLayer

from anchor_cache import AnchorConfig, AnchorDynamicCache
from anchor_cache.warm_cache_files import DESCRIPTION


def prefilled(model, ids, **settings):
    cache = AnchorDynamicCache(model.config, **{**SMALL, "budget": 56, **settings})
    model(ids, past_key_values=cache)
    return cache


@pytest.fixture
def saved(tmp_path):
    model = tiny_model()
    cache = prefilled(model, random_ids(1, 150))
    cache.save_pretrained(tmp_path / "warm")
    return model, cache, tmp_path / "warm"


@pytest.mark.parametrize("steps", [0, 13])
@pytest.mark.parametrize("builder", ["mean", "tangent"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "gpt_oss"])
def test_the_next_steps_are_those_of_the_saved_cache(family, builder, steps, tmp_path):
    model = tiny_model(family)
    cache = prefilled(model, random_ids(2, 150), builder=builder)
    for token in random_ids(steps, 2, 1):
        step(model, cache, token)
    cache.save_pretrained(tmp_path)
    loaded = AnchorDynamicCache.from_pretrained(tmp_path)
    assert [type(a) for a in loaded.layers] == [type(b) for b in cache.layers]
    assert loaded.get_seq_length() == cache.get_seq_length()
    assert loaded.anchor_config == cache.anchor_config
    for token in random_ids(30, 2, 1):
        expected = step(model, cache, token)
        torch.testing.assert_close(step(model, loaded, token), expected, atol=1e-5, rtol=1e-5)
    assert loaded.report().sparse_steps == 30


def test_generation_goes_on_and_crop_works(saved):
    model, cache, folder = saved
    loaded, ids = AnchorDynamicCache.from_pretrained(folder), random_ids(1, 160)
    torch.testing.assert_close(generate(model, ids, loaded), generate(model, ids, cache))
    for c in (cache, loaded):
        c.crop(90 - c.get_seq_length())
    for token in random_ids(20, 1, 1):
        torch.testing.assert_close(step(model, loaded, token), step(model, cache, token))


def test_padded_batches_and_reduced_precision(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    ids, mask = left_padded([random_ids(150), random_ids(91)])
    cache = AnchorDynamicCache(**SMALL, budget=56)
    model(ids[:, :-1], past_key_values=cache, attention_mask=mask[:, :-1])
    cache.save_pretrained(tmp_path)
    loaded = AnchorDynamicCache.from_pretrained(tmp_path)
    assert loaded.layers[0].keys.dtype == torch.bfloat16
    expected = generate(model, ids, cache, attention_mask=mask)
    torch.testing.assert_close(generate(model, ids, loaded, attention_mask=mask), expected)


def test_fields_can_be_replaced_and_are_checked(saved):
    model, _, folder = saved
    loaded = AnchorDynamicCache.from_pretrained(folder, block_size=4, builder="tangent")
    assert loaded.anchor_config == AnchorConfig(
        **{**SMALL, "budget": 56, "block_size": 4, "builder": "tangent"}
    )
    for token in random_ids(3, 1, 1):  # the saved cache kept no queries for tangent anchors
        assert torch.isfinite(step(model, loaded, token)).all()
    assert loaded.report().sparse_steps == 3
    with pytest.raises(ValueError, match="budget=3 is not valid"):
        AnchorDynamicCache.from_pretrained(folder, budget=3)
    with pytest.raises(TypeError, match="did you mean 'budget'"):
        AnchorDynamicCache.from_pretrained(folder, budjet=64)


def test_an_empty_cache_without_a_config_adds_layers_when_loaded(tmp_path):
    model, ids = tiny_model(), random_ids(1, 90)
    AnchorDynamicCache(**SMALL, budget=56).save_pretrained(tmp_path)
    loaded = AnchorDynamicCache.from_pretrained(tmp_path)
    expected = generate(model, ids, AnchorDynamicCache(**SMALL, budget=56))
    torch.testing.assert_close(generate(model, ids, loaded), expected)
    assert len(loaded.layers) == 4


def test_device_is_where_the_cache_goes(saved):
    _, _, folder = saved
    assert AnchorDynamicCache.from_pretrained(folder, device="meta").layers[0].keys.is_meta
    text = (folder / DESCRIPTION).read_text().replace('"device": "cpu"', '"device": "xla:7"')
    (folder / DESCRIPTION).write_text(text)
    with pytest.raises(RuntimeError, match="cannot be put on xla:7; .*device='cpu'"):
        AnchorDynamicCache.from_pretrained(folder)
    AnchorDynamicCache.from_pretrained(folder, device="cpu")


def test_saving_again_replaces_the_old_cache_and_nothing_else(saved):
    model, cache, folder = saved
    (folder / "notes.txt").write_text("mine")
    before = {path.name for path in folder.iterdir()}
    step(model, cache, random_ids(1, 1))
    cache.save_pretrained(folder)
    after = {path.name for path in folder.iterdir()}
    assert len(after) == len(before) == 4 + 2 and after & before == {DESCRIPTION, "notes.txt"}
    assert AnchorDynamicCache.from_pretrained(folder).get_seq_length() == 151
    tensors = load_file(next(folder.glob("*.safetensors")))
    assert set(tensors) == {"keys", "values"}


def test_a_failed_save_leaves_the_old_cache(saved, monkeypatch):
    from anchor_cache import warm_cache_files

    _, cache, folder = saved
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(warm_cache_files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.save_pretrained(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_what_cannot_be_written_is_refused_by_name(tmp_path):
    cache = AnchorDynamicCache()
    cache.layers.append(DynamicLayer())
    cache.layers[0].quantizer = object()
    with pytest.raises(TypeError, match=r"layer 0 \(DynamicLayer\).* its quantizer is a object"):
        cache.save_pretrained(tmp_path / "warm")
    assert not (tmp_path / "warm").exists()


def damage(folder, kind):
    path = folder / DESCRIPTION
    description = json.loads(path.read_text())
    tensors = sorted(folder.glob("*.safetensors"))[1]
    if kind == "no folder":
        return folder / "other"
    if kind == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif kind == "missing":
        tensors.unlink()
    elif kind == "no json":
        path.write_text(path.read_text()[:-10])
    elif kind == "newer":
        description["format"] = 99
    elif kind == "outside":
        description["layers"][0]["file"] = "../anchor_cache-x.safetensors"
    elif kind == "no field":
        del description["anchor_config"]
    elif kind == "unknown class":
        description["layers"][0].update(module="antigravity", **{"class": "Layer"})
    elif kind == "other class":
        description["layers"][0].update({"module": "transformers", "class": "GenerationConfig"})
    if kind in ("newer", "outside", "no field", "unknown class", "other class"):
        path.write_text(json.dumps(description))
    return folder


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("no folder", FileNotFoundError, "no saved cache in .*save_pretrained"),
        ("truncated", ValueError, "00001.safetensors is damaged or incomplete"),
        ("missing", ValueError, "00001.safetensors is damaged .*the file is missing"),
        ("no json", ValueError, "anchor_cache.json is damaged"),
        ("newer", ValueError, "has format 99, .* update anchor_cache"),
        ("outside", ValueError, "names a file of another kind"),
        ("no field", ValueError, "anchor_cache.json is damaged .*anchor_config"),
        ("unknown class", ImportError, "antigravity.Layer, which is not here"),
        ("other class", ImportError, "is no class of cache layers"),
    ],
)
def test_what_cannot_be_loaded_is_refused(saved, kind, error, message):
    _, _, folder = saved
    with pytest.raises(error, match=message):
        AnchorDynamicCache.from_pretrained(damage(folder, kind))
