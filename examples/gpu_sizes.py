"""How large the checks of gpu_check.py are, on a GPU and in a rehearsal on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from benchmark_states import LLAMA_8B, Shape
from benchmark_timing import Pace


class Sizes(NamedTuple):
    """Lengths in tokens; what matters most comes first, in case the time runs out."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    copied_bytes: int = 1 << 32
    budget: int = 2048
    shape: Shape = LLAMA_8B
    attention: tuple[tuple[int, int], ...] = (  # rows, keys
        (8, 131072),
        (1, 131072),
        (8, 32768),
        (1, 32768),
        (8, 8192),
        (1, 8192),
    )
    decoding: tuple[int, ...] = (131072, 32768, 8192)
    slice_fields: dict = {}  # of the slice's configuration
    blending: tuple[int, ...] = (8192, 16384)
    chunk: int = 512
    measuring: float = 5.0  # seconds that a measurement of attention is expected to take at most
    rounds: int = 51
    step: Pace = Pace(rounds=21, warm_up=3, seconds=3)
    prompt: Pace = Pace(rounds=5, warm_up=1, seconds=5)
    compiled: dict = {"mode": "reduce-overhead"}  # arguments of torch.compile
    compiling: float = 35.0  # seconds that compiling the slice is expected to take at most
    graph_context: int = 8192
    graph_steps: int = 200


GPU = Sizes()
REHEARSAL = Sizes(
    device="cpu",
    dtype=torch.float32,
    copied_bytes=1 << 24,
    budget=448,
    shape=Shape(8, 2, 64),
    attention=((2, 1024), (1, 768)),
    decoding=(1024,),
    slice_fields=dict(
        layers=2,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=128,
    ),
    blending=(128,),
    chunk=32,
    measuring=0.0,
    rounds=3,
    step=Pace(rounds=3, warm_up=1, seconds=1),
    prompt=Pace(rounds=2, warm_up=0, seconds=1),
    compiled={"backend": "eager"},
    compiling=0.0,
    graph_context=640,
    graph_steps=20,
)
