"""On an accelerator: nothing mixes devices, and a sparse step fetches only what it reads."""

import copy

import pytest
import torch
from families import random_ids, tiny_model
from second_device import DEVICE, Elsewhere, second_device
from test_anchor_cache_exact import SMALL
from test_anchor_cache_rows import left_padded

from anchor_cache import AnchorDynamicCache, warm_cache_files

OFFLOADS = [None, "cpu", "disk"]


def steps(model, cache, tokens, mask, device):
    logits = []
    for token in tokens:
        mask = torch.cat((mask, torch.ones(len(mask), 1, dtype=torch.long)), 1)
        out = model(token.to(device), past_key_values=cache, attention_mask=mask.to(device))
        logits.append(out.logits[:, -1].cpu())
    return torch.stack(logits), mask


@pytest.mark.parametrize(
    ("offload", "implementation"), [*((offload, "sdpa") for offload in OFFLOADS), (None, "eager")]
)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", dict(audit_every=3)),
        ("llama", dict(builder="tangent", anchors_per_head=2, refine=None)),
        ("gemma3", dict()),
        ("phi3", dict(dense_below=160)),
    ],
)
def test_the_same_as_on_the_cpu(family, settings, implementation, offload):
    here = tiny_model(family, attn_implementation=implementation)
    ids, mask = left_padded([random_ids(150), random_ids(121)])
    tokens = random_ids(24, 2, 1)
    settings = {**SMALL, "budget": 56, **settings}
    expected = AnchorDynamicCache(here.config, **settings)
    cache = AnchorDynamicCache(here.config, offload=offload, **settings)
    with second_device(copy.deepcopy(here)) as (there, _):
        for model, c, device in ((here, expected, "cpu"), (there, cache, DEVICE)):
            model(ids.to(device), past_key_values=c, attention_mask=mask.to(device))
        one, _ = steps(here, expected, tokens, mask, "cpu")
        other, _ = steps(there, cache, tokens, mask, DEVICE)
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
        assert cache.report().sparse_steps == expected.report().sparse_steps > 0
        assert cache.report().coverage == pytest.approx(expected.report().coverage)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([1, 0]), [1, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("crop", -40, [0, 1]),
        ("offload and prefetch", None, [0, 1]),
        ("save", None, [0, 1]),
    ],
)
def test_changes_of_a_cache(method, argument, rows, offload, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_cache_files, "_TENSORS", (torch.Tensor, Elsewhere))
    here = tiny_model(num_hidden_layers=2)
    ids, mask = left_padded([random_ids(150), random_ids(121)])
    before, tokens = random_ids(3, 2, 1), random_ids(20, len(rows), 1)
    results = []
    with second_device(copy.deepcopy(here)) as (there, _):
        for model, device, where in ((here, "cpu", None), (there, DEVICE, offload)):
            cache = AnchorDynamicCache(budget=56, offload=where, **SMALL)
            model(ids.to(device), past_key_values=cache, attention_mask=mask.to(device))
            _, seen = steps(model, cache, before, mask, device)
            if method == "offload and prefetch":
                for layer in cache.layers:
                    layer.offload()
                    layer.prefetch()
            elif method == "save":
                folder = tmp_path / str(device)
                cache.save_pretrained(folder)
                cache = AnchorDynamicCache.from_pretrained(folder)
                assert all(layer.device == torch.device(device) for layer in cache.layers)
            else:
                getattr(cache, method)(argument)
            seen = seen[rows, : cache.get_seq_length()]
            results.append(steps(model, cache, tokens, seen, device)[0])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_what_a_sparse_step_copies(offload):
    here, ids = tiny_model(num_hidden_layers=2), random_ids(1, 400)
    cache = AnchorDynamicCache(here.config, budget=56, offload=offload, **SMALL)
    mask = torch.ones(1, 400, dtype=torch.long)
    with second_device(copy.deepcopy(here)) as (model, copies):
        model(ids.to(DEVICE), past_key_values=cache)
        assert copies.to_device.count((1, 2, 400, 12)) == 4  # keys and values of a dense step
        _, mask = steps(model, cache, random_ids(1, 1, 1), mask, DEVICE)  # builds the index
        copies.to_device.clear(), copies.to_host.clear()
        steps(model, cache, random_ids(30, 1, 1), mask, DEVICE)
        states = [shape for shape in copies.to_device if shape[-1] == 12 and len(shape) > 2]
        tokens = sum(torch.Size(shape).numel() for shape in states) // 12
        selected = 30 * 2 * 2 * 2 * 56  # steps, layers, keys and values, heads, budget
        if offload == "cpu":  # pieces of 2 that are not on the device yet
            assert {shape[1:] for shape in states} == {(2, 12)}
            assert 0 < tokens < selected / 2
        else:
            assert {shape[:2] for shape in states} == {(1, 2)}
            assert selected * 0.8 < tokens <= selected + 30 * 2 * 2 * 8
        new = [shape for shape in copies.to_host if shape[-1] == 12]
        assert sum(torch.Size(shape).numel() for shape in new) == 30 * 2 * 2 * 2 * 12
        assert cache.report().sparse_steps == 31
