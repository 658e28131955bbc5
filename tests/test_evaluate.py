"""The whole evaluation: its verdicts, its pictures, and what happens when a part fails."""

import json
import sys

import evaluate
import evaluate_selection
import evaluation_pictures
import evaluation_verdicts
import pytest
from families import tiny_model
from selection_tables import CONTROL


def write(path, results):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in results))


def needle(contestant, prompt, score, kind="2000", budget=0.05):
    own = dict(contestant=contestant, prompt=prompt, score=score, kind=kind, budget=budget)
    return dict(own, kl=[0.1])


def test_needles_are_counted_against_dense(tmp_path):
    path = tmp_path / "retrieval" / "single-report.jsonl"
    dense = [
        needle(CONTROL, "a", 1.0),
        needle(CONTROL, "b", 0.0),
        needle(CONTROL, "c", 1.0, "8000"),
    ]
    write(path, [*dense, needle("default", "a", 1.0), needle("default", "b", 0.0)])
    assert evaluation_verdicts.needles(tmp_path) == (
        "1 of 2, dense 1; 0 that dense has are lost",
        True,
    )
    # A needle that only the sparse steps find makes up for none that they lose.
    write(path, [*dense, needle("default", "a", 0.0), needle("default", "b", 1.0)])
    said, holds = evaluation_verdicts.needles(tmp_path)
    assert said.endswith("1 that dense has are lost") and not holds
    write(path, [*dense, needle("default", "c", 0.0, "8000")])
    with pytest.raises(evaluation_verdicts.NotRun, match="up to 4"):
        evaluation_verdicts.needles(tmp_path)


@pytest.mark.parametrize(
    "kl, index, holds", [(0.05, 0.1, True), (0.051, 0.1, False), (0.05, 0.13, False)]
)
def test_half_of_quests_kl_with_no_larger_index(tmp_path, kl, index, holds):
    common = dict(budget=0.1, prompt="x", kind="manual")
    write(
        tmp_path / "retrieval" / "text-report.jsonl",
        [
            dict(common, contestant="default", kl=[kl, kl], index=index),
            dict(common, contestant="minmax (Quest)", kl=[0.1, 0.1], index=0.12),
        ],
    )
    assert evaluation_verdicts.nearness(tmp_path)[1] is holds


def test_what_was_not_run_is_said(tmp_path):
    table = evaluation_verdicts.table(tmp_path)
    assert table.count("not run: ") == len(evaluation_verdicts.ASKED)
    write(
        tmp_path / "blend" / "facts-report.jsonl",
        [
            dict(contestant="full prefill", right=True, kl=[0.0]),
            dict(contestant="default", right=False, kl=[0.1]),
        ],
    )
    table = evaluation_verdicts.table(tmp_path)
    assert "0.00 against 1.00 (0%) | **no** |" in table
    assert "no CacheBlend as published" in table


def test_pictures_of_what_there_is(tmp_path):
    assert evaluation_pictures.draw(tmp_path) == []
    results = [
        needle(name, "a", score, budget=budget)
        for name, score in (("default", 1.0), ("random blocks", 0.0))
        for budget in (0.05, 0.1)
    ]
    write(tmp_path / "retrieval" / "single-report.jsonl", results)
    (picture,) = evaluation_pictures.draw(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def tiny(small_model, tmp_path):
    folder, tokenizer = tmp_path / "tiny", small_model[1]
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_part_that_fails_is_reported_and_the_others_run(tiny, tmp_path, monkeypatch, capsys):
    ours = "--tasks text --only default"
    parts = {
        "retrieval": evaluate.Part(evaluate_selection, ours),
        "broken": evaluate.Part(evaluate_selection, "--tasks text --only nobody"),
    }
    monkeypatch.setattr(evaluate, "PARTS", parts)
    command = ["x", "--quick", "--model", tiny, "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*command, "--parts", *parts])
    assert evaluate.main() == 1
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "**broken failed**: ValueError: --only ['nobody']" in summary
    assert "## text, 10% read" in summary and "| default |" in summary
    assert "too few samples" in summary
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*command, "--parts", "retrieval"])
    assert evaluate.main() == 0
    assert "failed" not in capsys.readouterr().out


def test_every_part_has_valid_arguments():
    for part in evaluate.PARTS.values():
        for given in (part.arguments, f"{part.arguments} {part.fewer}"):
            part.script.arguments().parse_args(given.split())
