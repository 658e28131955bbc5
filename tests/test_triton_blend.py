"""Triton's kernels of index building and of blending against their specification: on a GPU where
there is one, else in Triton's interpreter (see conftest.py)."""

import pytest
import torch
from anchor_cache.kernels import ops
from anchor_cache.kernels.dispatch import use_implementation
from anchor_cache.kernels.reference_sketch import sketch_rotation
from decoding_cases import DTYPES, INF, NAN, padded_view
from test_triton_decode import as_fp32, assert_near, by_definition, by_triton

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# On a GPU products in fp32 are three products in tf32. The interpreter cuts numbers off where it
# should round them to bfloat16.
FP32, CHANNEL = (3e-6, 1e-5) if DEVICE.type == "cpu" else (2e-5, 1e-4)
TOLERANCE = {torch.float32: FP32, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Memory that is allocated and not written to reads as nan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.device(DEVICE):
        yield
    torch.use_deterministic_algorithms(False)


def blocks_of_keys(dtype, n_blocks=5, size=8, dim=16):
    """Blocks in a buffer of nan, with half of a block and a whole one that are not real."""
    keys = torch.randn(2, 3, n_blocks, size, dim, dtype=dtype)
    valid = torch.ones(2, 1, n_blocks, size, dtype=torch.bool)
    valid[0, :, 0, : size // 2] = valid[1, :, 2] = False
    keys = padded_view(keys.flatten(2, 3), 2).unflatten(2, (-1, size))
    return keys, valid


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("perspectives", [None, 1, 3])
@pytest.mark.parametrize("shape", [{}, {"n_blocks": 3, "size": 12, "dim": 20}])
def test_anchors(dtype, perspectives, shape):
    keys, valid = blocks_of_keys(dtype, **shape)
    if perspectives is not None:
        perspectives = 2 * torch.randn(2, 3, perspectives, keys.shape[-1])
    for mask in (None, valid):
        expected = by_definition(ops.tangent_anchors, *as_fp32((keys, perspectives, mask)))
        if mask is not None:  # what is not real may be anything
            keys = keys.clone()
            keys.transpose(1, 2).transpose(2, 3)[~mask[:, 0]] = NAN
        actual = by_triton(ops.tangent_anchors, keys, perspectives, mask)
        assert actual[0].dtype == dtype
        assert_near(actual[0].float(), expected[0], TOLERANCE[dtype])
        assert_near(actual[1], expected[1], 1e-5)
    assert (actual[1][1, :, 2] == -INF).all() and (actual[0][1, :, 2] == 0).all()


def test_a_weight_that_vanishes_adds_nothing_to_the_offset():
    keys = torch.tensor([[0.0], [200.0]]).expand(1, 1, 1, 2, 1).contiguous()
    anchors, offsets = by_triton(ops.tangent_anchors, keys, torch.ones(1, 1, 1, 1))
    assert anchors.item() == 200 and offsets.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 20), (70, 3)])
def test_rounding_to_int8_to_the_bit(dtype, shape):
    vectors = torch.randn(*shape, dtype=dtype)
    vectors[0] = 0
    vectors.view(-1)[-3:] = torch.tensor([0.25, 0.75, 63.5])  # ties, with a scale of 0.5
    expected = by_definition(ops.quantize_int8, vectors)
    assert expected[0].view(-1)[-3:].tolist() == [0, 2, 127]
    for one, other in zip(by_triton(ops.quantize_int8, vectors), expected, strict=True):
        assert torch.equal(one, other)


