"""The compiled CPU operations against their specifications, for every kind of vector."""

import ctypes
import itertools
import platform
import random
from pathlib import Path

import pytest
import torch
from anchor_cache.kernels import native, native_build, ops
from anchor_cache.kernels.ops import use_implementation

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")


def tunings():
    """This CPU, and on x86 those with shorter vectors, which others have."""
    found = {"this CPU": None}
    if platform.machine() == "x86_64":
        found["x86-64"] = ["-march=x86-64"]
        flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        if all(flag in flags for flag in ("avx2", "fma", "f16c", "bmi2")):
            found["x86-64-v3"] = ["-march=x86-64-v3"]
    return found


@pytest.fixture(params=tunings(), scope="module")
def library(request):
    if native_build.find_compiler() is None:
        pytest.skip("no C compiler")
    before = native.library()
    assert native.why_unavailable() is None
    tuning = tunings()[request.param]
    native._state.library = before if tuning is None else native_build.build(tuning)
    yield native._state.library
    native._state.library = before


def both(operation, *args, **kwargs):
    """By the library, and as specified."""
    with use_implementation("native"):
        actual = operation(*args, **kwargs)
    with use_implementation("reference"):
        return actual, operation(*args, **kwargs)


def view_of_larger(tensor, room, fill=NAN):
    """The same numbers in a longer buffer, ``[B, H, L + room, D]``, with something behind them."""
    b, h, length, dim = tensor.shape
    buffer = tensor.new_full((b, h, length + room, dim), fill)
    buffer[:, :, :length] = tensor
    return buffer


FUNCTIONS = {
    "exp": (torch.exp, torch.linspace(-86, 88, 20000), 3e-7),
    "log": (torch.log, torch.linspace(1e-3, 300, 20000), 3e-7),
    "tanh": (torch.tanh, torch.linspace(-12, 12, 20000), 3e-7),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_exact_as_fp32(library, name):
    function, numbers, tolerance = FUNCTIONS[name]
    special = [0.0, INF, -INF, NAN] if name != "log" else [1.0, INF, NAN, 2.0]
    numbers = torch.cat((numbers, torch.tensor(special * 4)))
    expected = function(numbers.double())
    actual = numbers.clone()
    call = getattr(library, f"anchor_{name}")
    call(ctypes.c_void_p(actual.data_ptr()), ctypes.c_int64(actual.numel()))
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-7, equal_nan=True)


def attention_case(seed):
    """Any shape, number format and set of options; nan wherever nothing may be read."""
    r = random.Random(seed)
    b, h_kv, group = r.choice((1, 2, 3)), r.choice((1, 2, 3)), r.choice((1, 2, 3, 4, 5, 7, 9))
    dim, value_dim = (r.choice((1, 8, 16, 17, 64, 80, 96, 128, 256)) for _ in range(2))
    size = r.choice((1, 2, 3, 16, 64, 256))
    length = r.randrange(1, 4 * size + 150)
    query_type, state_type = r.choice(FLOATS), r.choice(FLOATS)
    heads = h_kv * group
    selections = r.choice((h_kv, heads))
    n_blocks = length // size + 1
    order = torch.rand(b, selections, n_blocks).argsort(-1)
    blocks = order[..., : r.randrange(1, n_blocks + 1)].clone()
    blocks[torch.rand(blocks.shape) < 0.2] = -1
    options = {}
    if r.random() < 0.4:
        options["shifts"] = torch.randint(0, size, (b,))
    if r.random() < 0.4:
        options["visible"] = torch.rand(b, length + 5) < 0.7
    if r.random() < 0.3:
        options["window"] = r.randrange(length + 3)
    if r.random() < 0.3:
        options["softcap"] = 5.0
    if r.random() < 0.3:
        options["sinks"] = torch.randn(heads).to(query_type)
    options["length"] = torch.tensor(length)
    keys = view_of_larger(torch.randn(b, h_kv, length, dim).to(state_type), 5)
    values = view_of_larger(torch.randn(b, h_kv, length, value_dim).to(state_type), 5)
    if "visible" in options:
        hidden = ~options["visible"][:, None, :, None]
        keys, values = keys.masked_fill(hidden, NAN), values.masked_fill(hidden, NAN)
    query = torch.randn(b, 2 * heads, dim).to(query_type)[:, ::2]
    return (query, keys, values, blocks, size, dim**-0.5), options


