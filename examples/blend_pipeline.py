"""Does reading chunks hide behind computing? A blend from a store behind a slow wire, against
reading everything first and computing then; the trace as a picture.

    python examples/blend_pipeline.py
    python examples/blend_pipeline.py --megabytes-per-second 50 --selector hkvd

The wire is emulated (slow_storage.py): local files at the given speed. Logits are checked to be the
same both ways before anything is timed; the two ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from blend_prefill import text_prompt
from evaluation_metrics import markdown
from slow_storage import SlowStorage
from small_model import load
from tqdm import trange

from anchor_cache import BlendedCache, ChunkStore


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--megabytes-per-second", type=float, default=100)
    parser.add_argument("--selector", default="query")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("eval_output/blend"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    model, tokenizer = load(args.model)
    prompt = text_prompt(tokenizer, "report", args.tokens, None)
    prefix, *chunks, _ = prompt.segments
    SlowStorage.use(args.megabytes_per_second * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        url = f"slow://{folder}"
        slow = ChunkStore(url, model, prefix=prefix, memory_bytes=0)
        keys = [slow.key(prefix, ()), *slow.add(chunks)]

        def blend(store):
            return BlendedCache.blend(model, store, prompt.segments, selector=args.selector)

        def one_after_the_other():
            memory = ChunkStore(url, model, prefix=prefix)
            for key in keys:
                memory.open(key)[0].load()
            return blend(memory)

        ways = {"read, then computed": one_after_the_other, "pipelined": lambda: blend(slow)}
        keys_of = [[layer.keys for layer in make().layers] for make in ways.values()]
        for one, other in zip(*keys_of, strict=True):
            torch.testing.assert_close(one, other)
        seconds, report = {name: [] for name in ways}, None
        for _ in trange(args.repeats, unit="turn"):
            for name, make in ways.items():
                started = time.perf_counter()
                report = make().report()
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    first = medians["read, then computed"]
    print(
        f"\n{len(prompt.ids):,} tokens, {args.megabytes_per_second:g} MB/s, {args.selector}: "
        f"reading takes {report.load_seconds:.2f} s, computing {report.compute_seconds:.2f} s\n"
    )
    rows = [[n, f"{s:.2f} s", f"{first / s:.2f} x"] for n, s in medians.items()]
    print(markdown(["way", "blend", "speed"], rows))
    args.output.mkdir(parents=True, exist_ok=True)
    print(f"\npicture: {report.plot_trace(args.output / 'pipeline.png')}")


if __name__ == "__main__":
    main()
