"""Triton's kernels of decoding against their specification: on a GPU where there is one, else in
Triton's interpreter (see conftest.py)."""

import pytest
import torch
from anchor_cache.kernels import ops
from anchor_cache.kernels.dispatch import use_implementation

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Memory that is allocated and not written to reads as nan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.device(DEVICE):
        yield
    torch.use_deterministic_algorithms(False)


def by_triton(operation, *args, **kwargs):
    with use_implementation("triton"):
        return operation(*args, **kwargs)


def padded_view(tensor, dim):
    """The same numbers inside a larger buffer of nan, as a cache with room to grow has them."""
    shape = list(tensor.shape)
    shape[dim] += 3
    buffer = torch.full(shape, NAN if tensor.is_floating_point() else 77, dtype=tensor.dtype)
    buffer.narrow(dim, 2, tensor.shape[dim]).copy_(tensor)
    return buffer.narrow(dim, 2, tensor.shape[dim])


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


# --- anchors ---


def anchor_case(dtype, h_kv=2, group=3, n_blocks=37, n_anchors=1, dim=16, int8=False):
    query = torch.randn(2, h_kv * group, dim, dtype=dtype)
    anchors = torch.randn(2, h_kv, n_blocks, n_anchors, dim, dtype=dtype)
    offsets = torch.randn(2, h_kv, n_blocks, 1).expand(-1, -1, -1, n_anchors)
    offsets = padded_view(offsets, 2)
    offsets[1, :, :2] = -INF
    scales = None
    if int8:
        anchors, scales = ops.quantize_int8(anchors)
        scales = padded_view(scales, 2)
    return query, padded_view(anchors, 2), offsets, scales


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
    expected = ops.score_anchors(*as_fp32(case[:3]), case[3], softcap)
    if shape.get("int8"):  # the specification takes integers in fp32 for what they stand for
        expected = ops.score_anchors(case[0].float(), *case[1:], softcap)
    actual = by_triton(ops.score_anchors, *case, softcap)
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other, 1e-5)


def test_one_offset_can_be_shared_by_all_anchors():
    query, anchors, _, _ = anchor_case(torch.float32, n_anchors=2)
    offsets = torch.randn(1).expand(anchors.shape[:4])
    assert offsets.stride() == (0, 0, 0, 0)
    expected = ops.score_anchors(query, anchors, offsets)
    for pair in zip(by_triton(ops.score_anchors, query, anchors, offsets), expected, strict=True):
        assert_near(*pair, 1e-5)


# --- sketches ---


