"""The operations that the caches call. Each runs the fastest implementation that can take the call
(:mod:`dispatch`); the plain PyTorch one in ``reference*.py`` is the specification."""

from . import native_attention, native_scores, reference, reference_attention, reference_sketch
from .dispatch import Operation, use_implementation
from .reference import (
    ROTARY_LAYOUTS,
    RotaryLayout,
    block_radii,
    build_anchors,
    gather_tokens,
    quantize_int8,
    rotate,
    token_deviation,
)
from .reference_attention import attend_rows, attention_mass, attention_received, log_mass
from .reference_sketch import sketch_tokens

score_anchors = Operation(reference.score_anchors, native_scores.score_anchors)
score_sketches = Operation(
    reference_sketch.score_sketches,
    native_scores.score_sketches,
    fake=reference_sketch.empty_sketch_scores,
)
top_pieces = Operation(reference.top_pieces, native_scores.top_pieces)
attend_blocks = Operation(reference_attention.attend_blocks, native_attention.attend_blocks)

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
    "gather_tokens",
    "log_mass",
    "quantize_int8",
    "rotate",
    "score_anchors",
    "score_sketches",
    "sketch_tokens",
    "token_deviation",
    "top_pieces",
    "use_implementation",
]
