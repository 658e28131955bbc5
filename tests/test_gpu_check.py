"""The check of a GPU, rehearsed on the CPU: its stages, and what it makes of failures."""

import json
import os
import sys
import time

import gpu_check
import pytest
import torch
from gpu_blending import random_prompt
from gpu_notes import Incomplete, Notes
from gpu_sizes import GPU, REHEARSAL
from gpu_timing import device_seconds

import anchor_cache

HAS_STATIC = hasattr(anchor_cache, "AnchorStaticCache")


def run(tmp_path, *options):
    output = tmp_path / "check.json"
    code = gpu_check.main(["--rehearse", "--output", str(output), *options])
    return code, json.loads(output.read_text())


def test_a_rehearsal_goes_through_all_stages(tmp_path, capsys):
    pytest.importorskip("triton")
    code, report = run(tmp_path)
    said = capsys.readouterr().out
    assert code == 0 and report["wrong"] == [], said
    assert list(report["stages"]) == list(gpu_check.STAGES) and report["seconds"] > 0
    results = {}
    for name, entry in report["stages"].items():
        assert (entry["status"], entry["errors"], entry["finished"]) == ("ok", {}, True)
        assert f"| {name} | ok |" in said
        results[name] = entry["results"]
    library = results["device"]["library"]
    assert library == str(gpu_check.ROOT / "anchor_cache") and results["device"]["copy_bandwidth"]
    tests = results["kernels"]["tests"]
    assert tests["PASSED"] == tests["collected"] > 3 and results["kernels"]["failures"] == []
    for batch, length in REHEARSAL.attention:
        found = results["attention"][f"operations, {batch} x {length}"]
        row, dense = (found["contestants"][who] for who in ("AnchorDynamicCache", found["dense"]))
        assert found["speed"] == pytest.approx(dense["median"] / row["median"])
        assert row["same_choice"] > 0.9 and 0 < row["bytes"] < dense["bytes"]
        assert found["batch"] == batch and dense["bytes"] == batch * length * 2 * 2 * 64 * 4
        step = results["attention"][f"whole step, {batch} x {length}"]
        assert step["batch"] == batch and step["contestants"]["AnchorDynamicCache"]["sparse"]
    (length,) = REHEARSAL.decoding
    assert results["decoding"][f"steps, {length}"]["contestants"]["AnchorDynamicCache"]["sparse"]
    assert results["decoding"][f"compiled StaticCache, {length}"]["graphs"] == 1
    blended = results["blending"][f"first token, {REHEARSAL.blending[0]}"]["contestants"]
    assert {f"blend {ratio}, memory" for ratio in ("0", "0.15", "1")} < set(blended)
    if HAS_STATIC:
        ours = results["decoding"][f"compiled AnchorStaticCache, {length}"]
        assert ours["graphs"] == 1 and ours["sparse_steps"] > 0 < ours["index_bytes"]
        assert results["graphs"][f"{REHEARSAL.graph_steps} steps"]["graphs"] == 1


def test_a_failing_stage_is_told_and_the_others_run(tmp_path, capsys):
    tests = tmp_path / "test_triton_fails.py"
    tests.write_text("def test_right(): pass\ndef test_wrong(): assert 2 + 2 == 5\n")
    code, report = run(tmp_path, "--stages", "kernels", "blending", "--kernel-tests", str(tests))
    said = capsys.readouterr().out
    assert code == 1 and report["wrong"] == ["kernels"] and "wrong: kernels" in said
    assert report["stages"]["blending"]["status"] == "ok"
    kernels = report["stages"]["kernels"]
    assert kernels["results"]["tests"] == {"PASSED": 1, "FAILED": 1, "collected": 2}
    ((name, why),) = kernels["errors"].items()
    assert name.endswith("test_triton_fails.py::test_wrong") and "2 + 2" in why and why in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_fails_at_once(tmp_path):
    output = tmp_path / "check.json"
    assert gpu_check.main(["--output", str(output), "--stages", "device"]) == 1
    entry = json.loads(output.read_text())["stages"]["device"]
    assert entry["status"] == "failed" and "finds no CUDA device" in entry["errors"]["device"]
    assert entry["results"]["versions"]["torch"] == torch.__version__


STAGE = """
import os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {examples!r})
from gpu_notes import Notes
notes = Notes(Path({path!r}), 60)
notes.attempt("measured", lambda: 7)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
notes.attempt("child", lambda: child.pid)
print("last words", flush=True)
{then}
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("then", "status"), [("time.sleep(600)", "out of time"), ("os.abort()", "crashed")]
)
def test_what_was_measured_outlives_its_stage(tmp_path, then, status):
    notes, seen = tmp_path / "notes.json", []
    examples = str(gpu_check.ROOT / "examples")
    program = STAGE.format(examples=examples, path=str(notes), then=then)

    def noted(entry):
        seen.append(dict(entry))

    # Long enough to import torch on a busy machine; what crashes does not take so long.
    entry = gpu_check.run_stage([sys.executable, "-c", program], 15, notes, noted)
    assert entry["status"] == status and entry["results"]["measured"] == 7
    assert "last words" in entry["output"] and seen[-1] == entry
    for _ in range(100):
        if not is_running(entry["results"]["child"]):
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the stage started is still running")


def test_one_failure_costs_one_measurement(tmp_path):
    path = tmp_path / "notes.json"
    notes = Notes(path, 5)

    def partly():
        raise Incomplete("a graph too many", {"seconds": 3})

    notes.attempt("first", lambda: 1 / 0)
    notes.attempt("second", partly)
    notes.attempt("third", lambda: torch.float32)
    notes.attempt("fourth", lambda: 1, needs=60)
    said = json.loads(path.read_text())
    assert said["results"] == {"second": {"seconds": 3}, "third": "torch.float32"}
    assert set(said["errors"]) == {"first", "second"} and not said["finished"]
    assert "ZeroDivisionError" in said["errors"]["first"] and set(said["omitted"]) == {"fourth"}


def test_the_stages_fit_into_eight_minutes():
    assert sum(gpu_check.STAGES.values()) <= gpu_check.ENOUGH <= 470
    assert (8, 131072) == GPU.attention[0] and GPU.graph_steps == 200
    assert set(GPU.attention) == {(b, n) for b in (1, 8) for n in (8192, 32768, 131072)}


def test_small_parts():
    prompt = random_prompt(64, 16, 100)
    assert [len(segment) for segment in prompt.segments[1:-1]] == [16] * 4
    assert max(prompt.ids) < 100 and prompt.segments[1] != prompt.segments[2]
    called = []
    assert device_seconds(lambda: called.append(1), "cpu", 3)["rounds"] == 3 and len(called) == 4
