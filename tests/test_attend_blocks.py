"""Attention over chosen blocks: the specification against attention with a mask."""

import pytest
import torch
from anchor_cache.kernels import ops

B, H_KV, G, L, D, D_V, SIZE = 2, 2, 3, 37, 16, 8, 4


def make(per_query_head=False):
    heads = H_KV * G if per_query_head else H_KV
    blocks = torch.stack([torch.randperm(9)[:5] for _ in range(B * heads)]).view(B, heads, 5)
    blocks[0, 0, 3:] = -1
    query = torch.randn(B, H_KV * G, D)
    keys, values = torch.randn(B, H_KV, L, D), torch.randn(B, H_KV, L, D_V)
    return query, keys, values, blocks


def by_mask(query, keys, values, blocks, scaling, shifts, visible, length, window, softcap, sinks):
    seen = torch.zeros(B, blocks.shape[1], L + SIZE, dtype=torch.bool)
    for b in range(B):
        for h in range(blocks.shape[1]):
            for block in blocks[b, h].tolist():
                if block >= 0:
                    start = block * SIZE + (int(shifts[b]) if shifts is not None else 0)
                    seen[b, h, start : start + SIZE] = True
    seen = seen[..., :L]
    length = L if length is None else int(length)
    seen[..., length:] = False
    if window is not None:
        seen[..., : length - window] = False
    if visible is not None:
        seen &= visible[:, None]
    seen = seen.repeat_interleave(H_KV * G // seen.shape[1], 1)
    logits = query.unsqueeze(2) @ keys.repeat_interleave(G, 1).transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits[:, :, 0].masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.view(1, -1, 1).expand(B, -1, -1)), -1)
    weights = logits.softmax(-1)[..., :L].nan_to_num(0.0)
    output = (weights.unsqueeze(2) @ values.repeat_interleave(G, 1))[:, :, 0]
    return output, logits.logsumexp(-1)


OPTIONS = {
    "plain": {},
    "shifts": {"shifts": torch.tensor([0, 1])},
    "length": {"length": torch.tensor(30)},
    "window": {"window": 20, "length": torch.tensor(33)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, H_KV * G)},
    "visible": {"visible": torch.arange(L).expand(B, L) % 3 > 0},
}


@pytest.mark.parametrize("per_query_head", (False, True))
@pytest.mark.parametrize("option", OPTIONS)
def test_chosen_blocks_are_attended_to_as_with_a_mask(option, per_query_head):
    states, options = make(per_query_head), OPTIONS[option]
    every = dict.fromkeys(("shifts", "visible", "length", "window", "softcap", "sinks"))
    expected = by_mask(*states, scaling=0.3, **{**every, **options})
    actual = ops.attend_blocks(*states, SIZE, 0.3, **options)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_head_that_sees_nothing_gives_nothing():
    query, keys, values, blocks = make()
    blocks[1, 1] = -1
    output, mass = ops.attend_blocks(query, keys, values, blocks, SIZE, 0.3)
    assert (output[1, G:] == 0).all() and (mass[1, G:] == float("-inf")).all()
    assert output.isfinite().all()