def unpacked(bits, dim):
    planes = bits.unflatten(-1, (-1, -(-dim // 8))).unsqueeze(-1) >> torch.arange(8) & 1
    assert not planes.flatten(-2)[..., dim:].any()
    return planes.flatten(-2)[..., :dim].bool()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_bits", [1, 2])
@pytest.mark.parametrize("shape", [{}, {"size": 24, "dim": 20}, {"size": 5, "dim": 136}])
def test_sketches(dtype, n_bits, shape):
    """Bits may differ only where a channel is within rounding of a threshold."""
    keys, _ = blocks_of_keys(dtype, **shape)
    centres = torch.randn(2, 3, keys.shape[2], keys.shape[-1])
    for args in ((keys, n_bits, centres), ((keys.float() - centres.unsqueeze(3)), n_bits)):
        expected, actual = (
            by_definition(ops.sketch_tokens, *args),
            by_triton(ops.sketch_tokens, *args),
        )
        torch.testing.assert_close(actual[1], expected[1], rtol=2e-3, atol=0)
        dim = keys.shape[-1]
        rotated = (keys.float() - centres.unsqueeze(3)) @ sketch_rotation(dim, keys.device)
        root = rotated.square().mean(-1, keepdim=True).sqrt()
        differs = (unpacked(actual[0], dim) != unpacked(expected[0], dim)).any(-2)
        near = (rotated.abs() < CHANNEL * root) | ((rotated.abs() - root).abs() < CHANNEL * root)
        assert actual[0].shape == expected[0].shape and not (differs & ~near).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [16, 12, 0])
@pytest.mark.parametrize("layout", ops.ROTARY_LAYOUTS)
def test_rotation_into_place_to_the_bit(dtype, layout, channels):
    """As the models round, also with tables that are wider than the states, or strided."""
    x = padded_view(torch.randn(2, 3, 7, 16, dtype=dtype), 2)
    for table_dtype in {dtype, torch.float32}:
        angles = torch.randn(1, 20, channels // 2)
        if layout.table == "halves":
            angles = torch.cat((angles, angles), -1)
        elif layout.table == "repeated":
            angles = angles.repeat_interleave(2, -1)
        tables = torch.polar(torch.ones_like(angles), angles)
        tables = (tables.real, tables.imag)  # every other number, as models with complex ones do
        cos, sin = (t.to(table_dtype) if table_dtype != torch.float32 else t for t in tables)
        expected, actual = (torch.full((2, 3, 20, 16), NAN, dtype=dtype) for _ in range(2))
        by_definition(ops.rotate_into, expected, x, cos, sin, 5, *layout)
        assert by_triton(ops.rotate_into, actual, x, cos, sin, 5, *layout) is None
        exact = dtype != torch.bfloat16 or DEVICE.type != "cpu"
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-2, "atol": 4e-2}
        torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (1, 20), (5, 1000)])
def test_replaced_tokens_and_how_far_apart_they_were(dtype, heads, dim):
    states = padded_view(torch.randn(2, heads, 9, dim, dtype=dtype), 2)
    fresh = torch.randn(2, 4, heads, dim, dtype=dtype).transpose(1, 2)
    rows = torch.tensor([0, 3, 4, 8])
    held = [states.clone(), states.clone()]
    expected = by_definition(ops.replace_tokens, held[0], fresh, rows)
    assert_near(by_triton(ops.replace_tokens, held[1], fresh, rows), expected, 1e-6)
    assert torch.equal(*held) and not torch.equal(held[0], states)


def rows_case(dtype, rows=9, length=70, h_kv=2, group=3, dim=16, value_dim=16, batch=1, last=False):
    """Queries, keys and values strided as models hand them over, and ascending positions, random
    ones or the last ones."""
    query = torch.randn(batch, rows, h_kv * group, dim, dtype=dtype).transpose(1, 2)
    keys = padded_view(torch.randn(batch, h_kv, length, dim, dtype=dtype), 2)
    values = padded_view(torch.randn(batch, h_kv, length, value_dim, dtype=dtype), 2)
    every = torch.arange(length) if last else torch.randperm(length)
    positions = every[-rows:].sort().values
    return query, keys, values, positions


def half_of(n_rows, length, positions):
    """A random half of the keys for each row, and one for all."""
    return (torch.rand(1, 1, n_rows, length) < 0.5).index_fill(3, positions[:1], True)


