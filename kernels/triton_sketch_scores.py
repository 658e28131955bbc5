"""Scores of sketches in Triton: bits are unpacked in registers, right where they are multiplied."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .reference_sketch import sketch_rotation
from .triton_dtypes import FLOATS
from .triton_softcap import softcapped

_LARGEST_HEAD = 512
_LARGEST_GROUP = 128
_LARGEST_PIECE = 256
_MOST_ROWS = 65535  # of a grid, beyond its first axis
# Of a program of 4 warps: a thread then holds the bits of two tokens, two loads of 16 bytes.
_TOKENS = 256


# What changes with the length of the context, and would be compiled for anew without any gain.
@triton.jit(
    do_not_specialize=["n_slots", "centres_b", "centres_h", "centres_g", "slots_b", "slots_h"]
)
def _score_sketches_kernel(
    rotated,
    bits,
    scales,
    centres,
    slots,
    scores,
    n_slots,
    parts,
    piece,
    n_heads,
    heads_per_kv,
    group,
    bits_b,
    bits_h,
    bits_n,
    scales_b,
    scales_h,
    scales_n,
    scales_t,
    centres_b,
    centres_h,
    centres_g,
    centres_n,
    slots_b,
    slots_h,
    slots_n,
    softcap,
    N_BITS: tl.constexpr,
    BYTES: tl.constexpr,
    BYTES_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_PADDED: tl.constexpr,
    HAS_PADDING: tl.constexpr,
):
    row = tl.program_id(1)
    batch, head = (row // n_heads).to(tl.int64), row % n_heads
    head_kv, head = (head // heads_per_kv).to(tl.int64), head.to(tl.int64)
    row = row.to(tl.int64)
    first = tl.program_id(0) * PIECES

    # Token by token: its block, its place there, and whether it is one.
    token = tl.arange(0, PIECES * PIECE_PADDED)
    own_piece, place = first + token // PIECE_PADDED, token % PIECE_PADDED
    own_slot = own_piece // parts
    exists = (own_slot < n_slots) & (place < piece)
    place += own_piece % parts * piece
    if slots is not None:
        slots += batch * slots_b + head * slots_h
        block = tl.load(slots + own_slot * slots_n, mask=exists, other=0).to(tl.int64)
    else:
        block = own_slot.to(tl.int64)
    scales += batch * scales_b + head_kv * scales_h
    scale = tl.load(scales + block * scales_n + place * scales_t, mask=exists, other=0.0)
    scale = scale.to(tl.float32)

    byte = tl.arange(0, BYTES_PADDED)
    bits += batch * bits_b + head_kv * bits_h
    tile = bits + (block * bits_n + place * (N_BITS * BYTES))[:, None] + byte[None, :]
    tile_mask = exists[:, None] & (byte < BYTES)[None, :]
    signs = tl.load(tile, mask=tile_mask, other=0).to(tl.int16)
    if N_BITS == 2:
        others = tl.load(tile + BYTES, mask=tile_mask, other=0).to(tl.int16)

    piece_number = first + tl.arange(0, PIECES)
    member = tl.arange(0, GROUP_PADDED)
    in_group = (member < group)[None, :]
    stored = in_group & (piece_number < n_slots * parts)[:, None]
    centres += batch * centres_b + head * centres_h
    centre = tl.load(
        centres + (piece_number // parts)[:, None] * centres_n + member[None, :] * centres_g,
        mask=stored,
        other=0.0,
    )

    # The query as the sum of two numbers in fp16, 22 bits together, scaled to fit the range: as
    # near as fp32. One would be off by some 1e-4 of a logit, in tf32 too, and the second product
    # costs a twentieth of the instructions.
    rotated += (row * group + member)[None, :] * (8 * BYTES_PADDED)
    channel = tl.arange(0, 8 * BYTES_PADDED)
    largest = tl.max(tl.abs(tl.load(rotated + channel[:, None], mask=in_group, other=0.0)), 0)
    largest = tl.maximum(largest, 1e-30)
    inverse = 1.0 / largest

    # One product per bit of a byte: channels are summed in any order, so that nothing is moved.
    logits = tl.zeros((PIECES * PIECE_PADDED, GROUP_PADDED), tl.float32)
    for bit in tl.static_range(8):
        own = tl.load(rotated + (bit * BYTES_PADDED + byte)[:, None], mask=in_group, other=0.0)
        own *= inverse[None, :]
        upper = own.to(tl.float16)
        rest = (own - upper.to(tl.float32)).to(tl.float16)
        # Signs as numbers in fp16, of which the bit becomes the sign: 0x3C00 and 0xBC00 are 1 and
        # -1, 0x4000 and 0xC000 are 2 and -2. To convert integers would take three times as many
        # instructions, and they are what this kernel waits for.
        if N_BITS == 1:
            level = (((signs << (15 - bit)) & -0x8000) ^ -0x4400).to(tl.float16, bitcast=True)
        else:
            level = (((signs << (15 - bit)) & -0x8000) ^ -0x4000).to(tl.float16, bitcast=True)
            lower = ((others << (15 - bit)) & -0x8000) ^ -0x4400
            level += lower.to(tl.float16, bitcast=True)
        logits = tl.dot(level, rest, logits)
        logits = tl.dot(level, upper, logits)

    logits *= largest[None, :] * scale[:, None]
    if HAS_PADDING:
        exists = exists & (scale == scale)
    logits = tl.reshape(logits, (PIECES, PIECE_PADDED, GROUP_PADDED))
    logits += centre[:, None, :].to(tl.float32)
    exists = tl.reshape(exists, (PIECES, PIECE_PADDED, 1))
    logits = tl.where(exists, softcapped(logits, softcap), float("-inf"))
    top = tl.max(logits, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.sum(tl.exp(logits - top[:, None, :]), 1)
    places = (row * group + member)[None, :] * (n_slots * parts) + piece_number[:, None]
    tl.store(scores + places, tl.log(sums) + top, mask=stored)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _rotation_by_bit(dim: int, n_bytes: int, device: torch.device) -> torch.Tensor:
    """The rotation of sketches, channels in the order of their bits and then of their bytes:
    ``[dim, 8 n_bytes]``, with zeros for bytes and bits that do not exist."""
    padded = torch.nn.functional.pad(sketch_rotation(dim, device), (0, 8 * n_bytes - dim))
    return padded.unflatten(1, (n_bytes, 8)).transpose(1, 2).flatten(1).contiguous()


def _width(query, bits, scales) -> tuple[int, int, int]:
    """Bytes of a token's sketch, those of one of its planes, and how many planes there are."""
    width, per_plane = bits.shape[3] // scales.shape[3], -(-query.shape[-1] // 8)
    return width, per_plane, width // per_plane


