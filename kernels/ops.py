"""The operations that the caches call. Each runs the fastest implementation that can take the call
(:mod:`dispatch`); the plain PyTorch one in ``reference*.py`` is the specification."""

from . import reference, reference_attention, reference_sketch
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

score_anchors = Operation(reference.score_anchors)
score_sketches = Operation(
    reference_sketch.score_sketches, fake=reference_sketch.empty_sketch_scores
)
attend_blocks = Operation(reference_attention.attend_blocks)
summarise_blocks = Operation(reference.summarise_blocks, triton_kernel("triton_build_anchors"))
quantize_int8 = Operation(reference.quantize_int8, triton_kernel("triton_quantize"))
sketch_tokens = Operation(reference_sketch.sketch_tokens, triton_kernel("triton_sketch_tokens"))
rotate_into = Operation(reference.rotate_into, triton_kernel("triton_rotate"), mutates=("out",))
replace_tokens = Operation(
    reference.replace_tokens, triton_kernel("triton_replace_tokens"), mutates=("states",)
)
attend_rows = Operation(reference_attention.attend_rows, triton_kernel("triton_attend_rows"))
attention_received = Operation(
    reference_attention.attention_received, triton_kernel("triton_attention_received")
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
    "gather_tokens",
    "log_mass",
    "perspective_logits",
    "quantize_int8",
    "replace_tokens",
    "rotate",
    "rotate_into",
    "score_anchors",
    "score_sketches",
    "sketch_tokens",
    "summarise_blocks",
    "tangent_weights",
    "token_deviation",
    "uniform_weights",
    "use_implementation",
]
