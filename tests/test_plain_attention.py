"""Attention of one query token by the library's own operation, and when it steps aside."""

import pytest
import torch
from anchor_cache.kernels import ops
from anchor_cache.patches.plain_attention import attend_to_all, is_plain
from families import tiny_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward


@pytest.mark.parametrize("how", ["reference", None])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 64, 130])
def test_all_is_attended_to_as_by_transformers(length, masked, how, monkeypatch):
    module = tiny_model().model.layers[0].self_attn
    group = module.num_key_value_groups
    query = torch.randn(2, 2 * group, 1, 16)
    keys, values = torch.randn(2, 2, length + 7, 16), torch.randn(2, 2, length + 7, 24)
    keys, values = keys[:, :, :length], values[:, :, :length]
    mask = None
    if masked:
        mask = (torch.arange(length) >= torch.tensor([[0], [length // 3]]))[:, None, None]
    expected = sdpa_attention_forward(module, query, keys, values, mask, scaling=0.2)[0]
    if how == "reference":  # as without a compiler
        monkeypatch.setattr(ops.attend_blocks, "implementations", ())
    actual = attend_to_all(query, keys, values, mask, 0.2)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_other_masks_and_functions_are_left_to_transformers():
    query, keys = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 9, 16)
    for mask in (torch.zeros(1, 1, 1, 9), torch.ones(1, 4, 1, 9, dtype=torch.bool)):
        assert attend_to_all(query, keys, keys, mask, None) is None
    assert is_plain(sdpa_attention_forward, {"dropout": 0.0, "softcap": None})
    for kwargs in ({"softcap": 30.0}, {"dropout": 0.1}, {"position_bias": torch.zeros(1)}):
        assert not is_plain(sdpa_attention_forward, kwargs)
    assert not is_plain(lambda: None, {})


@torch.enable_grad()
def test_gradients_are_those_of_torch():
    query, keys = torch.randn(1, 4, 1, 16, requires_grad=True), torch.randn(1, 2, 70, 16)
    attend_to_all(query, keys, keys, None, None).sum().backward()
    assert query.grad is not None and query.grad.abs().sum() > 0
