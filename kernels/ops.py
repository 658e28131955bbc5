"""The operations that the caches call. Each runs the fastest implementation that can run here;
so far that is always the plain PyTorch one, which stays the specification."""

from .reference import (
    ROTARY_LAYOUTS,
    RotaryLayout,
    attention_mass,
    attention_received,
    build_anchors,
    gather_tokens,
    rotate,
    score_anchors,
    score_sketches,
    sketch_tokens,
    token_deviation,
)

__all__ = [
    "ROTARY_LAYOUTS",
    "RotaryLayout",
    "attention_mass",
    "attention_received",
    "build_anchors",
    "gather_tokens",
    "rotate",
    "score_anchors",
    "score_sketches",
    "sketch_tokens",
    "token_deviation",
]
