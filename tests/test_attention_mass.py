"""Attention weights that audits and token selectors look at."""

import pytest
import torch
from anchor_cache.kernels import ops

H_KV, G, D = 2, 3, 16


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("additive", [False, True])
def test_attention_received_equals_a_naive_loop_in_pieces(monkeypatch, softcap, additive):
    from anchor_cache.kernels import reference_attention

    # three rows at once
    monkeypatch.setattr(reference_attention, "_ATTENTION_FLOATS", 3 * H_KV * G * 40)
    query, keys = torch.randn(1, H_KV * G, 10, D), torch.randn(1, H_KV, 40, D)
    mask = torch.ones(10, 40, dtype=torch.bool).tril(30)
    given = torch.zeros(10, 40).masked_fill(~mask, -1e9) if additive else mask
    received = ops.attention_received(query, keys, 0.3, given[None, None], softcap)
    expected = torch.zeros(40)
    for head in range(H_KV * G):
        for r in range(10):
            logits = 0.3 * keys[0, head // G] @ query[0, head, r]
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            weights = logits.masked_fill(~mask[r], float("-inf")).softmax(0)
            expected = torch.maximum(expected, weights)
    torch.testing.assert_close(received, expected)
