"""The tests of Triton's kernels on several processes at once, verdict by verdict."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from gpu_notes import Notes

ROOT = Path(__file__).resolve().parent.parent
# Needs no device; it compiles for some that are not here.
_NOT_HERE = {"test_triton_compiles.py"}
_REHEARSED = ("test_scores_of_anchors and shape0", "test_attention_over_blocks and plain")
_VERDICT = re.compile(r"^(\S+\.py::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_PYTEST = [sys.executable, "-m", "pytest", "-c", str(ROOT / "setup.cfg"), "-o", "addopts="]
_PYTEST += ["-p", "no:cacheprovider"]
_RESERVE = 6.0  # seconds to end processes and to note how far they came


def test_files() -> list[Path]:
    """Every file of tests of Triton's kernels that runs on a device."""
    return [p for p in sorted((ROOT / "tests").glob("test_triton_*.py")) if p.name not in _NOT_HERE]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return dict(os.environ, PYTHONPATH=path, PYTHONUNBUFFERED="1")


def _root(files: list[Path]) -> str:
    """What the names of tests are relative to: the checkout, but for files from elsewhere."""
    return os.path.commonpath([ROOT, *(path.resolve() for path in files)])


def collected(files: list[Path], chosen: list[str], seconds: float) -> list[str]:
    """The names of all tests in ``files``.

    Raises:
        RuntimeError: pytest finds none, or cannot import a file.
    """
    root = _root(files)
    command = [*_PYTEST, f"--rootdir={root}", "--collect-only", "-q", *chosen, *map(str, files)]
    done = subprocess.run(
        command, cwd=root, env=_environment(), capture_output=True, text=True, timeout=seconds
    )
    names = [line for line in done.stdout.splitlines() if re.match(r"\S+\.py::", line)]
    if done.returncode or not names:
        raise RuntimeError(f"pytest finds no tests: {(done.stdout + done.stderr)[-1500:]}")
    return names


def _failures(said: str) -> list[str]:
    """The lines of pytest's summary that say what failed and why."""
    return [x[:400] for x in said.splitlines() if re.match(r"(FAILED|ERROR) \S+\.py::", x)]


def run_tests(notes: Notes, files: list[Path] | None, rehearse: bool) -> None:
    """Run the tests and note their verdicts as they come.

    Every test that fails or gets no verdict in time is an error of the stage.
    """
    is_chosen = rehearse and files is None
    chosen = ["-k", " or ".join(f"({x})" for x in _REHEARSED)] if is_chosen else []
    files = files or test_files()
    names, root = collected(files, chosen, notes.seconds_left - _RESERVE), _root(files)
    count = min(1 if rehearse else max((os.cpu_count() or 2) // 2, 1), len(names))
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{i}.log") for i in range(count)]
        running = []
        for i, log in enumerate(logs):
            # Neighbours compile the same kernel: apart, they would do so twice.
            share = names[i * len(names) // count : (i + 1) * len(names) // count]
            command = [*_PYTEST, f"--rootdir={root}", "-vv", "--tb=short", "-rfE", *share]
            with log.open("w") as file:
                running.append(
                    subprocess.Popen(
                        command, cwd=root, env=_environment(), stdout=file, stderr=file
                    )
                )

        def look() -> tuple[dict[str, str], str]:
            said = [log.read_text("utf-8", errors="replace") for log in logs]
            verdicts = {name: word for text in said for name, word in _VERDICT.findall(text)}
            notes.results["tests"] = dict(Counter(verdicts.values()), collected=len(names))
            notes.results["processes"] = count
            notes.write()
            return verdicts, "\n".join(said)

        while any(p.poll() is None for p in running) and notes.seconds_left > _RESERVE:
            time.sleep(0.5)
            look()
        for process in running:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
        verdicts, said = look()
    reasons = _failures(said)
    notes.results["failures"] = reasons
    for name in names:
        verdict = verdicts.get(name, "no verdict")
        if verdict in ("FAILED", "ERROR", "no verdict"):
            why = [line for line in reasons if f" {name} " in f"{line} "]
            notes.errors[name] = why[0] if why else verdict
    if "no verdict" in notes.errors.values() or any(p.returncode not in (0, 1) for p in running):
        notes.results["output"] = said[-3000:]
        notes.errors.setdefault("processes", f"exit codes {[p.returncode for p in running]}")
    notes.write()
