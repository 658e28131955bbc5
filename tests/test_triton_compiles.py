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
from anchor_cache.kernels import triton_anchor_scores, triton_attend_blocks, triton_sketch_scores

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
query, keys = torch.empty(1, 32, 128, dtype=dtype), torch.empty(1, 8, 4096, 128, dtype=dtype)
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
for name, kernel in compiled.items():
    products = kernel.asm["ptx"].count("mma.sync") + kernel.asm["ptx"].count("wgmma")
    print(name, kernel.metadata.shared, products)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_compile_for_a_gpu(dtype, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("DTYPE", dtype)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == 4
    for name, shared, products in lines:
        assert int(shared) <= 99 * 2**10, f"{name}: too much shared memory for two on an A100 or L4"
        uses_tensor_cores = "sketch" in name or dtype == "bfloat16" and "merge" not in name
        assert (int(products) > 0) == uses_tensor_cores, name
