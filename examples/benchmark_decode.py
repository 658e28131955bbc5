"""Seconds per decoded token against context length: stock caches and AnchorDynamicCache.

    python examples/benchmark_decode.py --lengths 4096 16384 32768 --budget 2048

The caches are filled with the same random keys and values: only the time is of interest here, and
it does not depend on them. Before anything is timed, the caches must agree: with the budget at the
whole context, AnchorDynamicCache has to give the logits of DynamicCache (fp32). The contestants
take turns, and medians are reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from pathlib import Path

import torch
import transformers
from small_model import load
from tqdm import tqdm
from transformers import DynamicCache, StaticCache

from anchor_cache import AnchorDynamicCache


def fill(cache, model, length: int):
    """The same random keys and values for every cache of this length."""
    text = model.config.get_text_config(decoder=True)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    generator = torch.Generator().manual_seed(length)
    for layer in range(text.num_hidden_layers):
        shape = (1, text.num_key_value_heads, length, dim)
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        cache.update(*(x.to(model.device, model.dtype) for x in (keys, values)), layer)
    return cache


def contestants(model, length: int, steps: int, budget: int) -> dict:
    return {
        "DynamicCache": fill(DynamicCache(config=model.config), model, length),
        "StaticCache": fill(
            StaticCache(config=model.config, max_cache_len=length + steps), model, length
        ),
        "AnchorDynamicCache": fill(AnchorDynamicCache(model.config, budget=budget), model, length),
    }


def check(model, token, length: int) -> None:
    """With everything read, the logits must be those of DynamicCache, in fp32."""
    dtype = model.dtype
    model.float()
    dense = fill(DynamicCache(config=model.config), model, length)
    ours = fill(AnchorDynamicCache(model.config, budget=1.0), model, length)
    expected, actual = (model(token, past_key_values=cache).logits for cache in (dense, ours))
    model.to(dtype)
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-4)


def measure(model, token, caches: dict, steps: int) -> dict[str, dict[str, float]]:
    seconds = {name: [] for name in caches}
    for _ in range(steps):
        for name, cache in caches.items():
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            model(token, past_key_values=cache).logits.cpu()
            seconds[name].append(time.perf_counter() - started)
    timed = {name: sorted(values[2:]) for name, values in seconds.items()}
    return {
        name: {"median": statistics.median(v), "fastest": v[0], "slowest": v[-1]}
        for name, v in timed.items()
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--budget", type=int, default=2048, help="tokens read per step")
    parser.add_argument("--steps", type=int, default=12, help="steps per cache, two not counted")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps must be at least 3")
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    model, _ = load(args.model)
    token = torch.tensor([[5]], device=model.device)
    about = (
        f"{type(model).__name__}, {model.dtype}, {model.device}, {torch.get_num_threads()} threads,"
        f" torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}, budget {args.budget}"
    )
    results = {}
    for length in tqdm(args.lengths, desc="lengths", unit="length"):
        check(model, token, length)
        caches = contestants(model, length, args.steps, args.budget)
        results[length] = measure(model, token, caches, args.steps)
        results[length]["sparse"] = caches["AnchorDynamicCache"].report().sparse_steps > 0
    print(f"\n{about}\n")
    print("| tokens | DynamicCache | StaticCache | AnchorDynamicCache | vs Dynamic | vs Static |")
    print("|---|---|---|---|---|---|")
    for length, timed in results.items():
        dynamic, static, ours = (
            timed[name]["median"] for name in ("DynamicCache", "StaticCache", "AnchorDynamicCache")
        )
        note = "" if timed["sparse"] else " (dense)"
        print(
            f"| {length:,} | {dynamic:.3f} s | {static:.3f} s | {ours:.3f} s{note} "
            f"| {dynamic / ours:.1f} x | {static / ours:.1f} x |"
        )
    if args.output:
        args.output.write_text(json.dumps({"about": about, "seconds": results}, indent=1))


if __name__ == "__main__":
    main()
