"""The stages of gpu_check.py: each gives its figures, and lines that sum them up.

python examples/gpu_stages.py attention --output attention.json
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from anchor_cache.kernels import ops
from benchmark_attention import measure_attention
from benchmark_decode import decode, fill, measure_decode
from benchmark_machine import commit, copy_bandwidth, machine, versions
from benchmark_slice import slice_config, slice_model
from benchmark_states import LLAMA_8B, Shape
from benchmark_timing import Pace, alternate, require_close, require_that, spread
from transformers import DynamicCache

from anchor_cache import AnchorStaticCache, BlendConfig, BlendedCache, ChunkStore

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)


class Sizes:
    """What a stage measures: all of it on a GPU, or as much as a rehearsal needs."""

    def __init__(self, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.shape = Shape(4, 2, 16) if rehearse else LLAMA_8B
        self.lengths = [512, 1024] if rehearse else [8192, 32768, 131072]
        self.budget = 128 if rehearse else 2048
        self.pace = Pace(2, 1, 5) if rehearse else Pace(20, 3, 6)
        # Short contexts are read densely by default, and budgets that are a large share.
        self.select = dict(dense_below=0, dense_above=1.0, sink_size=16, window_size=32)
        self.select = self.select if rehearse else {}

    def copied(self) -> float:
        return copy_bandwidth(self.device, 1 << (24 if self.rehearse else 30))

    def model(self):
        config = slice_config(2, head_dim=16, **SMALL) if self.rehearse else slice_config()
        return slice_model(config, self.dtype, self.device)


def check_machine(sizes: Sizes) -> dict:
    require_that(sizes.rehearse or torch.cuda.is_available(), "torch finds no CUDA device")
    about, moved = (
        machine(sizes.device),
        copy_bandwidth(sizes.device, 1 << (24 if sizes.rehearse else 32)),
    )
    name = about["accelerator"] or about["processor"]
    lines = [f"{name}, {moved / 1e9:,.0f} GB/s copied", f"{versions()}"]
    return dict(machine=about, versions=versions(), commit=commit(), copied=moved, lines=lines)


def check_kernels(sizes: Sizes) -> dict:
    """All tests of Triton kernels, on the device if there is one."""
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_triton_*.py"))]
    files = [path for path in files if "compiles" not in path]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rf", *files]
    command += ["-k", "anchor_scores or score_anchors"] if sizes.rehearse else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    text = done.stdout.strip().splitlines()
    failed = [line for line in text if line.startswith(("FAILED", "ERROR"))]
    counted = [line for line in text if re.search(r"\d+ (passed|failed|error)", line)]
    require_that(done.returncode == 0, "\n".join([*failed[:40], *counted, done.stderr[-500:]]))
    return dict(failed=failed, lines=counted[-1:])


def check_attention(sizes: Sizes) -> dict:
    """A layer's whole step through the caches, each result checked before it is timed."""
    bandwidth = sizes.copied()
    results, lines = [], []
    ours = {
        "AnchorDynamicCache": dict(sizes.select),
        "always selecting": dict(sizes.select, dense_below=0, dense_above=1.0),
    }
    for length in sizes.lengths:
        made = length, sizes.dtype, sizes.device, sizes.budget, sizes.shape, sizes.pace
        result = measure_attention(*made, bandwidth, ours)
        results.append(result)
        cells = (f"{n} {r['median'] * 1e6:,.0f} us" for n, r in result["contestants"].items())
        lines.append(f"{length:,}: " + ", ".join(cells))
    return dict(results=results, lines=lines)


