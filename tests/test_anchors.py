"""Anchors and their scores against their definitions."""

import pytest
import torch

from anchor_cache import AnchorConfig
from anchor_cache.anchor_index import AnchorIndex
from anchor_cache.anchors import BUILDERS, Representative, builder_of
from anchor_cache.block_storage import GrowingStates
from anchor_cache.perspectives import Perspectives

B, H_KV, G, D = 2, 2, 3, 16


def stored(keys):
    states = GrowingStates()
    states.append(keys)
    return states


def make_index(keys, queries, visible=None, scaling=D**-0.5, **settings):
    settings = {"builder": "tangent", "anchor_dtype": None, **settings}
    config = AnchorConfig(block_size=8, sink_size=8, window_size=8, budget=64, **settings)
    centres = None
    if builder_of(config.builder).query_dependent:
        by_query_head = config.anchor_heads == "query"
        perspectives = Perspectives(config.anchors_per_head, by_query_head)
        perspectives.observe(queries, keys.shape[2])
        assert perspectives.refresh(visible, H_KV, scaling)
        centres = perspectives.centres
    paddings = (0,) if visible is None else tuple(visible.to(torch.uint8).argmax(1).tolist())
    index = AnchorIndex(config, centres, paddings, scaling)
    index.extend(stored(keys), stored(keys), visible)
    return index


def true_log_mass(query, keys):
    logits = query.view(*query.shape[:1], H_KV, G, D) @ keys.transpose(-1, -2) * D**-0.5
    return logits.unflatten(-1, (-1, 8)).logsumexp(-1)


@pytest.mark.parametrize("builder", [*BUILDERS, Representative(tokens=4)])
@pytest.mark.parametrize("heads", ["query", "key_value"])
@pytest.mark.parametrize("anchors", [1, 3])
def test_scores_bound_the_true_log_mass(builder, heads, anchors):
    """From below for every weighting of the tokens, from above for the box."""
    keys, queries = torch.randn(B, H_KV, 80, D), torch.randn(B, H_KV * G, 40, D)
    index = make_index(keys, queries, builder=builder, anchor_heads=heads, anchors_per_head=anchors)
    query = 3 * torch.randn(B, H_KV * G, D)
    scores, _ = index.score(query, 0, 10)
    mass = true_log_mass(query, keys)
    assert scores.shape == mass.shape == (B, H_KV, G, 10)
    below = builder_of(builder).bounds_from_below
    assert ((scores <= mass + 1e-4) if below else (scores >= mass - 1e-4)).all()


def test_tangent_is_tight_at_its_perspective():
    keys = 4 * torch.randn(1, H_KV, 80, D)
    query = torch.randn(1, H_KV * G, 1, D)
    index = make_index(keys, query)
    mass = true_log_mass(query[:, :, 0], keys)
    torch.testing.assert_close(index.score(query[:, :, 0], 0, 10)[0], mass, atol=1e-4, rtol=1e-4)


def test_scores_equal_a_naive_loop():
    keys, queries = torch.randn(B, H_KV, 80, D), torch.randn(B, H_KV * G, 40, D)
    index = make_index(keys, queries, anchors_per_head=2)
    query = torch.randn(B, H_KV * G, D)
    scores, _ = index.score(query, 2, 7)
    for b in range(B):
        for h in range(H_KV):
            for g in range(G):
                for block in range(2, 7):
                    own = keys[b, h, 8 * block : 8 * block + 8]
                    bounds = []
                    for c in index.perspectives[b, h]:
                        w = (own @ c).softmax(0)
                        bound = query[b, h * G + g] @ (w @ own) * D**-0.5
                        bounds.append(bound - (w * w.log()).sum())
                    torch.testing.assert_close(scores[b, h, g, block - 2], max(bounds))