def why_not(
    query, bits, scales, centres, slots=None, piece=None, padded=False, softcap=None
) -> str | None:
    b, heads, group, n_slots = centres.shape
    if query.dtype not in FLOATS or scales.dtype not in FLOATS or centres.dtype not in FLOATS:
        return f"a query in {query.dtype}, scales in {scales.dtype}, centres in {centres.dtype}"
    if _width(query, bits, scales)[2] not in (1, 2):
        return "sketches of more than two bits per channel"
    if bits.stride(-1) != 1:
        return "bits that do not lie side by side"
    if query.shape[-1] > _LARGEST_HEAD:
        return f"heads of {query.shape[-1]} channels, more than {_LARGEST_HEAD}"
    if group > _LARGEST_GROUP:
        return f"more than {_LARGEST_GROUP} query heads that share a choice"
    if (scales.shape[3] if piece is None else piece) > _LARGEST_PIECE:
        return f"pieces of more than {_LARGEST_PIECE} tokens"
    if b * heads > _MOST_ROWS:
        return f"more than {_MOST_ROWS} rows and heads"
    return None


def run(query, bits, scales, centres, slots=None, piece=None, padded=False, softcap=None):
    b, heads, group, n_slots = centres.shape
    size = scales.shape[3]
    piece = size if piece is None else piece
    _, n_bytes, n_bits = _width(query, bits, scales)
    bytes_padded = max(triton.next_power_of_2(n_bytes), 16)
    piece_padded = triton.next_power_of_2(piece)
    pieces = _TOKENS // piece_padded
    parts = size // piece
    shape = (b, heads, group, parts * n_slots)
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    rotation = _rotation_by_bit(query.shape[-1], bytes_padded, query.device)
    _score_sketches_kernel[(triton.cdiv(shape[3], pieces), b * heads)](
        query.float() @ rotation,
        bits,
        scales,
        centres,
        slots,
        scores,
        n_slots,
        parts,
        piece,
        heads,
        heads // bits.shape[1],
        group,
        *bits.stride()[:3],
        *scales.stride(),
        *centres.stride(),
        *((0, 0, 0) if slots is None else slots.stride()),
        None if softcap is None else float(softcap),
        N_BITS=n_bits,
        BYTES=n_bytes,
        BYTES_PADDED=bytes_padded,
        GROUP_PADDED=max(triton.next_power_of_2(group), 8),
        PIECES=pieces,
        PIECE_PADDED=piece_padded,
        HAS_PADDING=padded,
        num_warps=4,
    )
    return scores
