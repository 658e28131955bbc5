"""A key that dominates the attention is always among those that are read."""

import pytest
import torch

from anchor_cache import AnchorConfig, AnchorLayer

pytestmark = pytest.mark.usefixtures("ranks_few")

H_KV, G, D, LENGTH = 2, 3, 32, 1000


class Attention(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize("refine", ["sketch", None])
@pytest.mark.parametrize("heads", ["query", "key_value"])
@pytest.mark.parametrize("builder", ["tangent", "mean"])
@pytest.mark.parametrize("place", [17, 250, 511, 512, 790, 930])
def test_a_dominating_key_is_found(builder, heads, refine, place):
    layer = AnchorLayer(
        AnchorConfig(
            block_size=8,
            sink_size=8,
            window_size=16,
            budget=64,
            dense_below=0,
            dense_above=1.0,
            builder=builder,
            anchor_heads=heads,
            refine=refine,
        )
    )
    keys, values = torch.randn(1, H_KV, LENGTH, D), torch.randn(1, H_KV, LENGTH, D)
    prompt = torch.randn(1, H_KV * G, LENGTH - 1, D)
    query = torch.randn(1, H_KV * G, 1, D)
    for head in range(H_KV):
        # One of the query heads that share this key head points at the planted key.
        keys[0, head, place] = 8 * query[0, head * G + head, 0]
    module = Attention()
    stored, kept = layer.update(keys[:, :, :-1], values[:, :, :-1])
    assert layer.read(module, prompt, stored, kept, None, {}) is None
    stored, kept = layer.update(keys[:, :, -1:], values[:, :, -1:])
    reading = layer.read(module, query, stored, kept, None, {}).gathered()
    assert reading.keys.shape[2] <= 64
    for head in range(H_KV):
        found = (reading.keys[0, head] == keys[0, head, place]).all(-1)
        assert found.sum() == 1
        assert torch.equal(reading.values[0, head][found][0], values[0, head, place])
