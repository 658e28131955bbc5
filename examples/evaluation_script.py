"""What the evaluation scripts have in common: options, and how one is run on its own."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from blend_tasks import HALVES
from small_model import load


def common_arguments(description: str, output: str) -> argparse.ArgumentParser:
    """A parser with the options that say which model is evaluated, on what, and where figures go.

    Args:
        description: of the script.
        output: its folder in ``eval_output``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16; default: the model's")
    parser.add_argument("--device", help="cpu, cuda; default: where the model is loaded")
    parser.add_argument(
        "--data",
        help="folder with the files that a task reads (xquad.en.json, musique_s_60.json, "
        "nq_oracle_500.jsonl); default: $ANCHOR_CACHE_DATA",
    )
    parser.add_argument(
        "--texts",
        nargs="+",
        metavar="DATASET",
        help="NAME[:CONFIG[:SPLIT[:COLUMN]]], read by `datasets`, instead of the built-in texts",
    )
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--quick", action="store_true", help="a glance: small prompts, and few")
    parser.add_argument("--output", type=Path, default=Path("eval_output", output), help="folder")
    return parser


def prepare() -> None:
    """Leave out what would be said at every step."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")


def loaded(name: str | None, dtype: str, device: str | None):
    """Model and tokenizer, on a device."""
    model, tokenizer = load(name, dtype)
    return (model.to(device) if device else model), tokenizer


def about_of(args, model) -> str:
    """What results depend on beside prompts and settings; they carry it in their records."""
    return f"{args.model or 'small model'}, {model.dtype}, {model.device.type}"


def keep_section(folder: Path, name: str, text: str) -> str:
    """Write Markdown to ``name``.md in the folder, print it, and give it back."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, "utf-8")
    print(f"\n{text}", flush=True)
    return text


def why_not_run(model, tokens: list[int]) -> str | None:
    """Why prompts of so many tokens, answers included, cannot be compared, if they cannot."""
    if not tokens:
        return "no text is long enough for a prompt of this size"
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max(tokens) > positions:
        return f"up to {max(tokens):,} tokens are needed, and the model has {positions:,} positions"
    return None


def run_alone(parser: argparse.ArgumentParser, evaluate: Callable) -> None:
    """Parse the command line, load the model and evaluate it.

    Args:
        parser: of :func:`common_arguments`.
        evaluate: called with the arguments, the model and its tokenizer.
    """
    args = parser.parse_args()
    prepare()
    model, tokenizer = loaded(args.model, args.dtype, args.device)
    print(f"{torch.get_num_threads()} threads, half: {args.half}", flush=True)
    evaluate(args, model, tokenizer)
    print(f"every figure: {args.output}")
