"""Triton's kernels as a GPU would get them, compiled for one that need not be there: the
interpreter takes much that the compiler does not."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0

compiled = {}

def compile_only(kernel, grid):
    def launch(*args, **kwargs):
        compiled[kernel.fn.__name__] = kernel.run(*args, grid=grid, warmup=True, **kwargs)
    return launch

triton.runtime.driver.set_active(Hopper())
JITFunction.__getitem__ = compile_only
dtype = getattr(torch, "DTYPE")
keys = torch.empty(1, 8, 4096, 128, dtype=dtype)
CALLS
for name, kernel in compiled.items():
    products = kernel.asm["ptx"].count("mma.sync") + kernel.asm["ptx"].count("wgmma")
    print(name, kernel.metadata.shared, products)
"""

DECODING = """
from anchor_cache.kernels import triton_anchor_scores, triton_attend_blocks, triton_sketch_scores

query = torch.empty(1, 32, 128, dtype=dtype)
offsets, blocks = torch.empty(1, 8, 256, 3), torch.zeros(1, 8, 64, dtype=torch.int64)
anchors = torch.empty(1, 8, 256, 3, 128, dtype=torch.int8)
triton_anchor_scores.run(query, anchors, offsets, offsets, 30.0)
bits, scales = torch.empty(1, 8, 256, 16 * 32, dtype=torch.uint8), torch.empty(1, 8, 256, 16)
centres = torch.empty(1, 8, 4, 64)
triton_sketch_scores.run(query, bits, scales.half(), centres, blocks, 2, True, 30.0)
triton_attend_blocks.run(
    query, keys, keys, blocks, 2, 0.1, torch.zeros(1, dtype=torch.int64),
    torch.ones(1, 4096, dtype=torch.bool), torch.tensor(4000), 1024, 30.0, torch.empty(32),
)
"""

BLENDING = """
from anchor_cache.kernels import (
    triton_attend_rows, triton_attention_received, triton_build_anchors, triton_quantize,
    triton_replace_tokens, triton_rotate, triton_sketch_tokens,
)

query, rows = torch.empty(1, 32, 600, 128, dtype=dtype), torch.arange(600)
blocks, centres = keys.unflatten(2, (256, 16)), torch.empty(1, 8, 256, 128)
triton_attention_received.run(query, keys, 0.1, None, 30.0, rows)
triton_attend_rows.run(
    query, keys, keys, None, None, rows, 100, torch.ones(4096, dtype=torch.bool), 30.0,
    torch.empty(32),
)
triton_attend_rows.run(query, keys, keys, torch.empty(1, 1, 600, 4096, dtype=dtype))
triton_attend_rows.run(query, keys, keys, None, None, rows, 100)
triton_build_anchors.run(blocks, None, torch.ones(1, 1, 256, 16, dtype=torch.bool))
triton_build_anchors.run(blocks, centres[:, :, :4])
triton_quantize.run(keys)
triton_sketch_tokens.run(blocks, 2, centres)
table = torch.empty(1, 4096, 96, dtype=dtype)
for pairing in ("half", "interleaved"):
    triton_rotate.run(keys, query[:, :8], table, table, 5, pairing, "repeated")
triton_replace_tokens.run(keys, query[:, :8], rows)
"""


# The dtypes in which a kernel uses tensor cores.
BOTH, HALF, NEVER = ("bfloat16", "float32"), ("bfloat16",), ()
KERNELS = {
    DECODING: {
        "_score_anchors_kernel": HALF,
        "_score_sketches_kernel": BOTH,
        "_attend_split_kernel": HALF,
        "_merge_splits_kernel": NEVER,
    },
    BLENDING: {
        "_attend": BOTH,
        "_receive": BOTH,
        "_sketch": BOTH,
        **dict.fromkeys(("_summarise", "_quantize", "_rotate", "_replace"), NEVER),
    },
}


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("calls", KERNELS, ids=["decoding", "blending"])
def test_kernels_compile_for_a_gpu(calls, dtype, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("CALLS", calls).replace("DTYPE", dtype)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert {name for name, _, _ in lines} == set(KERNELS[calls])
    for name, shared, products in lines:
        assert int(shared) <= 99 * 2**10, f"{name}: too much shared memory for two on an A100 or L4"
        assert (int(products) > 0) == (dtype in KERNELS[calls][name]), name
