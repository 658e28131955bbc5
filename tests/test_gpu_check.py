"""The check of a GPU, rehearsed on a CPU, so that no time on a GPU is lost to it."""

import json

import gpu_check
import pytest
import torch


@pytest.mark.parametrize("stage", ["kernels", "operations", "decode", "blend"])
def test_a_stage_is_rehearsed(stage, tmp_path, capsys):
    output = tmp_path / "check.json"
    arguments = ["--rehearse", "--output", str(output), "--stages", stage]
    assert gpu_check.main(arguments) == 0, capsys.readouterr().out
    found = json.loads(output.read_text())["stages"][stage]
    assert found["ok"] and found["lines"] and found["lines"][0] in capsys.readouterr().out


def test_a_stage_that_fails_or_hangs_is_said_and_the_others_run(tmp_path, capsys):
    output = tmp_path / "check.json"
    options = ["--output", str(output), "--stages", "machine", "attention"]
    if not torch.cuda.is_available():
        assert gpu_check.main(options) == 1  # there is no GPU
        stages = json.loads(output.read_text())["stages"]
        assert not stages["machine"]["ok"] and "finds no CUDA device" in stages["machine"]["error"]
        assert set(stages) == {"machine", "attention"}
    assert gpu_check.main([*options, "--rehearse", "--limit", "0.5"]) == 1
    assert "more than 0 s" in capsys.readouterr().out
