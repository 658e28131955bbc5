"""The whole evaluation: both caches and their rivals, on every task, in one summary.

    make eval                                    # two hours and more; run it again and it goes on
    make eval ARGS=--large                       # more of everything: a day
    make eval-quick                              # the same way through, tiny: minutes
    make eval ARGS="--parts retrieval generation --model NAME_OR_PATH"
    make eval ARGS="--model gemma-3-270m"        # the second model of small_model.py

Runs the evaluate_*.py scripts, and kv_deviation.py, one after the other over one loaded model per
number format. Every figure is in a JSONL record of its part's folder; `summary.md` has all tables,
of earlier runs too, what was asked for beside what was measured, and pictures. A part that fails is
reported with its error and the others are run: the exit code is then 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

import evaluate_blend
import evaluate_both
import evaluate_generation
import evaluate_selection
import evaluation_pictures
import evaluation_verdicts
import kv_deviation
from benchmark_machine import machine, versions
from evaluation_record import results_of
from evaluation_script import about_of, loaded, prepare

NATIVE, SINGLE = "auto", "float32"


@dataclasses.dataclass(frozen=True)
class Part:
    """A script, its arguments, and the number format of the weights."""

    script: ModuleType
    arguments: str = ""
    fewer: str = ""  # arguments that make it shorter, left out with --large
    dtype: str = NATIVE
    is_quick: bool = False  # whether a glance includes it


PARTS = {
    "retrieval": Part(
        evaluate_selection,
        "--peers --tasks text single multikey",
        "--budgets 0.05 0.1 --lengths 1000 2000 4000 --peer-budgets 0.1 --peer-lengths 2000 "
        "--steps 16",
        is_quick=True,
    ),
    "blend": Part(
        evaluate_blend,
        "--peers --tasks facts xquad continuation references nq musique --sets baselines",
        "--prompts 8 --max-tokens 2048",
        is_quick=True,
    ),
    "blend-verdicts": Part(
        evaluate_blend,
        "--tasks facts xquad continuation --sets baselines "
        "--only default 'default, 0.21' 'CacheBlend as published, 0.15' "
        "'default, chunks after the first token'",
        is_quick=True,
    ),
    "generation": Part(evaluate_generation, "", "--places 1 --budgets 0.1", is_quick=True),
    "retrieval-hard": Part(
        evaluate_selection,
        "--peers --tasks multivalue tracing counting questions",
        "--no-peers --budgets 0.05 0.1 --lengths 1000 2000 4000 --depths 2 --questions 4",
    ),
    "retrieval-8k": Part(
        evaluate_selection,
        "--tasks single multikey --lengths 8000 --budgets 0.05 0.1",
        "--depths 5 --only default 'minmax (Quest)' 'true mass of blocks (oracle)'",
    ),
    "both": Part(evaluate_both, "", "--prompts 8", is_quick=True),
    "blend-ratios": Part(
        evaluate_blend, "--tasks facts continuation --sets ratios", "--prompts 8", is_quick=True
    ),
    "deviation-text": Part(kv_deviation, "--documents text", "--prompts 2", is_quick=True),
    "deviation-questions": Part(kv_deviation, "--documents xquad", "--prompts 2 --selectors"),
    "budgets": Part(
        evaluate_selection,
        "--tasks text",
        "--steps 16 --budgets 0.02 0.2",
    ),
    "coverage": Part(
        evaluate_selection, "--tasks text --sets selection --budgets 0.2", "--steps 8"
    ),
    "builders": Part(
        evaluate_selection,
        "--tasks text single --sets builders refinement --budgets 0.05 0.1 "
        "--lengths 1000 2000 4000 --depths 5",
        "--tasks text --steps 8 --places 1 --budgets 0.1",
    ),
    "index-sizes": Part(
        evaluate_selection,
        "--tasks text single --sets 'index sizes' --tokens 8000 --budgets 0.3 --lengths 8000 "
        "--depths 5",
        "--steps 8 --places 1",
    ),
    "blend-selectors": Part(
        evaluate_blend,
        "--tasks facts whole continuation xquad --sets selectors encodings",
        "--tasks facts --prompts 8",
    ),
    "blend-chunks": Part(
        evaluate_blend,
        "--tasks continuation --chunks 2 4 8 16 --chunk-tokens 64 256 1024 --sets baselines "
        "--prompts 8",
        "--chunks 4 16 --chunk-tokens 64 256 --prompts 3",
    ),
    "prefill": Part(evaluate_blend, "--tasks prefill", "--lengths 2048 4096"),
    "retrieval-float32": Part(
        evaluate_selection,
        "--tasks text single --budgets 0.05 0.1 --lengths 1000 4000 --depths 5",
        "--tasks text --steps 8 --places 1 --budgets 0.1",
        dtype=SINGLE,
    ),
    "blend-float32": Part(
        evaluate_blend,
        "--tasks facts continuation --sets baselines",
        "--tasks facts --prompts 12",
        dtype=SINGLE,
    ),
}


def header(args, failed: dict[str, str], minutes: float) -> str:
    """What was evaluated, where, by which code, and what could not be."""
    where, used = machine(args.device or "cpu"), versions()
    place = where["accelerator"] or where["processor"]
    rows = [row for path in args.output.glob("*/*.jsonl") for row in results_of(path)]
    made_by = sorted({str(row["commit"])[:12] for row in rows if "commit" in row})
    lines = [
        "# Evaluation of anchor_cache",
        "",
        f"{args.model or 'small model'}, half: {args.half}; {place}, {where['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in used.items())
        + f"; results made by commit {', '.join(made_by)}; {minutes:.0f} minutes of the last run"
        + (" (quick: too few samples to conclude anything)" if args.quick else ""),
        "",
        *(f"**{name} failed**: {error}\n" for name, error in failed.items()),
    ]
    return "\n".join(lines) + "\n"


def run_part(name: str, part: Part, args, model, tokenizer) -> None:
    """One part; its tables are in its folder then."""
    chosen = part.arguments + ("" if args.large else f" {part.fewer}")
    given = [*shlex.split(chosen), "--output", str(args.output / name), "--half", args.half]
    for option in ("model", "device", "data"):
        if getattr(args, option):
            given += [f"--{option}", getattr(args, option)]
    if args.texts:
        given += ["--texts", *args.texts]
    if args.quick:
        given += ["--quick"] + ["--no-peers"] * ("--peers" in given)
    given += ["--dtype", part.dtype]
    part.script.evaluate(part.script.arguments().parse_args(given), model, tokenizer)


def summary(args, about: str) -> str:
    """Markdown of everything that this and earlier runs left in the folder."""
    text = ""
    for picture in evaluation_pictures.draw(args.output, args.half, about):
        text += f"\n![{picture.stem}]({picture.relative_to(args.output)})\n"
    for name in PARTS:
        paths = sorted((args.output / name).glob("*.md"))
        tables = [path.read_text("utf-8") for path in paths]
        text += "".join([f"\n# {name}\n"] * bool(tables) + [f"\n{own}\n" for own in tables])
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--device", help="cpu, cuda; default: where the model is loaded")
    parser.add_argument("--data", help="folder with the data sets; default: $ANCHOR_CACHE_DATA")
    parser.add_argument("--texts", nargs="+", metavar="DATASET", help="instead of built-in texts")
    parser.add_argument("--half", choices=("tune", "report"), default="report")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--large", action="store_true", help="all sizes, many more samples")
    parser.add_argument("--quick", action="store_true", help="tiny prompts, few of them")
    parser.add_argument(
        "--output", type=Path, help="folder; default: one in eval_output, per size and model"
    )
    args = parser.parse_args()
    prepare()
    size = "quick" if args.quick else "large" if args.large else "usual"
    own = f"{size}-{Path(args.model).name}" if args.model else size
    args.output = args.output or Path("eval_output", own)
    args.output.mkdir(parents=True, exist_ok=True)
    chosen = args.parts or [n for n, part in PARTS.items() if part.is_quick or not args.quick]
    started, failed, about = time.time(), {}, ""
    for dtype in (NATIVE, SINGLE):
        parts = [name for name in chosen if dtype == PARTS[name].dtype]
        if not parts:
            continue
        model, tokenizer = loaded(args.model, dtype, args.device)
        about = about or about_of(args, model)
        for name in parts:
            print(f"\n# {name} ({model.dtype})", flush=True)
            try:
                run_part(name, PARTS[name], args, model, tokenizer)
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
    top = header(args, failed, (time.time() - started) / 60)
    top += f"\n{evaluation_verdicts.table(args.output, args.half, about)}\n"
    (args.output / "summary.md").write_text(top + summary(args, about), "utf-8")
    print(f"\n{top}\nsummary: {args.output / 'summary.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
