"""Sketches of keys against their unpacked definition."""

import pytest
import torch
from anchor_cache.kernels import ops
from anchor_cache.kernels.reference_sketch import sketch_rotation
from test_anchors import H_KV, B, G, make_index

CPU = torch.device("cpu")


@pytest.mark.parametrize("n_bits", [1, 2])
@pytest.mark.parametrize("dim", [8, 20, 64])
def test_sketch_scores_equal_their_unpacked_definition(dim, n_bits):
    """Against levels unpacked and multiplied one by one, with padding and odd head sizes."""
    residuals = torch.randn(B, H_KV, 5, 4, dim)
    bits, scales = ops.sketch_tokens(residuals, n_bits)
    assert bits.shape[-1] == n_bits * -(-dim // 8)
    scales[1, :, 0, :2] = float("nan")
    scales[1, :, 1] = float("nan")
    query, centres = torch.randn(B, H_KV * G, dim), torch.randn(B, H_KV, G, 5)
    scores = ops.score_sketches(query, bits.flatten(3), scales[..., 0], centres, padded=True)
    rotated = residuals @ sketch_rotation(dim, CPU)
    levels = torch.where(rotated > 0, 1.0, -1.0)
    if n_bits == 2:
        threshold = rotated.square().mean(-1, keepdim=True).sqrt()
        levels = torch.where(rotated.abs() > threshold, 3 * levels, levels)
    turned = (query @ sketch_rotation(dim, CPU)).view(B, H_KV, G, dim)
    logits = torch.einsum("bhgd,bhnjd->bhgnj", turned, levels * scales.float())
    expected = logits.nan_to_num(float("-inf")).logsumexp(-1) + centres
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert (scores[1, ..., 1] == float("-inf")).all() and not scores.isnan().any()


def test_a_residual_estimates_its_own_length_without_bias():
    for n_bits in (1, 2):
        residuals = torch.randn(7, 64)
        bits, scales = ops.sketch_tokens(residuals[None, None, :, None], n_bits)
        centres = torch.zeros(1, 7, 1, 7)
        own = ops.score_sketches(
            residuals[None],
            bits.flatten(3).expand(1, 7, -1, -1),
            scales[..., 0].expand(1, 7, -1, -1),
            centres,
        )[0, :, 0].diagonal()
        torch.testing.assert_close(own, residuals.square().sum(-1), atol=0.1, rtol=2e-3)


def test_more_bits_rank_blocks_better_and_any_better_than_means():
    keys, queries = 2 * torch.randn(1, H_KV, 1600, 64), torch.randn(1, H_KV * G, 8, 64)
    query = 2 * torch.randn(1, H_KV * G, 64)
    mass = (query.view(1, H_KV, G, 64) @ keys.transpose(-1, -2) / 8).unflatten(-1, (200, 8))
    best = mass.logsumexp(-1).topk(20).indices

    def recall(scores):
        found = scores.topk(20).indices[..., None] == best[..., None, :]
        return found.any(-1).float().mean()

    recalls = []
    for n_bits in (1, 2):
        index = make_index(keys, queries, builder="mean", sketch_bits=n_bits, scaling=1 / 8)
        means, centres = index.score(query, 0, 200)
        recalls.append(recall(index.score_sketches(query, slice(0, 200), centres, 8)))
    assert recalls[1] > recalls[0] + 0.1 > recall(means) + 0.2


def test_pieces_of_a_block_share_its_centre_and_add_up_to_it():
    keys, queries = torch.randn(1, H_KV, 80, 16), torch.randn(1, H_KV * G, 8, 16)
    index, query = make_index(keys, queries, builder="mean"), torch.randn(1, H_KV * G, 16)
    _, centres = index.score(query, 0, 10)
    whole = index.score_sketches(query, slice(2, 9), centres[..., 2:9], 8)
    for piece in (1, 2, 4):
        parts = index.score_sketches(query, slice(2, 9), centres[..., 2:9], piece)
        assert parts.shape[-1] == 7 * 8 // piece
        torch.testing.assert_close(parts.unflatten(-1, (7, -1)).logsumexp(-1), whole)


@pytest.mark.parametrize("builder", ["mean", "minmax", "tangent"])
def test_sketches_are_relative_to_the_centre_that_is_scored(builder):
    """With exact residuals instead of sketches, centres and residuals give the true logits."""
    keys, queries = torch.randn(1, H_KV, 80, 16), torch.randn(1, H_KV * G, 8, 16)
    for anchor_dtype in (None, "int8"):
        index = make_index(keys, queries, builder=builder, anchor_dtype=anchor_dtype)
        query = torch.randn(1, H_KV * G, 16)
        _, logits = index.score(query, 0, 10)
        anchors = index._anchors.states.float()
        if anchor_dtype:
            anchors = anchors * index._anchor_scales.states
        centres = index.builder.centre(anchors.unflatten(2, (10, -1)))
        expected = query.view(1, H_KV, G, 16) @ centres.transpose(-1, -2) / 4
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