@pytest.mark.parametrize("seed", range(60))
def test_attention_over_blocks(library, seed):
    args, options = attention_case(seed)
    actual, expected = both(ops.attend_blocks, *args, **options)
    assert actual[0].dtype == args[0].dtype
    # Two fp32 results may lie on both sides of what a short format rounds apart.
    unit = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[args[0].dtype]
    torch.testing.assert_close(actual[0], expected[0], rtol=unit, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-5)


def test_heads_that_see_nothing_have_no_mass(library):
    query, keys = torch.randn(2, 4, 16), torch.full((2, 2, 20, 16), NAN)
    for blocks in (torch.full((2, 2, 3), -1), torch.empty((2, 2, 0), dtype=torch.int64)):
        output, mass = ops.attend_blocks(query, keys, keys, blocks, 4, 1.0)
        assert (output == 0).all() and (mass == -INF).all()


@pytest.mark.parametrize("seed", range(40))
def test_scores_of_anchors(library, seed):
    r = random.Random(seed)
    b, h_kv, group = r.choice((1, 2)), r.choice((1, 3)), r.choice((1, 2, 3, 4, 6))
    n_blocks, n_anchors = r.randrange(1, 200), r.choice((1, 1, 2, 3, 12, 70))
    dim = r.choice((1, 16, 17, 64, 80, 128, 256))
    query = torch.randn(b, h_kv * group, dim).to(r.choice(FLOATS))
    rows = view_of_larger(torch.randn(b, h_kv, n_blocks * n_anchors, dim), 7)
    scales, stored = None, rows.to(r.choice(FLOATS))
    if r.random() < 0.5:
        stored, scales = ops.quantize_int8(rows)
        scales = scales[:, :, :-7].unflatten(2, (-1, n_anchors))
    anchors = stored[:, :, :-7].unflatten(2, (-1, n_anchors))
    offsets = torch.randn(b, h_kv, n_blocks, n_anchors, 1)[..., 0]
    offsets[:, :, 0] = -INF
    if r.random() < 0.3:
        offsets = torch.zeros(()).expand(b, h_kv, n_blocks, n_anchors)
    softcap = r.choice((None, None, 20.0))
    with use_implementation("native"):
        actual = ops.score_anchors(query, anchors, offsets, scales, softcap)
    # The specification rounds to the query's format; the sums are exact either way in fp32.
    with use_implementation("reference"):
        expected = ops.score_anchors(query.float(), anchors, offsets, scales, softcap)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_bits", [1, 2])
