"""What every Triton kernel of decoding has to do to be dispatched to, traced and captured: on a GPU
where there is one, else in Triton's interpreter (see conftest.py)."""

import pytest
import torch
from anchor_cache.kernels import ops
from anchor_cache.kernels.dispatch import use_implementation
from decoding_cases import DTYPES, anchor_case, attention_case, sketch_case

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


@pytest.fixture(autouse=True)
def made_there():
    with torch.device(DEVICE):
        yield


def calls(dtype, h_kv):
    """Of every operation, one with positional arguments only."""
    query, *sketches = sketch_case(h_kv=h_kv)
    return {
        ops.score_anchors: anchor_case(dtype, n_anchors=2, h_kv=h_kv),
        ops.score_sketches: (query.to(dtype), *sketches, 3, True),
        ops.attend_blocks: attention_case(dtype, h_kv=h_kv),
    }


NAMES = ("score_anchors", "score_sketches", "attend_blocks")


def call_of(name, dtype=torch.float32, h_kv=2):
    return next((o, args) for o, args in calls(dtype, h_kv).items() if o.__name__ == name)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_tracing_knows_what_comes_out(name, implementation):
    """Shapes, strides and dtypes under ``torch.compile`` are those of every implementation."""
    operation, args = call_of(name, torch.float16)
    torch._dynamo.reset()  # other tests count towards its limit of recompilations, too
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
    """A third head that lies 2^31 numbers beyond the first one. What is never written to costs no
    memory."""
    operation, (query, states, *rest) = call_of(name, torch.float16, h_kv=3)
    if name == "score_anchors":
        states, rest[1] = ops.quantize_int8(states)
    far = 2**30 + 64
    inner = states.contiguous()[0, 0]
    strides = (inner.numel(), far, *inner.stride())
    size = sum((n - 1) * stride for n, stride in zip(states.shape, strides, strict=True)) + 1
    spread = torch.empty(size, dtype=states.dtype).as_strided(states.shape, strides)
    spread.copy_(states)
    with use_implementation("triton"):
        expected, actual = (operation(query, x, *rest) for x in (states.contiguous(), spread))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def captured(operation, *args, **kwargs):
    """The results, and the graph that writes them; capturing fails where one waits for a GPU."""
    with use_implementation("triton"):
        operation(*args, **kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = operation(*args, **kwargs)
    return results, graph


@on_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_can_be_captured_and_replayed(name, dtype):
    operation, args = call_of(name, dtype)
    results, graph = captured(operation, *args)
    args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    torch.testing.assert_close(results, operation(*args), rtol=0, atol=0)


@on_gpu
def test_a_replayed_graph_follows_the_length():
    case, length = attention_case(torch.float16), torch.tensor(10)
    results, graph = captured(ops.attend_blocks, *case, length=length)
    length.fill_(31)
    graph.replay()
    expected = ops.attend_blocks(*case, length=length)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
