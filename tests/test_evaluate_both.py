"""The evaluation of a blended prompt that is decoded over sparsely."""

import json
import sys

import evaluate_both
import pytest
from families import tiny_model


def test_both_caches_are_compared_with_dense_attention_over_full_prefill(
    small_model, tmp_path, monkeypatch, capsys
):
    _, tokenizer = small_model
    sizes = dict(vocab_size=len(tokenizer), max_position_embeddings=4096)
    tiny_model(**sizes).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    command = ["x", "--quick", "--model", str(tmp_path / "tiny"), "--dtype", "float32"]
    command += ["--ratios", "0.15", "1", "--budgets", "0.2", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    evaluate_both.main()
    tables = capsys.readouterr().out
    assert "## both caches: continuation" in tables and "## both caches: facts" in tables

    path = tmp_path / "continuation-report.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(results) == 2 * 3 * 3
    worst = {}
    for one in results:
        assert len(one["kl"]) == 8
        assert (one["read"] < 0.3) == one["way"].endswith("sparse 0.2")
        worst[one["way"]] = max(worst.get(one["way"], 0), *one["kl"])
    assert worst.pop("full prefill, dense") == 0
    same = {name for name, kl in worst.items() if kl < 1e-5}
    assert same == {
        "full prefill, sparse 1",
        "blend 1, dense",
        "blend 1, sparse 1",
    }
    assert worst["blend 0.15, sparse 1"] == pytest.approx(worst["blend 0.15, dense"], rel=1e-2)
    assert worst["blend 1, sparse 0.2"] == pytest.approx(
        worst["full prefill, sparse 0.2"], rel=1e-2
    )

    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(sys, "argv", [*command, "--tasks", "continuation"])
    evaluate_both.main()
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == [
        one["key"] for one in results
    ]