def operations_step(sizes: Sizes, batch: int, length: int) -> dict:
    """Scoring, choosing and attending alone, in a CUDA graph, beside torch's attention."""
    heads, kv_heads, dim = sizes.shape
    make = dict(device=sizes.device, dtype=sizes.dtype)
    keys, values = (torch.randn((batch, kv_heads, length, dim), **make) for _ in range(2))
    query = torch.randn((batch, heads, dim), **make)
    n_blocks, scaling, wanted = length // 16, dim**-0.5, sizes.budget // 2
    blocks = keys.unflatten(2, (n_blocks, 16))
    anchors, scales = ops.quantize_int8(blocks.mean(3, keepdim=True))
    offsets = torch.full(scales.shape, 16.0, device=keys.device).log()
    centres = (anchors * scales.unsqueeze(-1)).squeeze(3)
    bits, sketch_scales = ops.sketch_tokens(blocks, 1, centres)
    bits, sketch_scales = bits.flatten(3), sketch_scales.squeeze(-1)
    proposals = min(wanted, n_blocks)

    def ours() -> torch.Tensor:
        scores, logits = ops.score_anchors(query * scaling, anchors, offsets, scales)
        pieces = ops.choose_pieces(
            query * scaling, scores, logits, bits, sketch_scales, proposals, wanted, 2
        )
        return ops.attend_blocks(query, keys, values, pieces, 2, scaling)[0]

    def dense() -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query.unsqueeze(2), keys, values, enable_gqa=True)[:, :, 0]

    def packed() -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query.view(batch, kv_heads, -1, dim), keys, values).view_as(query)

    every = torch.arange(n_blocks, device=keys.device).expand(batch, kv_heads, -1)
    whole = ops.attend_blocks(query, keys, values, every, 16, scaling)[0]
    limit = 1e-4 if sizes.dtype == torch.float32 else 2e-2
    require_close("attend_blocks over everything", whole, dense(), limit)
    require_close("packed attention", packed(), dense(), limit)
    with ops.use_implementation("reference"):
        expected = ours()
    # Near ties may be chosen otherwise: outputs then differ by little, not by rounding alone.
    off = require_close("selected attention", ours(), expected, 10 * limit)
    steps = {"ours": ours, "sdpa": dense, "sdpa, packed": packed}
    if sizes.device == "cuda":
        steps["ours, graph"] = captured(ours)
    timed = alternate(
        {name: lambda turn, step=step: step() for name, step in steps.items()},
        sizes.pace,
        sizes.device,
    )
    rows = {name: spread(seconds) for name, seconds in timed.items()}
    size = keys.element_size()
    moved = (
        batch
        * kv_heads
        * (n_blocks * (dim + 8) + proposals * 16 * (dim / 8 + 2) + wanted * 4 * dim * size)
    )
    return dict(batch=batch, tokens=length, off=off, bytes=moved, contestants=rows)


