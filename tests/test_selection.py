"""Plans, choices, coverage and the certificate against their definitions."""

import dataclasses

import pytest
import torch
from anchor_cache.kernels import ops
from test_anchors import H_KV, B, D, G, stored

from anchor_cache import AnchorConfig
from anchor_cache.anchor_index import AnchorIndex
from anchor_cache.block_choice import CachedTokens, choose_pieces, fixed_log_mass
from anchor_cache.certificate import read_until_certain
from anchor_cache.estimates import valid_shares
from anchor_cache.selection import plan_step
from anchor_cache.token_reading import blocks_to_read, reading_of, select_tokens, tokens_attended

pytestmark = pytest.mark.usefixtures("ranks_few")

CPU = torch.device("cpu")
SPARSE = AnchorConfig(
    block_size=8, sink_size=8, window_size=8, budget=80, dense_below=0, dense_above=1.0
)
LENGTH = 300


def situation(peaked=2.0, padding=(0,), **settings):
    """Index, tokens and plan of one step over random keys."""
    config = dataclasses.replace(SPARSE, **{"builder": "mean", **settings})
    keys = stored(torch.randn(B, H_KV, LENGTH, D))
    visible = None
    if any(padding):
        visible = torch.arange(LENGTH) >= torch.tensor(padding)[:, None]
    query = peaked * torch.randn(B, H_KV * G, D)
    tokens = CachedTokens(query, keys, keys, visible, D**-0.5, None)
    plan = plan_step(config, LENGTH, padding, CPU)
    index = AnchorIndex(config, None, padding, D**-0.5)
    index.extend(keys, keys, visible)
    return index, tokens, plan, config


def weights(tokens):
    return ops.attention_mass(tokens.query, tokens.keys.states, D**-0.5, tokens.visible)


