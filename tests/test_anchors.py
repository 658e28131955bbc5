"""Anchors, scores and selection against their definitions."""

import dataclasses

import pytest
import torch
from anchor_cache.kernels import ops

from anchor_cache import AnchorConfig
from anchor_cache.anchor_index import AnchorIndex, RecentQueries
from anchor_cache.anchors import BUILDERS, learn_perspectives
from anchor_cache.block_storage import GrowingStates
from anchor_cache.selection import best_blocks, plan_step

CPU = torch.device("cpu")
B, H_KV, G, D = 2, 2, 3, 16
ALWAYS_SPARSE = AnchorConfig(
    block_size=8, sink_size=8, window_size=8, budget=80, dense_below=0, dense_above=1.0
)


def stored(keys):
    states = GrowingStates()
    states.append(keys)
    return states


def make_index(keys, queries, visible=None, **settings):
    settings.setdefault("builder", "tangent")
    config = AnchorConfig(block_size=8, sink_size=8, window_size=8, budget=64, **settings)
    recent = RecentQueries()
    recent.append(queries, keys.shape[2])
    paddings = (0,) if visible is None else tuple(visible.to(torch.uint8).argmax(1).tolist())
    index = AnchorIndex(config, recent, visible, paddings, H_KV, D**-0.5)
    index.extend(stored(keys), visible)
    return index


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("heads", ["query", "key_value"])
@pytest.mark.parametrize("anchors", [1, 3])
def test_scores_never_exceed_the_true_log_mass(builder, heads, anchors):
    keys, queries = torch.randn(B, H_KV, 80, D), torch.randn(B, H_KV * G, 40, D)
    index = make_index(keys, queries, builder=builder, anchor_heads=heads, anchors_per_head=anchors)
    query = 3 * torch.randn(B, H_KV * G, D)
    scores, _ = index.score(query, 0, 10)
    logits = query.view(B, H_KV, G, D) @ keys.transpose(-1, -2) * D**-0.5
    mass = logits.unflatten(-1, (10, 8)).logsumexp(-1)
    assert scores.shape == mass.shape == (B, H_KV, G, 10)
    assert (scores <= mass + 1e-4).all()


