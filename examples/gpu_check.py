"""Check everything on a CUDA GPU, and time it, in less than eight minutes.

    python examples/gpu_check.py               # from a checkout; nothing has to be installed for it
    python examples/gpu_check.py --rehearse    # the same at tiny sizes on a CPU

Every stage runs in a process of its own with a limit of time, since an error on a GPU leaves
nothing behind that could go on. What was measured is written after every stage; the exit code is 1
if any of them failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "transformers", "accelerate", "huggingface_hub", "safetensors", "fsspec", "tqdm")
# Seconds that each stage may take; together with starting up, less than eight minutes.
STAGES = {
    "machine": 30,
    "kernels": 120,
    "attention": 75,
    "operations": 60,
    "decode": 75,
    "compiled": 60,
    "blend": 45,
}


def environment() -> dict[str, str]:
    """Of the stages: this checkout is imported before anything that is installed."""
    folders = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, folders))
    return {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def run_stage(name: str, rehearse: bool, limit: float) -> dict:
    """What a stage found, as {"ok": whether all was right, "seconds": ..., ...}."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "stage.json"
        command = [sys.executable, str(Path(__file__).with_name("gpu_stages.py")), name]
        command += ["--output", str(output), *(["--rehearse"] if rehearse else [])]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=limit,
            )
            said, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as late:
            parts = (late.stdout, late.stderr)  # bytes, whatever was asked for
            said = "".join(
                p.decode(errors="replace") if isinstance(p, bytes) else p or "" for p in parts
            )
            code = None
        found = json.loads(output.read_text()) if output.is_file() else {}
    result = {"ok": code == 0, **found, "seconds": time.perf_counter() - started}
    if code != 0:
        why = f"more than {limit:.0f} s" if code is None else f"exit code {code}"
        result |= {"ok": False, "error": f"{why}\n{said[-2000:]}"}
    return result


def summary(report: dict) -> str:
    """A short table: a line per stage, and the lines that it has to say."""
    lines = []
    for name, stage in report["stages"].items():
        lines.append(f"{name:<11} {'ok' if stage['ok'] else 'FAILED':<7} {stage['seconds']:5.0f} s")
        lines += [f"    {line}" for line in stage.get("lines", ())]
        if not stage["ok"]:
            lines += [f"    | {line}" for line in stage["error"].strip().splitlines()[-6:]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--limit", type=float, help="seconds per stage, instead of its own limit")
    args = parser.parse_args(arguments)
    missing = [name for name in (*NEEDED, "triton", "pytest") if not importlib.util.find_spec(name)]
    if missing:
        print(f"not installed here: {', '.join(missing)}", flush=True)
    report = {"rehearsal": args.rehearse, "missing": missing, "stages": {}}
    for name in args.stages:
        print(f"{name} ...", flush=True)
        limit = args.limit or STAGES[name] * (2 if args.rehearse else 1)
        report["stages"][name] = run_stage(name, args.rehearse, limit)
        args.output.write_text(json.dumps(report, indent=1))
    print(f"\n{summary(report)}\n\nevery figure: {args.output}")
    return 0 if all(stage["ok"] for stage in report["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
