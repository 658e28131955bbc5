"""Check and measure anchor_cache on a CUDA machine: one command, under eight minutes.

    python examples/gpu_check.py --output gpu_check.json
    python examples/gpu_check.py --rehearse              # tiny sizes on the CPU, for a try

Runs from a checkout; nothing has to be installed but torch, transformers, triton and pytest. Every
stage is a process of its own with a time limit, so that a kernel that hangs, or spoils the CUDA
context, costs its stage alone. The report is written whenever a stage has measured something.
Exits with 1 if anything was wrong, failed, or did not finish.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_table import table

# Of setup.cfg's install_requires, and what the checks need beside.
PACKAGES = ("torch", "transformers", "accelerate", "huggingface_hub", "safetensors", "fsspec")
PACKAGES += ("tqdm", "triton", "pytest")
# Seconds that each stage may take, in their order.
STAGES = {"device": 40, "kernels": 100, "attention": 80, "decoding": 135, "blending": 45}
STAGES |= {"graphs": 60}
ENOUGH = 465  # for all of them
_TAIL = 4000  # characters of a stage's output that the report keeps
ROOT = Path(__file__).resolve().parent.parent
_STAGE = ROOT / "examples" / "gpu_stage.py"


def write(path: Path, report: dict) -> None:
    """All or nothing: an interrupted run leaves the last whole report."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(report, indent=1), "utf-8")
    partial.replace(path)


def missing() -> list[str]:
    """Packages that are not here."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def end(process: subprocess.Popen) -> None:
    """End a stage and what it started. What waits for a dead GPU cannot be: it is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def run_stage(command: list[str], limit: float, notes: Path, noted) -> dict:
    """Run a stage's process.

    Args:
        command: of the stage.
        limit: seconds, then it is ended.
        notes: the file in which it leaves what it has measured.
        noted: called with the stage's entry of the report whenever there is something new.

    Returns:
        The entry: ``status`` ("ok", "failed", "out of time" or "crashed"), ``seconds``, and what
        the stage noted.
    """
    environment = dict(
        os.environ, HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false"
    )
    entry: dict = dict(status="running", limit=round(limit))
    started, seen = time.monotonic(), None

    def look() -> None:
        nonlocal seen
        with contextlib.suppress(OSError, ValueError):
            if notes.stat().st_mtime_ns != seen:
                seen = notes.stat().st_mtime_ns
                entry.update(json.loads(notes.read_text("utf-8")))
                noted(entry)

    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env=environment, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() - started < limit:
                time.sleep(0.2)
                look()
            in_time = process.poll() is not None
        finally:
            end(process)
        look()
        entry["seconds"] = round(time.monotonic() - started, 1)
        entry["status"] = "ok"
        if not in_time:
            entry["status"] = "out of time"
        elif process.returncode or not entry.get("finished"):
            entry |= dict(status="crashed", exit_code=process.returncode)
        elif entry.get("errors"):
            entry["status"] = "failed"
        if entry["status"] != "ok":
            said.seek(0)
            entry["output"] = said.read()[-_TAIL:]
    noted(entry)
    return entry


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=ENOUGH, help="for all stages together")
    parser.add_argument(
        "--kernel-tests",
        type=Path,
        nargs="+",
        help="files; default: tests/test_triton_*.py, and of them a few in a rehearsal",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    output = args.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    report = dict(started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), missing=missing())
    report |= dict(rehearsal=args.rehearse, stages={})
    if report["missing"]:
        print(f"not installed here: {', '.join(report['missing'])}", flush=True)
    write(output, report)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in (stage for stage in STAGES if stage in args.stages):
            left = args.seconds - (time.monotonic() - started)
            if left < 5:
                report["stages"][name] = dict(status="out of time", seconds=0.0)
                continue
            limit, notes = min(STAGES[name], left), Path(folder, name + ".json")
            command = [sys.executable, str(_STAGE), name, str(notes), "--seconds", str(limit)]
            command += ["--rehearse"] * args.rehearse
            if name == "kernels" and args.kernel_tests:
                command += ["--kernel-tests", *map(str, args.kernel_tests)]

            def noted(entry: dict, name: str = name) -> None:
                report["stages"][name] = entry
                write(output, report)

            entry = run_stage(command, limit, notes, noted)
            print(f"{name}: {entry['status']}, {entry['seconds']} s", flush=True)
            if entry["status"] == "crashed":
                print(entry["output"][-1500:], flush=True)
    wrong = [name for name, entry in report["stages"].items() if entry["status"] != "ok"]
    report |= dict(wrong=wrong, seconds=round(time.monotonic() - started, 1))
    write(output, report)
    print(table(report))
    print(f"every figure: {output}")
    return 1 if wrong else 0


if __name__ == "__main__":
    # So that whoever ends this ends the stage, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