def test_tangent_is_tight_at_its_perspective():
    keys = 4 * torch.randn(1, H_KV, 80, D)
    query = torch.randn(1, H_KV * G, 1, D)
    index = make_index(keys, query)
    logits = query.view(1, H_KV, G, D) @ keys.transpose(-1, -2) * D**-0.5
    mass = logits.unflatten(-1, (10, 8)).logsumexp(-1)
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
def test_layout_and_bytes_of_the_index(builder, heads, shape):
    keys, queries = torch.randn(B, H_KV, 83, D), torch.randn(B, H_KV * G, 40, D)
    index = make_index(keys, queries, builder=builder, anchor_heads=heads, anchors_per_head=2)
    assert index.anchors.shape == shape
    anchors = index.anchors.numel() * 4
    offsets = anchors // D
    perspectives = 0 if builder == "mean" else offsets // 10 * D
    sketch = B * H_KV * 80 * (D // 8 + 2)
    assert index.nbytes == anchors + offsets + perspectives + sketch


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


def test_perspectives_ignore_padding_and_separate_clusters():
    directions = torch.eye(D)[:3] * 10
    queries = directions.repeat(20, 1)[None, None].repeat(1, 2, 1, 1)
    queries = queries + 0.01 * torch.randn_like(queries)
    valid = torch.ones(1, 60, dtype=torch.bool)
    valid[:, :11] = False
    queries[:, :, :11] = 1e3
    found = learn_perspectives(queries, valid, n_groups=1, n_per_group=3)[0, 0]
    assert torch.cdist(found, directions).amin(0).max() < 0.1


def test_one_perspective_is_the_mean_query():
    queries = torch.randn(B, 6, 33, D)
    found = learn_perspectives(queries, None, n_groups=6, n_per_group=1)
    torch.testing.assert_close(found, queries.mean(2, keepdim=True))


@pytest.mark.parametrize("length", [200, 201, 207, 333])
@pytest.mark.parametrize("budget", [47, 64, 0.3, 0.5])
def test_a_plan_stays_within_its_budget_and_reads_sinks_and_window(length, budget):
    config = dataclasses.replace(ALWAYS_SPARSE, sink_size=12, window_size=16, budget=budget)
    plan = plan_step(config, length, (0,), CPU)
    (row,) = plan.rows
    allowed = budget if isinstance(budget, int) else max(int(budget * length), 47)
    assert plan.attended[0] <= allowed < plan.attended[0] + 8 or plan.dense_reason
    fixed = set(plan.fixed_index[0].tolist())
    assert set(range(16)) <= fixed and set(range(length - 16, length)) <= fixed
    assert row.candidates.start * 8 == 16 and row.candidates.stop * 8 == row.tail.start


def test_selection_is_per_kv_head_distinct_and_within_the_row():
    config = AnchorConfig(
        block_size=8, sink_size=8, window_size=8, budget=80, dense_below=0, dense_above=1.0
    )
    plan = plan_step(config, 300, (0, 100), CPU)
    scores = torch.randn(2, H_KV, G, plan.last_candidate - plan.first_candidate) * 300
    blocks = best_blocks(scores, plan.blocks, plan.candidate_valid[:, None])
    blocks = blocks + plan.first_candidate
    assert blocks.shape == (2, H_KV, plan.blocks)
    for b, row in enumerate(plan.rows):
        for h in range(H_KV):
            chosen = blocks[b, h, : row.blocks].tolist()
            assert len(set(chosen)) == row.blocks
            assert set(chosen) <= set(row.candidates)


def test_the_chosen_blocks_have_the_largest_summed_shares():
    config = AnchorConfig(
        block_size=8, sink_size=8, window_size=8, budget=80, dense_below=0, dense_above=1.0
    )
    plan = plan_step(config, 300, (0,), CPU)
    scores = torch.randn(1, H_KV, G, plan.last_candidate - plan.first_candidate)
    shares = scores.softmax(-1).sum(2)
    chosen = best_blocks(scores, plan.blocks, None)
    worst = shares.gather(-1, chosen).amin(-1, keepdim=True)
    assert ((shares > worst).sum(-1) == plan.blocks - 1).all()


def test_positions_beyond_int32():
    """Rows far into a large buffer are addressed with 64-bit offsets."""
    states = torch.zeros(1, 1, 4, 2).expand(1, 1, 4, 2).contiguous()
    index = torch.tensor([[[3, 0]]])
    assert ops.gather_tokens(states, index).shape == (1, 1, 2, 2)
    config = dataclasses.replace(AnchorConfig(), budget=2048)
    plan = plan_step(config, 2**33, (0,), CPU)
    assert plan.fixed_index.dtype == torch.int64 and plan.fixed_index.max() == 2**33 - 1


@pytest.mark.parametrize("dim", [8, 20, 64])
def test_sketch_scores_equal_their_unpacked_definition(dim):
    """Against signs unpacked and multiplied one by one, with padding and odd head sizes."""
    from anchor_cache.kernels.reference import sketch_rotation

    residuals = torch.randn(B, H_KV, 5, 4, dim)
    bits, scales = ops.sketch_tokens(residuals)
    scales[1, :, 0, :2] = float("nan")
    scales[1, :, 1] = float("nan")
    query, centres = torch.randn(B, H_KV * G, dim), torch.randn(B, H_KV, G, 5)
    scores = ops.score_sketches(query, bits, scales[..., 0], centres, padded=True)
    rotated = residuals @ sketch_rotation(dim, CPU)
    expected = torch.where(rotated > 0, 1.0, -1.0) * scales.float()
    turned = (query @ sketch_rotation(dim, CPU)).view(B, H_KV, G, dim)
    logits = torch.einsum("bhgd,bhnjd->bhgnj", turned, expected)
    expected = logits.nan_to_num(float("-inf")).logsumexp(-1) + centres
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert (scores[1, ..., 1] == float("-inf")).all() and not scores.isnan().any()


def test_sketches_rank_blocks_better_than_their_means():
    keys, queries = 2 * torch.randn(1, H_KV, 1600, 64), torch.randn(1, H_KV * G, 8, 64)
    index = make_index(keys, queries, builder="mean")
    query = 2 * torch.randn(1, H_KV * G, 64)
    mass = (query.view(1, H_KV, G, 64) @ keys.transpose(-1, -2) / 8).unflatten(-1, (200, 8))
    mass = mass.logsumexp(-1)
    means, centres = index.score(query, 0, 200)
    bits, scales = index._bits.states, index._scales.states
    sketches = index._refined(query, bits, scales, centres)

    def recall(scores):
        best = mass.topk(20).indices
        return (scores.topk(20).indices[..., None] == best[..., None, :]).any(-1).float().mean()

    assert recall(sketches) > recall(means) + 0.1


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("additive", [False, True])
def test_attention_received_equals_a_naive_loop_in_pieces(monkeypatch, softcap, additive):
    from anchor_cache.kernels import reference

    monkeypatch.setattr(reference, "_ATTENTION_FLOATS", 3 * H_KV * G * 40)  # three rows at once
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
