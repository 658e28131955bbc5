"""How the scripts of peers begin and end. They run in environments of their own, in which
anchor_cache is not installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path

from transformers import AutoModelForCausalLM


def peer_arguments(description: str, prompt: str) -> argparse.ArgumentParser:
    """A parser with the options that every peer's script has.

    Args:
        description: of the script; its first line is shown.
        prompt: what the JSON file of ``--prompt`` holds.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", type=Path, required=True, help=f"JSON with {prompt}")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def model_of(args):
    """The model of the parsed arguments, on its device."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    return model.to(args.device).eval()


def write(args, package: str, **found) -> None:
    """Write what was found, and the versions that it was found with."""
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers", package)}
    args.output.write_text(json.dumps(dict(found, versions=versions)))
