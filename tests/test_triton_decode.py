"""Triton's kernels of decoding against their specification: on a GPU where there is one, else in
Triton's interpreter (see conftest.py)."""

import pytest
import torch
from anchor_cache.kernels import ops
from anchor_cache.kernels.dispatch import use_implementation
from decoding_cases import DTYPES, INF, NAN, anchor_case, attention_case, sketch_case

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Memory that is allocated and not written to reads as nan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.device(DEVICE):
        yield
    torch.use_deterministic_algorithms(False)


def by(implementation, operation, *args, **kwargs):
    with use_implementation(implementation):
        return operation(*args, **kwargs)


def by_triton(operation, *args, **kwargs):
    return by("triton", operation, *args, **kwargs)


def by_definition(operation, *args, **kwargs):
    return by("reference", operation, *args, **kwargs)


def as_fp32(args):
    return [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]


def assert_near(actual, expected, tolerance):
    """By the length of the difference, and with infinities where they belong."""
    assert actual.shape == expected.shape and actual.is_contiguous()
    assert not actual.isnan().any()
    torch.testing.assert_close(actual.isinf(), expected.isinf())
    finite = expected.isfinite()
    actual, expected = actual[finite].double(), expected[finite].double()
    assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "softcap"),
    [
        ({}, None),
        ({"n_anchors": 3, "int8": True}, 2.0),
        ({"n_anchors": 2, "dim": 20, "group": 1}, 3.0),
        ({"dim": 80, "group": 17, "int8": True, "h_kv": 1}, None),
        ({"dim": 300, "n_blocks": 5, "n_anchors": 5}, None),
    ],
)
def test_scores_of_anchors(dtype, shape, softcap):
    case = anchor_case(dtype, **shape)
    expected = by_definition(ops.score_anchors, *as_fp32(case), softcap)
    actual = by_triton(ops.score_anchors, *case, softcap)
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other, 1e-5)


def test_one_offset_can_be_shared_by_all_anchors():
    query, anchors, _, _ = anchor_case(torch.float32, n_anchors=2)
    offsets = torch.randn(1).expand(anchors.shape[:4])
    assert offsets.stride() == (0, 0, 0, 0)
    expected = by_definition(ops.score_anchors, query, anchors, offsets)
    for pair in zip(by_triton(ops.score_anchors, query, anchors, offsets), expected, strict=True):
        assert_near(*pair, 1e-5)


@pytest.mark.parametrize(
    ("shape", "piece", "softcap"),
    [
        ({}, None, None),
        ({"given": False}, 2, None),
        ({"heads": 6, "group": 1, "n_bits": 2}, 3, 1.5),
        ({"dim": 20, "n_bits": 2, "padded": False}, 1, None),
        ({"dim": 128, "group": 9, "size": 16}, 2, 2.0),
        ({"dim": 160, "size": 300, "given": False, "padded": False}, 150, None),
    ],
)
def test_scores_of_sketches(shape, piece, softcap):
    case = (*sketch_case(**shape), piece, shape.get("padded", True), softcap)
    expected = by_definition(ops.score_sketches, *case)
    assert_near(by_triton(ops.score_sketches, *case), expected, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("size", [1e-4, 3e4])
def test_sketches_take_queries_of_any_dtype_and_size(dtype, size):
    """Beyond the range of fp16 too, in which the kernel multiplies."""
    query, bits, scales, *rest = sketch_case(padded=False)
    query, scales = (query * size).to(dtype), scales.float() / size
    expected = by_definition(ops.score_sketches, query, bits, scales, *rest)
    assert_near(by_triton(ops.score_sketches, query, bits, scales, *rest), expected, 1e-5)


def without(states, unseen):
    """nan in place of what must not be read."""
    return states.masked_fill(unseen[:, None, :, None], NAN)


OPTIONS = {
    "plain": {},
    "shifts": {"shifts": torch.tensor([0, 1])},
    "length": {"length": torch.tensor(30)},
    "window": {"window": 20, "length": torch.tensor(33)},
    "window of the whole buffer": {"window": 9},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 6)},
    "visible": {"visible": torch.arange(37).expand(2, 37) % 3 > 0},
    "all": {
        "shifts": torch.tensor([1, 0]),
        "visible": torch.arange(37).expand(2, 37) > 9,
        "length": torch.tensor(35),
        "window": 25,
        "softcap": 3.0,
        "sinks": torch.ones(6, dtype=torch.float16),
    },
}


def options_of(name):
    return {
        key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()
    }


def check_attention(case, options, dtype):
    query, keys, values, *rest = case
    token = torch.arange(keys.shape[2]).expand(keys.shape[0], -1)
    end = options.get("length", keys.shape[2])
    unseen = token >= end
    if "window" in options:
        unseen = unseen | (token < end - options["window"])
    if "visible" in options:
        unseen = unseen | ~options["visible"]
    with_zeros = (x.float().masked_fill(unseen[:, None, :, None], 0) for x in (keys, values))
    expected, expected_mass = by_definition(
        ops.attend_blocks, query.float(), *with_zeros, *rest, **options
    )
    poisoned = (without(x, unseen) for x in (keys, values))
    output, mass = by_triton(ops.attend_blocks, query, *poisoned, *rest, **options)
    assert output.dtype == dtype and mass.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert_near(output, expected, tolerance)
    assert_near(mass, expected_mass, 1e-5)
    return output, mass


@pytest.mark.parametrize("per_query_head", (False, True))
@pytest.mark.parametrize("option", OPTIONS)
def test_attention_over_blocks(option, per_query_head):
    case = attention_case(torch.float32, per_query_head=per_query_head)
    check_attention(case, options_of(option), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {"size": 1, "n_blocks": 36, "chosen": 20},
        {"dim": 80, "value_dim": 96, "size": 3},
        {"dim": 160, "value_dim": 32, "h_kv": 1, "group": 17},
        {"size": 40, "n_blocks": 16, "chosen": 15},  # several splits of several tiles
        {"size": 7, "n_blocks": 80, "chosen": 77, "per_query_head": True, "group": 2},
    ],
)
def test_attention_over_blocks_of_any_size(shape, dtype):
    case = attention_case(dtype, **shape)
    check_attention(case, {"length": torch.tensor(case[1].shape[2] - 2)}, dtype)


@pytest.mark.parametrize("sinks", [None, "sinks"])
def test_heads_that_see_nothing(sinks):
    query, keys, values, blocks, *rest = attention_case(torch.float32, group=1)
    blocks[1, 1] = -1
    options = {} if sinks is None else {"sinks": torch.tensor([0.5, -0.5])}
    output, mass = check_attention((query, keys, values, blocks, *rest), options, torch.float32)
    assert (output[1, 1] == 0).all() and mass[1, 1] == (-INF if sinks is None else -0.5)
    output, mass = by_triton(
        ops.attend_blocks, query, keys, values, blocks[..., :0], *rest, **options
    )
    assert (output == 0).all() and (mass[:, 1] == (-INF if sinks is None else -0.5)).all()


def test_attention_is_the_same_every_time():
    case = attention_case(torch.float16, size=40, n_blocks=16, chosen=15)
    first, second = (by_triton(ops.attend_blocks, *case) for _ in range(2))
    assert all(map(torch.equal, first, second))
