"""The operations that the caches call. Each runs the fastest implementation that can run here;
so far that is always the plain PyTorch one, which stays the specification."""

from .reference import (
    ROTARY_LAYOUTS,
    RotaryLayout,
    attend_rows,
    attention_mass,
    attention_received,
    block_radii,
    build_anchors,
    gather_tokens,
    log_mass,
    quantize_int8,
    rotate,
    score_anchors,
    token_deviation,
)
from .reference_sketch import score_sketches, sketch_tokens

__all__ = [
    "ROTARY_LAYOUTS",
    "RotaryLayout",
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
]