@pytest.mark.parametrize(
    ("builder", "heads", "shape"),
    [
        ("tangent", "query", (B, 10, 2, H_KV * G, D)),
        ("tangent", "key_value", (B, 10, 2, H_KV, D)),
        ("mean", "query", (B, 10, 1, H_KV, D)),
    ],
)
@pytest.mark.parametrize("sketch_bits", [1, 2])
def test_layout_and_bytes_of_the_index(builder, heads, shape, sketch_bits):
    keys, queries = torch.randn(B, H_KV, 83, D), torch.randn(B, H_KV * G, 40, D)
    settings = dict(anchor_heads=heads, anchors_per_head=2, sketch_bits=sketch_bits)
    index = make_index(keys, queries, builder=builder, **settings)
    assert index.anchors.shape == shape
    anchors = index.anchors.numel() * 4
    offsets = anchors // D
    sketch = B * H_KV * 80 * (sketch_bits * D // 8 + 2)
    assert index.nbytes == anchors + offsets + sketch


def test_article_a_layout_keeps_every_anchor_with_its_query_head():
    keys, queries = torch.randn(1, H_KV, 80, D), torch.randn(1, H_KV * G, 40, D)
    index = make_index(keys, queries, anchors_per_head=2)
    view = index.anchors
    for head in range(H_KV * G):
        perspectives = index.perspectives.view(1, H_KV * G, 2, D)[0, head]
        for a, c in enumerate(perspectives):
            own = keys[0, head // G, 16:24]
            torch.testing.assert_close(view[0, 2, a, head], (own @ c).softmax(0) @ own)


@pytest.mark.parametrize("builder", BUILDERS)
def test_padding_and_wholly_padded_blocks(builder):
    keys, queries = torch.randn(B, H_KV, 80, D), torch.randn(B, H_KV * G, 40, D)
    visible = torch.ones(B, 80, dtype=torch.bool)
    visible[1, :21] = False
    index = make_index(keys, queries, visible, builder=builder)
    garbled = keys.clone()
    garbled[1, :, :21] = 1e4
    other = make_index(garbled, queries, visible, builder=builder)
    query = torch.randn(B, H_KV * G, D)
    scores, _ = index.score(query, 0, index.blocks)
    assert not scores.isnan().any()
    assert (scores[1, ..., :2] == float("-inf")).all() and scores[1, ..., 2:].isfinite().all()
    torch.testing.assert_close(scores, other.score(query, 0, index.blocks)[0])
    # Blocks of a padded row start at its first token.
    alone = make_index(keys[1:, :, 21:], queries[1:], builder=builder)
    torch.testing.assert_close(
        alone.score(query[1:], 0, alone.blocks)[0], scores[1:, ..., 2 : 2 + alone.blocks]
    )


def test_representatives_are_the_most_attended_keys():
    keys, query = torch.randn(1, H_KV, 80, D), torch.randn(1, H_KV * G, 1, D)
    one, four = (
        make_index(keys, query, builder=Representative(tokens), refine=None) for tokens in (1, 4)
    )
    for head in range(H_KV * G):
        own = keys[0, head // G, 24:32]
        order = (own @ query[0, head, 0]).argsort(descending=True)
        torch.testing.assert_close(one.anchors[0, 3, 0, head], own[order[0]])
        torch.testing.assert_close(four.anchors[0, 3, 0, head], own[order[:4]].mean(0))
    assert (one._offsets.states == 0).all()


def test_a_box_scores_its_best_corner():
    keys, queries = -3 - torch.rand(1, H_KV, 80, D), torch.randn(1, H_KV * G, 4, D)
    index = make_index(keys, queries, builder="minmax")
    query = torch.randn(1, H_KV * G, D)
    scores, _ = index.score(query, 0, 10)
    blocks = keys.unflatten(2, (10, 8))
    low, high = (x[:, :, None] for x in (blocks.amin(3), blocks.amax(3)))
    grouped = query.view(1, H_KV, G, 1, D)
    corner = torch.maximum(grouped * low, grouped * high).sum(-1) * D**-0.5
    torch.testing.assert_close(scores, corner + torch.tensor(8.0).log())


def test_int8_anchors_take_half_the_bytes_and_stay_within_their_error():
    keys = torch.randn(B, H_KV, 80, D, dtype=torch.bfloat16)
    queries = torch.randn(B, H_KV * G, 40, D, dtype=torch.bfloat16)
    plain, small = (
        make_index(keys, queries, builder="mean", anchor_dtype=dtype, refine=None)
        for dtype in (None, "int8")
    )
    assert small._anchors.nbytes * 2 == plain._anchors.nbytes
    stored = small._anchors.states * small._anchor_scales.states
    exact = plain._anchors.states.float()
    error = (stored - exact).abs().amax(-1)
    assert (error <= exact.abs().amax(-1) / 254 * 1.01).all()
    query = torch.randn(B, H_KV * G, D, dtype=torch.bfloat16)
    scores = [index.score(query, 0, 10)[0] for index in (plain, small)]
    torch.testing.assert_close(*scores, atol=0.03, rtol=0.02)