def captured(step):
    """A step as a CUDA graph, replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def check_operations(sizes: Sizes) -> dict:
    """Targets on an H200: at 128k, batch 8, 8 x sdpa, and 60 % of the measured copy bandwidth."""
    bandwidth = sizes.copied()
    results, lines = [], []
    for batch in (1, 2 if sizes.rehearse else 8):
        for length in sizes.lengths:
            results.append(operations_step(sizes, batch, length))
            rows, moved = results[-1]["contestants"], results[-1]["bytes"]
            best = min(row["median"] for name, row in rows.items() if name.startswith("ours"))
            sdpa = min(row["median"] for name, row in rows.items() if name.startswith("sdpa"))
            lines.append(
                f"batch {batch}, {length:,}: ours {best * 1e6:,.0f} us, sdpa {sdpa * 1e6:,.0f} us, "
                f"{sdpa / best:.1f} x, {moved / best / bandwidth:.0%} of copying"
            )
            if sizes.device == "cuda":
                torch.cuda.empty_cache()
    return dict(results=results, copied=bandwidth, lines=lines)


def check_decode(sizes: Sizes) -> dict:
    """Tokens per second of a slice of a large model."""
    model, results, lines = sizes.model(), [], []
    for length in sizes.lengths:
        result = measure_decode(model, length, sizes.budget, sizes.pace, **sizes.select)
        results.append(result)
        cells = (f"{n} {r['tokens_per_second']:,.1f}" for n, r in result["contestants"].items())
        lines.append(f"{length:,}, tokens/s: " + ", ".join(cells))
    return dict(results=results, lines=lines)


def check_compiled(sizes: Sizes) -> dict:
    """Steps of an AnchorStaticCache, traced once and, on a GPU, captured as CUDA graphs."""
    model, length, steps = sizes.model(), sizes.lengths[0], 24 if sizes.rehearse else 200
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    fields = dict(budget=sizes.budget, **sizes.select)

    def cache():
        made = AnchorStaticCache(model.config, max_cache_len=length + steps + 8, **fields)
        return fill(made, model, length)

    counted = torch.compile(model.forward, fullgraph=True, backend=count)
    token = torch.tensor([[5]], device=model.device)
    plain, traced = cache(), cache()
    for _ in range(steps):
        expected = model(token, past_key_values=plain).logits
        logits = counted(token, past_key_values=traced).logits
    require_close("logits of the traced step", logits, expected, 1e-3 if sizes.rehearse else 5e-2)
    require_that(len(graphs) <= 3, f"{len(graphs)} graphs in {steps} steps")
    lines = [f"{len(graphs)} graphs in {steps} steps"]
    if sizes.rehearse:
        return dict(graphs=len(graphs), lines=lines)
    torch._dynamo.reset()
    compiled, fast = torch.compile(model.forward, fullgraph=True, mode="reduce-overhead"), cache()
    seconds = []
    for _ in range(40):
        torch.cuda.synchronize()
        started = time.perf_counter()
        logits = compiled(token, past_key_values=fast).logits.clone()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[10:])
    eager = fill(DynamicCache(config=model.config), model, length)
    decode(model, eager)
    lines.append(f"{length:,} tokens, CUDA graphs: {1 / median:,.1f} tokens/s")
    return dict(graphs=len(graphs), seconds=seconds, lines=lines)


@torch.no_grad()
def check_blend(sizes: Sizes) -> dict:
    """Time to the first token of random documents; recomputing everything is full prefill."""
    import tempfile

    model, size, count = sizes.model(), 48 if sizes.rehearse else 1024, 3 if sizes.rehearse else 8
    generator = torch.Generator().manual_seed(0)
    segments = [
        torch.randint(5, model.config.vocab_size, (n,), generator=generator).tolist()
        for n in (16, *[size] * count, 16)
    ]
    ids = torch.tensor([sum(segments, [])], device=model.device)
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore(folder, model, None, prefix=segments[0])
        store.add(segments[1:-1])

        def full(turn=0):
            cache = DynamicCache(config=model.config)
            return model(ids, past_key_values=cache, logits_to_keep=1).logits

        def blended(ratio):
            cache = BlendedCache.blend(model, store, segments, BlendConfig(recompute_ratio=ratio))
            return model(cache.input_ids[:, -1:], past_key_values=cache).logits

        limit = 1e-3 if sizes.rehearse else 8e-2
        off = require_close("blend, ratio 1", blended(1.0), full(), limit)
        steps = {"full prefill": full}
        for ratio in (0.0, 0.15, 1.0):
            steps[f"ratio {ratio:g}"] = lambda turn, ratio=ratio: blended(ratio)
        timed = alternate(steps, Pace(3, 1, 15), sizes.device)
    rows = {name: spread(seconds) for name, seconds in timed.items()}
    lines = [", ".join(f"{name} {row['median']:.3f} s" for name, row in rows.items())]
    return dict(tokens=ids.shape[1], off=off, contestants=rows, lines=lines)


CHECKS = {name[6:]: check for name, check in globals().items() if name.startswith("check_")}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=CHECKS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.output.write_text(json.dumps(CHECKS[args.stage](Sizes(args.rehearse))))


if __name__ == "__main__":
    main()
