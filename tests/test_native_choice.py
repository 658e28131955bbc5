"""The compiled choice of pieces against its specification."""

import pytest
import torch
from anchor_cache.kernels import native, ops

pytestmark = pytest.mark.skipif(
    native.why_unavailable() is not None, reason=str(native.why_unavailable())
)

N, SIZE, D = 23, 8, 20


def make(b=2, n_kv_heads=2, group=3, n_blocks=N, spread=2.0):
    keys = torch.randn(b, n_kv_heads, n_blocks, SIZE, D)
    bits, scales = ops.sketch_tokens(keys)
    query = torch.randn(b, n_kv_heads * group, D)
    masses = spread * torch.randn(2, b, n_kv_heads, group, n_blocks)
    return query, *masses, bits.flatten(3), scales.squeeze(-1)


def both(*arguments, **options):
    pieces = []
    for name in ("reference", "native"):
        with ops.use_implementation(name):
            pieces.append(ops.choose_pieces(*arguments, **options).sort().values)
    return pieces


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("piece", [1, 2, 8])
@pytest.mark.parametrize("proposals", [1, 5, N - 1, N])
def test_pieces_are_those_of_the_specification(proposals, piece, softcap):
    for pieces in (1, proposals * SIZE // piece // 2 + 1, proposals * SIZE // piece):
        expected, actual = both(*make(), proposals, pieces, piece, softcap)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("group", [1, 2, 4, 7])
def test_a_choice_per_query_head_and_large_groups(group):
    query, by_anchors, centres, bits, scales = make(group=group)
    expected, actual = both(query, by_anchors, centres, bits, scales, 9, 20, 2)
    assert torch.equal(actual, expected)
    own = [x.flatten(1, 2).unsqueeze(2).contiguous() for x in (by_anchors, centres)]
    expected, actual = both(query, *own, bits, scales, 9, 20, 2)
    assert torch.equal(actual, expected)


def test_equal_and_vanishing_shares_still_give_distinct_pieces():
    query, by_anchors, centres, bits, scales = make(b=1, n_kv_heads=1)
    scales.zero_()
    for masses in (torch.zeros_like(by_anchors), by_anchors * 1000, by_anchors * float("-inf")):
        masses = masses.nan_to_num(neginf=float("-inf"), posinf=float("-inf"))
        with ops.use_implementation("native"):
            chosen = ops.choose_pieces(query, masses, masses, bits, scales, 9, 30, 2)[0, 0]
        assert len(chosen.unique()) == 30 and 0 <= chosen.min() and chosen.max() < N * SIZE // 2


def test_many_candidates_are_ranked_exactly():
    arguments = make(b=1, n_blocks=1000, spread=0.01)
    expected, actual = both(*arguments, 300, 500, 2)
    # Shares that differ by less than rounding may change places.
    assert len(set(actual[0, 0].tolist()) ^ set(expected[0, 0].tolist())) <= 2


@pytest.mark.parametrize("shape", [(3, 2, 40), (1, 1)])
def test_the_largest_come_first_and_of_equal_ones_the_first(shape):
    numbers = torch.randint(-2, 3, shape).float().masked_fill_(torch.rand(shape) < 0.1, -torch.inf)
    for count in {1, shape[-1] // 2 + 1, shape[-1]}:
        expected = numbers.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        for name in ("reference", "native"):
            with ops.use_implementation(name):
                assert torch.equal(ops.largest(numbers, count), expected)


def test_traced_shapes_and_strides_are_those_of_every_implementation():
    for name in ("reference", "native"):
        with ops.use_implementation(name):
            torch.library.opcheck(ops.largest.custom_op, (torch.randn(2, 40), 7))
            torch.library.opcheck(ops.choose_pieces.custom_op, (*make(), 9, 20, 2))
