"""What every Triton kernel of index building and of blending has to do to be dispatched to, traced
and captured: on a GPU where there is one, else in Triton's interpreter (see conftest.py)."""

import pytest
import torch
from anchor_cache.kernels import ops
from anchor_cache.kernels.dispatch import use_implementation

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")


@pytest.fixture(autouse=True)
def made_there():
    with torch.device(DEVICE):
        yield


def calls(dtype=torch.float16):
    """Of every operation, one with the states that may be large first or, for attention, second."""
    keys, table = torch.randn(1, 3, 24, 16, dtype=dtype), torch.ones(1, 24, 16, dtype=dtype)
    blocks, centres = keys.unflatten(2, (3, 8)), torch.randn(1, 3, 3, 16)
    query, rows = torch.randn(1, 6, 4, 16, dtype=dtype), torch.tensor([1, 7, 8, 20])
    fresh = torch.randn(1, 3, 4, 16, dtype=dtype)
    return {
        "tangent_anchors": (blocks, centres, torch.ones(1, 1, 3, 8, dtype=torch.bool)),
        "quantize_int8": (keys,),
        "sketch_tokens": (blocks, 2, centres),
        "rotate_into": (keys, fresh, table, table, 5, "half", "halves"),
        "replace_tokens": (keys, fresh, rows),
        "attend_rows": (query, keys, keys, None, None, rows, 6),
        "attention_received": (query, keys, 0.3, None, None, rows, 6),
    }


NAMES = tuple(calls())
MUTATING = ("rotate_into", "replace_tokens")


def copied(args):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args]


def results_of(operation, args):
    """What comes out, and the first argument, which may have been written to."""
    results = operation(*args)
    results = results if isinstance(results, tuple) else (results,)
    return [x for x in (*results, args[0]) if x is not None]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_tracing_knows_what_comes_out(name, implementation):
    """Shapes, strides and dtypes under ``torch.compile`` are those of every implementation."""
    operation, args = getattr(ops, name), calls()[name]
    torch._dynamo.reset()  # other tests count towards its limit of recompilations, too
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    with use_implementation(implementation):
        torch.library.opcheck(operation.custom_op, copied(args))
        expected = results_of(operation, copied(args))
        actual = results_of(compiled, copied(args))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert all(x.is_contiguous() for x in (*actual, *expected))
    assert torch.equal(expected[-1], args[0]) == (name not in MUTATING)


@pytest.mark.parametrize("name", NAMES)
def test_a_wanted_gradient_is_left_to_pytorch(name):
    operation, args = getattr(ops, name), calls()[name]
    with use_implementation("triton"), torch.enable_grad():
        assert operation.explain(*args)["triton"] is None
        wants = args[0].clone().requires_grad_()
        assert operation.explain(wants, *args[1:])["triton"] == "a gradient is wanted"
        assert "float64" in operation.explain(args[0].double(), *args[1:])["triton"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "quantize_int8"])
def test_places_beyond_int32(name):
    """A third head that lies 2^31 numbers beyond the first one. What is never written to costs no
    memory."""
    operation, args = getattr(ops, name), copied(calls()[name])
    large = 1 if name in ("attend_rows", "attention_received") else 0
    states = args[large]
    strides = (states[0].numel(), 2**30 + 64, *states.stride()[2:])
    size = sum((n - 1) * stride for n, stride in zip(states.shape, strides, strict=True)) + 1
    spread = torch.empty(size, dtype=states.dtype).as_strided(states.shape, strides)
    spread.copy_(states)
    with use_implementation("triton"):
        expected, actual = (
            results_of(operation, [*args[:large], x, *args[large + 1 :]]) for x in (states, spread)
        )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@on_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_can_be_captured_and_replayed(name):
    """Capturing fails where a call waits for the GPU."""
    operation, args = getattr(ops, name), copied(calls()[name])
    with use_implementation("triton"):
        operation(*copied(args))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = results_of(operation, args)
        args[0].copy_(torch.randn_like(args[0]))
        expected = results_of(operation, copied(args))
        graph.replay()
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