def sketch_case(dim=64, n_bits=1, size=6, heads=2, group=3, n_slots=7, given=True, padded=True):
    residuals = torch.randn(2, 2, 13, size, dim)
    bits, scales = ops.sketch_tokens(residuals, n_bits)
    bits, scales = bits.flatten(3), scales.squeeze(-1)
    if padded:
        scales[0, 0, :, 0] = NAN
        scales[1, :, 3:5] = NAN
    else:  # never asked for
        bits, scales = padded_view(bits, 2), padded_view(scales, 2)
    slots = None
    if given:
        slots = torch.stack([torch.randperm(13)[:n_slots] for _ in range(2 * heads)])
        slots = slots.view(2, heads, n_slots)
    centres = torch.randn(2, heads, group, n_slots if given else 13)
    return torch.randn(2, heads * group, dim) / dim**0.5, bits, scales, centres, slots


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
    expected = ops.score_sketches(*case)
    assert_near(by_triton(ops.score_sketches, *case), expected, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("size", [1e-4, 3e4])
def test_sketches_take_queries_of_any_dtype_and_size(dtype, size):
    """Beyond the range of fp16 too, in which the kernel multiplies."""
    query, bits, scales, *rest = sketch_case(padded=False)
    query, scales = (query * size).to(dtype), scales.float() / size
    expected = ops.score_sketches(query, bits, scales, *rest)
    assert_near(by_triton(ops.score_sketches, query, bits, scales, *rest), expected, 1e-5)


# --- attention over blocks ---


def attention_case(
    dtype, size=4, n_blocks=9, chosen=5, dim=16, value_dim=8, h_kv=2, group=3, per_query_head=False
):
    heads = h_kv * (group if per_query_head else 1)
    length = size * n_blocks + 1
    numbers = [torch.randperm(n_blocks)[:chosen] for _ in range(2 * heads)]
    blocks = torch.stack(numbers).view(2, heads, chosen)
    blocks[0, 0, 1::3] = -1
    query = torch.randn(2, h_kv * group, dim, dtype=dtype)
    # As a model lays them out, heads after tokens, and with room to grow.
    states = [torch.randn(2, length, h_kv, d, dtype=dtype) for d in (dim, value_dim)]
    keys, values = (padded_view(x, 1).transpose(1, 2) for x in states)
    return query, keys, values, blocks, size, 0.3


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
    expected, expected_mass = ops.attend_blocks(query.float(), *with_zeros, *rest, **options)
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


# --- all three ---


def calls(dtype=torch.float32):
    """Of every operation, one with positional arguments only."""
    query, *sketches = sketch_case()
    return {
        ops.score_anchors: anchor_case(dtype, n_anchors=2),
        ops.score_sketches: (query.to(dtype), *sketches, 3, True),
        ops.attend_blocks: attention_case(dtype),
    }


NAMES = ("score_anchors", "score_sketches", "attend_blocks")


def call_of(name, dtype=torch.float32):
    return next((o, args) for o, args in calls(dtype).items() if o.__name__ == name)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_tracing_knows_what_comes_out(name, implementation):
    """Shapes, strides and dtypes under ``torch.compile`` are those of every implementation."""
    operation, args = call_of(name, torch.float16)
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    with use_implementation(implementation):
        torch.library.opcheck(operation.custom_op, args)
        expected, actual = operation(*args), compiled(*args)
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)
    if isinstance(actual, torch.Tensor):
        actual, expected = (actual,), (expected,)
    assert all(x.is_contiguous() for x in (*actual, *expected))


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_triton_cannot_take_say_why(name):
    operation, args = call_of(name)
    if DEVICE.type == "cpu":
        assert operation.explain(*args)["triton"] == "tensors on the CPU"
    with use_implementation("triton"), torch.enable_grad():
        assert operation.explain(*args)["triton"] is None
        wants = args[0].clone().requires_grad_()
        assert operation.explain(wants, *args[1:])["triton"] == "a gradient is wanted"
        with pytest.raises(NotImplementedError, match=f"{name}: triton cannot run: a gradient"):
            operation(wants, *args[1:])
        double = args[0].double()
        assert "float64" in operation.explain(double, *args[1:])["triton"]
        spread = args[1].transpose(-1, -2).contiguous().transpose(-1, -2)
        assert "side by side" in operation.explain(args[0], spread, *args[2:])["triton"]


@pytest.mark.parametrize("name", NAMES)
def test_places_beyond_int32(name):
    """Heads that lie more than 2^31 numbers apart. What is not written to costs no memory."""
    torch.use_deterministic_algorithms(False)
    operation, (query, states, *rest) = call_of(name, torch.float16)
    if name == "score_anchors":
        states, rest[1] = ops.quantize_int8(states)
    far = 2**31 + 64
    inner = states.contiguous()[0, 0]
    strides = (inner.numel(), far, *inner.stride())
    size = sum((n - 1) * stride for n, stride in zip(states.shape, strides, strict=True)) + 1
    spread = torch.empty(size, dtype=states.dtype).as_strided(states.shape, strides)
    spread.copy_(states)
    expected, actual = (
        by_triton(operation, query, x, *rest) for x in (states.contiguous(), spread)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@on_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_can_be_captured_and_replayed(name, dtype):
    """So that nothing waits for the device either."""
    operation, args = call_of(name, dtype)
    operation(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = operation(*args)
    args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    torch.testing.assert_close(results, operation(*args), rtol=0, atol=0, equal_nan=True)


@on_gpu
def test_a_replayed_graph_follows_the_length():
    query, keys, values, *rest = attention_case(torch.float16)
    length = torch.tensor(10)
    ops.attend_blocks(query, keys, values, *rest, length=length)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ops.attend_blocks(query, keys, values, *rest, length=length)
    length.fill_(31)
    graph.replay()
    expected = ops.attend_blocks(query, keys, values, *rest, length=length)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
