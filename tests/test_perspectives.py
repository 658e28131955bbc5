"""Perspectives: what they are learned from, and when they are learned again."""

import torch

from anchor_cache.perspectives import QUERY_WINDOW, Perspectives, learn_perspectives

B, D = 2, 16


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


def feed(perspectives, queries, length):
    """One query a step, as decoding does; how often something was learned."""
    learned = 0
    for i in range(queries.shape[2]):
        perspectives.observe(queries[:, :, i : i + 1], length + i + 1)
        learned += perspectives.refresh(None, 2, 1.0)
    return learned


def test_perspectives_follow_the_rows_whose_queries_drift():
    direction = torch.eye(D)[[0, 5]] * 4
    start = direction[0].expand(B, 4, 80, D) + 0.3 * torch.randn(B, 4, 80, D)
    perspectives = Perspectives(1, by_query_head=True)
    perspectives.observe(start, 80)
    assert perspectives.refresh(None, 2, 1.0)
    before = perspectives.centres.clone()
    steady = direction[0].expand(B, 4, 200, D) + 0.3 * torch.randn(B, 4, 200, D)
    assert feed(perspectives, steady, 80) == 0
    drifting = steady.clone()
    drifting[1] += direction[1] - direction[0]
    assert feed(perspectives, drifting, 280) >= 1
    assert torch.equal(perspectives.centres[0], before[0])
    cosine = torch.cosine_similarity(perspectives.centres[1], direction[1].expand(2, 2, D), -1)
    assert (cosine > 0.9).all()


def test_perspectives_of_a_few_queries_are_learned_again_from_many():
    perspectives = Perspectives(1, by_query_head=True)
    queries = torch.randn(B, 4, 3 * QUERY_WINDOW, D)
    assert feed(perspectives, queries, 0) >= 2
    assert (perspectives._learned_from == QUERY_WINDOW).all()


def test_a_new_prompt_gives_new_perspectives_a_few_checked_tokens_do_not():
    perspectives = Perspectives(1, by_query_head=True)
    perspectives.observe(torch.randn(B, 4, 80, D), 80)
    assert perspectives.refresh(None, 2, 1.0)
    perspectives.observe(torch.randn(B, 4, 5, D), 85)
    assert not perspectives.refresh(None, 2, 1.0)
    perspectives.observe(torch.randn(B, 4, 70, D), 155)
    assert perspectives.refresh(None, 2, 1.0)
