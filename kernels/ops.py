"""The operations that the caches call. Each runs the fastest implementation that can take the call
(:mod:`dispatch`); the plain PyTorch one in ``reference*.py`` is the specification."""

from . import (
    native_attention,
    native_choice,
    native_scores,
    reference,
    reference_attention,
    reference_choice,
    reference_sketch,
)
from .dispatch import Operation, use_implementation
from .lazy_triton import triton_kernel
from .reference import (
    ROTARY_LAYOUTS,
    RotaryLayout,
    block_radii,
    build_anchors,
    gather_tokens,
    perspective_logits,
    rotate,
    tangent_weights,
    token_deviation,
    uniform_weights,
)
from .reference_attention import attention_mass, log_mass
from .reference_choice import group_shares, mass_with_refined, pieces_of

_triton_sketch_scores = triton_kernel("triton_sketch_scores")

score_anchors = Operation(
    reference.score_anchors, triton_kernel("triton_anchor_scores"), native_scores.score_anchors
)
score_sketches = Operation(
    reference_sketch.score_sketches,
    _triton_sketch_scores,
    native_scores.score_sketches,
    fake=reference_sketch.empty_sketch_scores,
)
choose_pieces = Operation(
    reference_choice.choose_pieces,
    reference_choice.choosing_by(_triton_sketch_scores),
    native_choice.choose_pieces,
    fake=reference_choice.no_pieces,
)
largest = Operation(reference_choice.largest, native_choice.largest)
attend_blocks = Operation(
    reference_attention.attend_blocks,
    triton_kernel("triton_attend_blocks"),
    native_attention.attend_blocks,
)
attend_rows = Operation(reference_attention.attend_rows, triton_kernel("triton_attend_rows"))
attention_received = Operation(
    reference_attention.attention_received, triton_kernel("triton_attention_received")
)
tangent_anchors = Operation(reference.tangent_anchors, triton_kernel("triton_build_anchors"))
quantize_int8 = Operation(reference.quantize_int8, triton_kernel("triton_quantize"))
sketch_tokens = Operation(
    reference_sketch.sketch_tokens,
    triton_kernel("triton_sketch_tokens"),
    fake=reference_sketch.empty_sketches,
)
rotate_into = Operation(reference.rotate_into, triton_kernel("triton_rotate"), mutates=("out",))
replace_tokens = Operation(
    reference.replace_tokens, triton_kernel("triton_replace_tokens"), mutates=("states",)
)

__all__ = [
    "ROTARY_LAYOUTS",
    "Operation",
    "RotaryLayout",
    "attend_blocks",
    "attend_rows",
    "attention_mass",
    "attention_received",
    "block_radii",
    "build_anchors",
    "choose_pieces",
    "gather_tokens",
    "group_shares",
    "largest",
    "log_mass",
    "mass_with_refined",
    "perspective_logits",
    "pieces_of",
    "quantize_int8",
    "replace_tokens",
    "rotate",
    "rotate_into",
    "score_anchors",
    "score_sketches",
    "sketch_tokens",
    "tangent_anchors",
    "tangent_weights",
    "token_deviation",
    "uniform_weights",
    "use_implementation",
]
