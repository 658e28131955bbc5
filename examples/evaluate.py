"""The whole evaluation: both caches and their rivals, on every task, in one summary.

    make eval                                    # some hours; run it again and it goes on
    make eval-quick                              # the same way through, tiny: minutes
    make eval ARGS="--parts retrieval generation --model NAME_OR_PATH"

Runs the evaluate_*.py scripts, and kv_deviation.py, one after the other over one loaded model per
number format. Every figure is in a JSONL record of its part's folder; `summary.md` has all tables,
what was asked for beside what was measured, and pictures. A part that fails is reported with its
error and the others are run: the exit code is then 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType

import evaluate_blend
import evaluate_both
import evaluate_generation
import evaluate_selection
import evaluation_pictures
import evaluation_verdicts
import kv_deviation
from benchmark_machine import commit, machine, versions
from small_model import load

NATIVE, SINGLE = "auto", "float32"


@dataclasses.dataclass(frozen=True)
class Part:
    """A script, its arguments, and the number format of the weights."""

    script: ModuleType
    arguments: str = ""
    dtype: str = NATIVE


PARTS = {
    "retrieval": Part(evaluate_selection, "--peers"),
    "retrieval-float32": Part(
        evaluate_selection,
        "--tasks text single --budgets 0.05 0.1 --lengths 1000 4000 --depths 5",
        SINGLE,
    ),
    "builders": Part(
        evaluate_selection,
        "--tasks text single --sets builders refinement selection --budgets 0.05 0.1 "
        "--lengths 1000 2000 4000 --depths 5",
    ),
    "generation": Part(evaluate_generation),
    "blend": Part(
        evaluate_blend, "--tasks facts whole references continuation xquad musique nq prefill"
    ),
    "blend-float32": Part(evaluate_blend, "--tasks facts continuation --sets baselines", SINGLE),
    "blend-ratios": Part(evaluate_blend, "--tasks facts continuation --sets ratios"),
    "blend-encodings": Part(evaluate_blend, "--tasks facts continuation xquad --sets encodings"),
    "blend-chunks": Part(
        evaluate_blend,
        "--tasks continuation --sets baselines --chunks 2 4 8 16 --chunk-tokens 64 256 1024 "
        "--prompts 8",
    ),
    "both": Part(evaluate_both),
    "deviation-text": Part(kv_deviation, "--documents text"),
    "deviation-questions": Part(kv_deviation, "--documents xquad"),
}


def header(args, failed: dict[str, str], started: float) -> str:
    """What was evaluated, where, and what could not be."""
    where, used = machine("cpu"), versions()
    lines = ["# Evaluation of anchor_cache", ""]
    lines += [
        f"{args.model or 'small model'}; {where['processor']}, {where['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in used.items())
        + f"; commit {commit()}; {(time.time() - started) / 60:.0f} minutes of this run"
        + (" (quick: too few samples to conclude anything)" if args.quick else ""),
        "",
    ]
    lines += [f"**{name} failed**: {error}" for name, error in failed.items()]
    return "\n".join(lines) + "\n"


def run_part(name: str, part: Part, args, model, tokenizer) -> str:
    """The Markdown of one part."""
    given = [*part.arguments.split(), "--output", str(args.output / name), "--half", args.half]
    for option in ("model", "data"):
        if getattr(args, option):
            given += [f"--{option}", getattr(args, option)]
    if args.quick:
        given = [option for option in given if option != "--peers"] + ["--quick"]
    return part.script.evaluate(part.script.arguments().parse_args(given), model, tokenizer)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--data", help="folder with the data sets; default: $ANCHOR_CACHE_DATA")
    parser.add_argument("--half", choices=("tune", "report"), default="report")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny prompts, few of them")
    parser.add_argument("--output", type=Path, default=Path("eval_output"))
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    args.output.mkdir(parents=True, exist_ok=True)
    started, sections, failed = time.time(), {}, {}
    for dtype in (NATIVE, SINGLE):
        parts = [name for name in args.parts if dtype == PARTS[name].dtype]
        if not parts:
            continue
        model, tokenizer = load(args.model, dtype)
        for name in parts:
            print(f"\n# {name} ({model.dtype})", flush=True)
            try:
                sections[name] = run_part(name, PARTS[name], args, model, tokenizer)
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
    asked = evaluation_verdicts.table(args.output)
    pictures = evaluation_pictures.draw(args.output)
    text = header(args, failed, started) + f"\n{asked}\n"
    text += "".join(f"\n![{p.stem}]({p.relative_to(args.output)})\n" for p in pictures)
    text += "".join(f"\n# {name}\n\n{section}\n" for name, section in sections.items())
    (args.output / "summary.md").write_text(text, "utf-8")
    print(f"\n{header(args, failed, started)}\n{asked}\n\nsummary: {args.output / 'summary.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