# What rows see, made from the number of rows, of keys, and the positions.
LIMITS = {
    "all": lambda r, n, p: {},
    "causal": lambda r, n, p: {"positions": p},
    "window": lambda r, n, p: {"positions": p, "window": 23},
    "wide window": lambda r, n, p: {"positions": p, "window": 90},
    "narrow window": lambda r, n, p: {"positions": p, "window": 1},
    "visible": lambda r, n, p: {
        "positions": p,
        "window": 40,
        "visible": (torch.arange(n) % 3 > 0).index_fill(0, p, True),
    },
    "boolean": lambda r, n, p: {
        "mask": ((torch.rand(1, 1, r, n) < 0.5).index_fill(3, p[:1], True))
    },
    "additive": lambda r, n, p: {"mask": torch.randn(1, 1, r, n), "positions": p},
    "lowest": lambda r, n, p: {
        "mask": torch.where(half_of(r, n, p), 0.0, torch.finfo(torch.float32).min)
    },
    "softcap": lambda r, n, p: {"positions": p, "softcap": 0.7},
    "sinks": lambda r, n, p: {"positions": p, "sinks": torch.linspace(-1, 2, 6)},
}
SHAPES = [
    {},
    {"rows": 40, "length": 130, "dim": 20, "value_dim": 8},  # several tiles of rows and of keys
    {"rows": 3, "length": 1100, "h_kv": 1, "group": 6},  # keys cut into spans
    {"rows": 20, "length": 200, "last": True},  # tiles that all rows see
]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_rows(limit, shape):
    query, keys, values, positions = rows_case(torch.float32, **shape)
    limits = LIMITS[limit](query.shape[2], keys.shape[2], positions)
    expected = by_definition(ops.attend_rows, query, keys, values, **limits)
    actual = by_triton(ops.attend_rows, query, keys, values, **limits)
    assert_near(actual, expected, FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", ["causal", "additive"])
def test_attention_of_rows_in_every_dtype(dtype, limit):
    query, keys, values, positions = rows_case(dtype, batch=2, rows=11)
    limits = LIMITS[limit](11, keys.shape[2], positions)
    expected = by_definition(
        ops.attend_rows, *as_fp32((query, keys, values)), scaling=0.4, **limits
    )
    actual = by_triton(ops.attend_rows, query, keys, values, scaling=0.4, **limits)
    assert actual.dtype == dtype
    assert_near(actual.float(), expected, TOLERANCE[dtype])


def test_a_row_that_sees_nothing_gives_nothing():
    for shape in SHAPES[:3:2]:
        query, keys, values, _ = rows_case(torch.float32, **shape)
        mask = torch.ones(1, 1, query.shape[2], keys.shape[2], dtype=torch.bool)
        mask[:, :, 1] = False
        output = by_triton(ops.attend_rows, query, keys, values, mask)
        assert (output[:, :, 1] == 0).all() and (output[:, :, 0] != 0).all()
        received = by_triton(ops.attention_received, query, keys, 0.3, mask)
        rest = torch.arange(query.shape[2]) != 1
        expected = by_definition(ops.attention_received, query[:, :, rest], keys, 0.3)
        assert_near(received, expected, FP32)


@pytest.mark.parametrize("limit", [name for name in LIMITS if name != "sinks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_that_keys_receive(limit, shape):
    query, keys, _, positions = rows_case(torch.float32, **shape)
    limits = LIMITS[limit](query.shape[2], keys.shape[2], positions)
    expected = by_definition(ops.attention_received, query, keys, 0.4, **limits)
    assert_near(by_triton(ops.attention_received, query, keys, 0.4, **limits), expected, FP32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_that_keys_receive_in_every_dtype(dtype):
    query, keys, _, positions = rows_case(dtype)
    expected = by_definition(ops.attention_received, query.float(), keys.float(), 0.4, None, 3.0)
    assert_near(by_triton(ops.attention_received, query, keys, 0.4, None, 3.0), expected, FP32)


def test_calls_that_triton_cannot_take_say_why():
    query, keys, values, positions = rows_case(torch.float32)
    blocks, _ = blocks_of_keys(torch.float32)
    table = torch.ones(1, 70, 16)
    rows = torch.arange(9)
    place = (keys, keys[:, :, :9], table, table, 3, "half", "halves")
    refused = [
        (ops.attend_rows, (query, keys.double(), values), "float64"),
        (ops.attend_rows, (query, keys, values.transpose(2, 3)), "dense"),
        (ops.attend_rows, (query.repeat(1, 1, 1, 16), keys.repeat(1, 1, 1, 16), values), "fit"),
        (ops.attend_rows, (query, keys, values, torch.ones(1, 6, 9, 70)), "one for all heads"),
        (ops.attend_rows, (query, keys, values, None, None, None, 4), "without positions"),
        (ops.attention_received, (query.repeat(2, 1, 1, 1), keys, 0.3), "a batch of 2"),
        (ops.tangent_anchors, (blocks.repeat(1, 1, 1, 40, 8),), "do not fit into registers"),
        (ops.tangent_anchors, (blocks.transpose(3, 4),), "dense"),
        (ops.sketch_tokens, (blocks.repeat(1, 1, 1, 1, 17),), "272 channels"),
        (ops.quantize_int8, (blocks.double(),), "float64"),
        (ops.rotate_into, (*place[:4], 62, "half", "halves"), "outside"),
        (ops.rotate_into, (place[0].half(), *place[1:]), "float16"),
        (ops.replace_tokens, (keys, keys[:, :, :9].half(), rows), "float16"),
    ]
    with use_implementation("triton"):
        for operation, args, message in refused:
            assert message in operation.explain(*args)["triton"], operation.__name__
        with pytest.raises(NotImplementedError, match="attend_rows: triton cannot run: a window"):
            ops.attend_rows(query, keys, values, window=4)
    with pytest.raises(ValueError, match="window=4 needs the positions"):
        ops.attend_rows(query, keys, values, window=4)
    if DEVICE.type == "cpu":
        assert ops.attend_rows.explain(query, keys, values) == {"triton": "tensors on the CPU"}