def mass_read(selection, tokens):
    true = weights(tokens)
    read = true.gather(2, selection.positions.repeat_interleave(G, 1))
    attended = selection.attended
    if attended is not None:
        read = read * attended.repeat_interleave(true.shape[1] // attended.shape[1], 1)
    return read.sum(-1)


@pytest.mark.parametrize("reselect_every", [1, 5])
@pytest.mark.parametrize("length", [200, 201, 207, 333])
@pytest.mark.parametrize("budget", [36, 51, 64, 100, 0.1, 0.3, 0.5])
@pytest.mark.parametrize(("sinks", "window"), [(12, 16), (0, 8), (0, 64), (24, 64)])
@pytest.mark.parametrize("refine", [None, "sketch"])
def test_a_plan_stays_within_its_budget_and_reads_sinks_and_window(
    refine, sinks, window, length, budget, reselect_every
):
    sizes = dict(sink_size=sinks, window_size=window, reselect_every=reselect_every)
    config = dataclasses.replace(SPARSE, **sizes, budget=budget, refine=refine)
    plan = plan_step(config, length, (0,), CPU)
    (row,) = plan.rows
    spare = reselect_every - 1
    allowed = budget
    if isinstance(budget, float):
        allowed = max(int(budget * length), config.smallest_budget)
    assert plan.attended[0] + spare <= allowed < plan.attended[0] + spare + plan.piece
    half = min((allowed - spare) // 2, allowed - spare - 15)  # a block, and one that is not full
    whole = -(-sinks // 8) * 8
    # A block each at least; a quarter of one half, and what that leaves of it.
    n_sinks = min(whole, max(half // 4 // 8 * 8, 8))
    n_window = min(window, max(half - n_sinks, 8))
    assert (n_sinks, n_window) == (whole, window) or half < 4 * whole or half < whole + window
    fixed = set(plan.fixed_index[0].tolist())
    assert set(range(n_sinks)) | set(range(length - n_window, length)) <= fixed
    assert len(fixed) < n_sinks + n_window + 8 and row.pieces * plan.piece >= 8
    assert row.candidates.start * 8 == n_sinks and row.candidates.stop * 8 == row.tail.start


def test_short_contexts_are_ranked_as_a_whole(monkeypatch):
    config = dataclasses.replace(SPARSE, refine_factor=1)
    assert not plan_step(config, 3000, (0,), CPU).proposes_all
    monkeypatch.undo()
    plan_step.cache_clear()
    assert plan_step(config, 3000, (0,), CPU).proposes_all
    assert plan_step(config, 30000, (0,), CPU).proposals == 8192 // 8


@pytest.mark.parametrize("refine", [None, "sketch", "exact"])
@pytest.mark.parametrize("heads", ["key_value", "query", "layer"])
@pytest.mark.parametrize("factor", [2, 100])
@pytest.mark.parametrize("padding", [(0,), (0, 100)])
def test_chosen_pieces_are_distinct_and_of_the_row(refine, heads, factor, padding):
    index, tokens, plan, _ = situation(
        refine=refine, refine_factor=factor, selection_heads=heads, padding=padding
    )
    choice = choose_pieces(index, tokens, plan)
    n_heads = H_KV * G if heads == "query" else H_KV
    assert choice.pieces.shape == (B, n_heads, plan.pieces)
    rows = plan.rows * (B if len(plan.rows) == 1 else 1)
    for b, row in enumerate(rows):
        for h in range(n_heads):
            chosen = choice.pieces[b, h, : row.pieces].tolist()
            assert len(set(chosen)) == row.pieces
            assert {piece // plan.parts for piece in chosen} <= set(row.candidates)
        if heads == "layer":
            assert (choice.pieces[b] == choice.pieces[b, :1]).all()
    assert choice.is_read(plan).sum(-1).tolist() == [[row.pieces] * n_heads for row in rows]


@pytest.mark.parametrize("read_size", [1, 2, 8])
@pytest.mark.parametrize("heads", ["key_value", "query", "layer"])
def test_the_oracle_reads_the_pieces_with_the_largest_summed_shares(heads, read_size):
    index, tokens, plan, config = situation(
        refine="exact", refine_factor=100, selection_heads=heads, read_size=read_size
    )
    assert plan.piece == read_size and plan.parts == 8 // read_size
    choice = choose_pieces(index, tokens, plan)
    first, size = plan.first_piece, plan.piece
    true = weights(tokens)[..., 8 * plan.first_block : 8 * plan.last_block]
    true = true.unflatten(-1, (-1, size)).sum(-1)
    shares = true / true.sum(-1, keepdim=True)
    groups = {"query": H_KV * G, "key_value": H_KV, "layer": 1}[heads]
    shares = shares.unflatten(1, (groups, -1)).sum(2).expand(-1, choice.pieces.shape[1], -1)
    best = shares.topk(plan.pieces).indices.sort().values
    assert torch.equal(choice.pieces.sort().values - first, best)


def test_shares_of_valid_blocks_come_before_others_even_when_they_underflow():
    estimates = torch.zeros(2, H_KV, G, 5)
    estimates[..., 0] = 500.0
    valid = torch.tensor([[True] * 5, [True, True, False, False, True]])
    shares = valid_shares(estimates, valid)
    assert (shares[1, :, 2:4] == -1).all() and (shares[1, :, [0, 1, 4]] >= 0).all()


def test_fixed_mass_counts_every_sink_and_window_token_once():
    index, tokens, plan, _ = situation(padding=(0, 100))
    fixed = fixed_log_mass(tokens, plan, H_KV)
    for b, row in enumerate(plan.rows):
        places = [*row.sink, *row.tail]
        keys = tokens.keys.states[b, :, places]
        logits = tokens.query[b].view(H_KV, G, D) @ keys.transpose(-1, -2) * D**-0.5
        torch.testing.assert_close(fixed[b], logits.logsumexp(-1))


@pytest.mark.parametrize("heads", ["key_value", "query", "layer"])
@pytest.mark.parametrize("padding", [(0,), (0, 100)])
def test_coverage_reads_the_fewest_blocks_that_reach_it(heads, padding):
    settings = dict(refine="exact", refine_factor=100, selection_heads=heads, padding=padding)
    torch.manual_seed(1)
    index, tokens, plan, config = situation(coverage=0.8, budget=190, **settings)
    choice = choose_pieces(index, tokens, plan)
    selection = select_tokens(choice, tokens, plan)
    groups = {"query": H_KV * G, "key_value": H_KV, "layer": 1}[heads]
    held = mass_read(selection, tokens).unflatten(1, (groups, -1)).mean(-1)
    assert (held >= 0.8 - 1e-5).all()
    # One block less would not have been enough.
    counts = choice.valid.sum(-1, keepdim=True)
    fewer = torch.arange(choice.pieces.shape[2]) < counts - 1
    less = select_tokens(choice._replace(valid=fewer), tokens, plan)
    held = mass_read(less, tokens).unflatten(1, (groups, -1)).mean(-1)
    assert (held < 0.8).all()
    assert len(set(counts.flatten().tolist())) > 1 or heads == "layer"
    capped = dataclasses.replace(config, budget=48)
    plan = plan_step(capped, LENGTH, padding, CPU)
    index.config = capped
    assert max(tokens_attended(choose_pieces(index, tokens, plan), plan, capped)) <= 48


@pytest.mark.parametrize("builder", ["mean", "minmax"])
@pytest.mark.parametrize("anchor_dtype", [None, "int8"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_upper_bounds_are_never_below_a_logit(builder, anchor_dtype, softcap):
    index, tokens, plan, _ = situation(
        peaked=10.0, builder=builder, anchor_dtype=anchor_dtype, tolerance=0.1
    )
    tokens.keys.states[:, :, 24:32] = tokens.keys.states[:, :, 24:25]
    index.truncate(0)
    index.extend(tokens.keys, tokens.keys, None)
    bounds = index.upper_bounds(tokens.query, 0, 36, softcap)
    logits = tokens.query.view(B, H_KV, G, D) @ tokens.keys.states.transpose(-1, -2) * D**-0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    mass = logits[..., :288].unflatten(-1, (36, 8)).amax(-1)
    assert (bounds >= mass - 1e-5).all()
    if anchor_dtype is None:  # equal keys leave no doubt
        torch.testing.assert_close(bounds[..., 3], mass[..., 3], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("heads", ["key_value", "query", "layer"])
@pytest.mark.parametrize("padding", [(0,), (0, 100)])
@pytest.mark.parametrize("builder", ["mean", "minmax"])
def test_a_tolerance_is_kept(heads, padding, builder):
    index, tokens, plan, config = situation(
        selection_heads=heads, padding=padding, builder=builder, tolerance=0.6
    )
    # Keys of a few blocks stand out, so that the bound can be reached before the end.
    tokens.keys.states.mul_(0.02)
    tokens.keys.states[:, :, 120:136] *= 100
    index = AnchorIndex(config, None, padding, D**-0.5)
    index.extend(tokens.keys, tokens.keys, tokens.visible)
    first = choose_pieces(index, tokens, plan)
    choice, skipped = read_until_certain(index, tokens, plan, first)
    assert choice is not None and choice.pieces.shape[2] >= first.pieces.shape[2]
    selection = select_tokens(choice, tokens, plan)
    true_skipped = 1 - mass_read(selection, tokens)
    assert (true_skipped <= skipped + 1e-4).all() and (skipped <= 0.6).all()
    read = choice.is_read(plan).sum(-1)
    ranks = choice.pieces.shape[2] if choice.valid is None else choice.valid.sum(-1)
    assert (read == ranks).all()  # no block is read twice


def test_a_tolerance_that_needs_everything_says_so():
    index, tokens, plan, _ = situation(peaked=0.1, tolerance=1e-6)
    choice, skipped = read_until_certain(index, tokens, plan, choose_pieces(index, tokens, plan))
    assert choice is None and (skipped == 0).all()


def test_positions_beyond_int32():
    """Rows far into a large buffer are addressed with 64-bit offsets."""
    states = torch.zeros(1, 1, 4, 2).expand(1, 1, 4, 2).contiguous()
    index = torch.tensor([[[3, 0]]])
    assert ops.gather_tokens(states, index).shape == (1, 1, 2, 2)
    config = dataclasses.replace(AnchorConfig(), budget=2048)
    plan = plan_step(config, 2**33, (0,), CPU)
    assert plan.fixed_index.dtype == torch.int64 and plan.fixed_index.max() == 2**33 - 1


@pytest.mark.parametrize("settings", [{}, {"coverage": 0.8}, {"selection_heads": "query"}])
@pytest.mark.parametrize("padding", [(0,), (0, 100)])
def test_reading_blocks_in_place_is_reading_copies_of_them(settings, padding):
    index, tokens, plan, _ = situation(budget=190, padding=padding, **settings)
    choice = choose_pieces(index, tokens, plan)
    reading = reading_of(select_tokens(choice, tokens, plan), tokens, None)
    keys, values = (x.repeat_interleave(G, 1) for x in (reading.keys, reading.values))
    query = tokens.query.unsqueeze(2)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, reading.mask)
    blocks = blocks_to_read(choice, tokens, plan, None)
    output, _ = ops.attend_blocks(tokens.query, *blocks[:4], D**-0.5, blocks.shifts, blocks.visible)
    torch.testing.assert_close(output, expected[:, :, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"refine_factor": 2}, {"selection_heads": "query"}])
def test_the_short_way_to_the_pieces_leads_where_the_long_one_does(settings, ranks_few):
    index, tokens, plan, config = situation(budget=190, **settings)
    short = choose_pieces(index, tokens, plan)
    index.config = dataclasses.replace(config, audit_every=1)
    long = choose_pieces(index, tokens, plan)
    assert short.estimates is None and long.estimates is not None
    assert torch.equal(short.pieces.sort().values, long.pieces.sort().values)
