"""Speed of both caches beside transformers' own, checked, with a report.

    make bench                                            # all cases, about a quarter of an hour
    make bench ARGS="--cases attention slice --device cuda"
    make bench ARGS="--cases whole-model --lengths 4096 16384 65536"
    make bench ARGS=--quick                               # tiny sizes, for a glance

Cases: "attention" (one decoding step of one layer, heads of Llama-3.1-8B), "whole-model" (tokens
per second and memory of a small model), "slice" (eight layers of Llama-3.1-8B's shapes), "blend"
(time to first token) and "scaling" (how costs grow). Contestants take turns within a case; every
one's result is checked before it is timed. A wrong result ends its case and, when the others are
done, the command with an error. Writes benchmark.json and benchmark.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import benchmark_attention
import benchmark_blend
import benchmark_decode
import benchmark_scaling
import torch
from benchmark_machine import commit, copy_bandwidth, machine, versions
from benchmark_slice import slice_config, slice_model
from benchmark_states import LLAMA_8B, Shape
from benchmark_timing import Pace, WrongResult
from blend_prefill import text_prompt
from blend_tasks import BlendPrompt
from small_model import load
from tqdm import tqdm

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class Sizes(NamedTuple):
    """How large the cases are, and how long they are measured."""

    attention: tuple[int, ...] = (8192, 32768, 131072)
    whole_model: tuple[int, ...] = (8192, 32768)
    slice: tuple[int, ...] = (32768,)
    blend: tuple[int, ...] = (2048, 4096, 8192)
    decoding: tuple[int, ...] = tuple(1 << i for i in range(10, 19))
    blending: tuple[int, ...] = (1024, 2048, 4096)
    shape: Shape = LLAMA_8B
    chunk: int = 512
    bandwidth_bytes: int = 1 << 29
    fields: dict = {}  # of AnchorConfig
    slice_fields: dict = {}  # of the slice's configuration
    step: Pace = Pace(rounds=31, warm_up=3, seconds=8)
    model_step: Pace = Pace(rounds=15, warm_up=2, seconds=25)
    prompt: Pace = Pace(rounds=4, warm_up=0, seconds=60)  # the checks have warmed up


QUICK = Sizes(
    attention=(1536,),
    whole_model=(1024,),
    slice=(1024,),
    blend=(128,),
    decoding=(1024, 1536, 2048),
    blending=(128, 192),
    shape=Shape(8, 2, 64),
    chunk=32,
    bandwidth_bytes=1 << 25,
    fields=dict(dense_below=0, dense_above=1.0),  # or contexts this short were read densely
    slice_fields=dict(
        layers=2,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    ),
    step=Pace(rounds=3, warm_up=1, seconds=3),
    model_step=Pace(rounds=3, warm_up=1, seconds=3),
    prompt=Pace(rounds=3, warm_up=0, seconds=3),
)


def _model(args):
    model, tokenizer = load(args.model)
    return model.to(args.device), tokenizer


def attention(args, sizes: Sizes, about: dict) -> Iterator[dict]:
    ours = dict(benchmark_attention.OURS)
    ours["AnchorDynamicCache"] = {**sizes.fields, **ours["AnchorDynamicCache"]}
    options = dict(device=args.device, budget=args.budget, shape=sizes.shape, pace=sizes.step)
    options |= dict(bandwidth=about["copy_bandwidth"], ours=ours)
    for length in args.lengths or sizes.attention:
        for name in args.dtypes:
            yield benchmark_attention.measure_attention(length, DTYPES[name], **options)


def whole_model(args, sizes: Sizes, about: dict) -> Iterator[dict]:
    model, _ = _model(args)
    for length in args.lengths or sizes.whole_model:
        yield benchmark_decode.measure_decode(
            model, length, args.budget, sizes.model_step, **sizes.fields
        )


def slice_of_a_model(args, sizes: Sizes, about: dict) -> Iterator[dict]:
    model = slice_model(slice_config(**sizes.slice_fields), DTYPES[args.dtypes[0]], args.device)
    long = (131072,) if args.long else ()
    for length in args.lengths or sizes.slice + long:
        yield benchmark_decode.measure_decode(
            model, length, args.budget, sizes.model_step, **sizes.fields
        )


def _prompts(tokenizer, lengths, sizes: Sizes) -> list[BlendPrompt]:
    return [text_prompt(tokenizer, "report", n, None, sizes.chunk) for n in sorted(lengths)]


def blend(args, sizes: Sizes, about: dict) -> Iterator[dict]:
    model, tokenizer = _model(args)
    prompts = _prompts(tokenizer, args.lengths or sizes.blend, sizes)
    checked = benchmark_blend.check_blending(model, prompts[0])
    for prompt in prompts:
        result = benchmark_blend.measure_blend(model, prompt, sizes.prompt)
        yield {**result, "checked_in_fp32": checked}


def scaling(args, sizes: Sizes, about: dict) -> Iterator[dict]:
    lengths = args.lengths or sizes.decoding
    options = dict(device=args.device, budget=args.budget, shape=sizes.shape, pace=sizes.step)
    dtype = DTYPES[args.dtypes[0]]
    yield benchmark_scaling.scale_decoding(lengths, dtype, **options, **sizes.fields)
    model, tokenizer = _model(args)
    prompts = _prompts(tokenizer, sizes.blending, sizes)
    benchmark_blend.check_blending(model, prompts[0])
    yield benchmark_scaling.scale_blending(model, prompts, sizes.prompt)


class Case(NamedTuple):
    title: str
    run: Callable[..., Iterator[dict]]
    table: Callable[[list[dict]], str]


CASES = {
    "attention": Case(
        "One layer's decoding step: update and attention", attention, benchmark_attention.table
    ),
    "whole-model": Case("Decoding with a small model", whole_model, benchmark_decode.table),
    "slice": Case(
        "Decoding with a few layers of Llama-3.1-8B's shapes, random weights",
        slice_of_a_model,
        benchmark_decode.table,
    ),
    "blend": Case("Time to the first token of a prompt", blend, benchmark_blend.table),
    "scaling": Case("How costs grow", scaling, benchmark_scaling.table),
}


def run_case(case: Case, args, sizes: Sizes, about: dict) -> dict:
    """Results of a case, up to where a result was wrong: ``error`` then says what."""
    started, results, error = time.perf_counter(), [], None
    try:
        for result in case.run(args, sizes, about):
            results.append(result)
    except WrongResult as wrong:
        error = str(wrong)
    seconds = time.perf_counter() - started
    return dict(title=case.title, seconds=seconds, results=results, error=error)


def markdown(about: dict) -> str:
    """The report."""
    where, used = about["machine"], about["versions"]
    place = where["accelerator"] or f"{where['processor']}, {where['cores']} cores"
    lines = [
        "# Benchmarks of anchor_cache",
        "",
        f"{place}, {where['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in used.items() if version),
        f"Commit {about['commit']}, {about['started']}; budget {about['settings']['budget']}; "
        f"copying moves {about['copy_bandwidth'] / 1e9:.1f} GB/s (read and written)",
        "",
        "Median, and quartiles in brackets; `x` says how many times as fast as another.",
    ]
    for name, case in about["cases"].items():
        lines += ["", f"## {name}: {case['title']}", ""]
        if case["results"]:
            lines.append(CASES[name].table(case["results"]))
        if case["error"]:
            lines += ["", f"**Stopped, a result is wrong:** {case['error']}"]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a glance")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens, of the chosen cases")
    parser.add_argument("--budget", type=int, help="tokens read per step; default: 2048")
    parser.add_argument("--long", action="store_true", help="the slice at 131,072 tokens, too")
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--output", type=Path, default=Path("benchmark_output"), help="folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    sizes = QUICK if args.quick else Sizes()
    args.budget = args.budget or (512 if args.quick else 2048)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    about = dict(
        machine=machine(args.device),
        versions=versions(),
        commit=commit(),
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        settings=settings,
        copy_bandwidth=copy_bandwidth(args.device, sizes.bandwidth_bytes),
        cases={},
    )
    args.output.mkdir(parents=True, exist_ok=True)
    for name in tqdm(args.cases, desc="cases", unit="case"):
        about["cases"][name] = run_case(CASES[name], args, sizes, about)
        # After every case, so that an interrupted run has what it measured.
        (args.output / "benchmark.json").write_text(json.dumps(about, indent=1), "utf-8")
        (args.output / "benchmark.md").write_text(markdown(about), "utf-8")
    print(markdown(about))
    print(f"every figure: {args.output / 'benchmark.json'}")
    wrong = {name: case["error"] for name, case in about["cases"].items() if case["error"]}
    for name, error in wrong.items():
        print(f"{name}: {error}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