@pytest.mark.parametrize("seed", range(30))
def test_scores_of_sketches(library, seed, n_bits):
    r = random.Random(seed)
    b, h_kv, group = r.choice((1, 2)), r.choice((1, 3)), r.choice((1, 2, 3, 4, 6))
    heads, dim = h_kv * group, r.choice((1, 8, 17, 20, 64, 80, 128, 256))
    piece, parts, n_stored = r.choice((1, 2, 3, 16)), r.choice((1, 3, 8)), r.randrange(1, 60)
    size = piece * parts
    bits, scales = ops.sketch_tokens(torch.randn(b, h_kv, n_stored, size, dim), n_bits)
    bits, scales = view_of_larger(bits.flatten(3), 3, fill=0), scales.flatten(3)
    padded = r.random() < 0.5
    if padded:
        scales[:, :, 0] = NAN
        scales[torch.rand(scales.shape) < 0.2] = NAN
    scales = view_of_larger(scales, 3)
    h_r = r.choice((h_kv, heads))
    slots = None
    if r.random() < 0.7:
        slots = torch.rand(b, h_r, n_stored).argsort(-1)[..., : r.randrange(1, n_stored + 1)]
    else:
        bits, scales = bits[:, :, :n_stored], scales[:, :, :n_stored]
    n_blocks = n_stored if slots is None else slots.shape[2]
    centres = torch.randn(b, h_r, n_blocks, heads // h_r).transpose(-1, -2)
    query = torch.randn(b, heads, dim).to(r.choice(FLOATS))
    options = {"piece": r.choice((piece, None)), "padded": padded}
    options["softcap"] = r.choice((None, 20.0))
    actual, expected = both(ops.score_sketches, query, bits, scales, centres, slots, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_pieces_far_below_the_best_keep_their_scores(library):
    """The specification takes exponentials relative to the best piece of a row."""
    bits, scales = ops.sketch_tokens(torch.randn(1, 1, 2, 4, 16))
    centres = torch.tensor([[[[0.0, -200.0]]]])
    scores = ops.score_sketches(torch.randn(1, 1, 16), bits.flatten(3), scales[..., 0], centres)
    assert scores.isfinite().all() and scores[..., 1].item() == pytest.approx(-200, abs=50)


def test_results_do_not_depend_on_the_number_of_threads(library):
    query, keys = torch.randn(2, 6, 64), torch.randn(2, 3, 3000, 64)
    blocks = torch.rand(2, 3, 187).argsort(-1)[..., :150]
    bits, scales = ops.sketch_tokens(keys.unflatten(2, (-1, 8)))
    anchors, centres = keys.unsqueeze(3), torch.randn(2, 3, 2, 375)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with use_implementation("native"):
                results.append(
                    [
                        *ops.attend_blocks(query, keys, keys, blocks, 16, 0.125),
                        *ops.score_anchors(query, anchors, anchors.new_zeros(anchors.shape[:4])),
                        ops.score_sketches(query, bits.flatten(3), scales[..., 0], centres),
                    ]
                )
    finally:
        torch.set_num_threads(before)
    for one, other in itertools.combinations(results, 2):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slot", [-1, 5])
def test_slots_that_do_not_exist_are_refused(library, slot):
    bits, scales = ops.sketch_tokens(torch.randn(1, 1, 5, 4, 16))
    slots = torch.tensor([[[0, slot]]])
    with pytest.raises(IndexError, match="slots"), use_implementation("native"):
        ops.score_sketches(
            torch.randn(1, 1, 16), bits.flatten(3), scales[..., 0], torch.zeros(1, 1, 1, 2), slots
        )


def attention_arguments():
    states = torch.randn(1, 1, 8, 16)
    return [torch.randn(1, 2, 16), states, states, torch.tensor([[[0, 1]]]), 4, 1.0]


@pytest.mark.parametrize(
    "place, change, reason",
    [
        (0, lambda query: query.requires_grad_(), "gradients"),
        (0, lambda query: query.double(), "float64"),
        (1, lambda keys: keys.transpose(2, 3).contiguous().transpose(2, 3), "dense"),
        (1, lambda keys: keys[..., :8], "shapes"),
        (2, lambda values: values.to("meta"), "meta"),
        (3, lambda blocks: blocks.int(), "int32"),
    ],
)
def test_calls_it_cannot_take_are_refused_with_the_reason(library, place, change, reason):
    arguments = attention_arguments()
    arguments[place] = change(arguments[place])
    with torch.enable_grad(), use_implementation("native"):
        assert reason in ops.attend_blocks.explain(*arguments)["native"]
        with pytest.raises(NotImplementedError, match=reason):
            ops.attend_blocks(*arguments)


def test_compiled_graphs_know_shapes_and_strides(library):
    keys = torch.randn(1, 2, 20, 16)
    anchors = keys.unsqueeze(3)
    bits, scales = ops.sketch_tokens(keys.unflatten(2, (-1, 4)))
    query, blocks = torch.randn(1, 4, 16), torch.arange(3).expand(1, 2, 3)
    with use_implementation("native"):
        for operation, arguments in (
            (ops.attend_blocks, (query, keys, keys, blocks, 4, 0.25)),
            (ops.score_anchors, (query, anchors, anchors.new_zeros(anchors.shape[:4]))),
            (
                ops.score_sketches,
                (query, bits.flatten(3), scales[..., 0], torch.randn(1, 2, 2, 5), None, 2),
            ),
        ):
            torch.library.opcheck(
                operation.custom_op, arguments, test_utils=("test_schema", "test_faketensor")
            )
