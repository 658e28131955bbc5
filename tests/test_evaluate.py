"""The whole evaluation: its verdicts, its pictures, and what happens when a part fails."""

import json
import shlex
import sys

import evaluate
import evaluate_selection
import evaluation_pictures
import evaluation_verdicts
import pytest
from families import tiny_model
from selection_tables import CONTROL

ABOUT = "m, torch.float32, cpu"


def write(path, results):
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"about": ABOUT, "digest": "d", "commit": "c"}
    path.write_text("".join(json.dumps(told | one) + "\n" for one in results))


def records(folder, half="report", about=ABOUT):
    return evaluation_verdicts.Records(folder, half, about)


def needle(contestant, prompt, score, kind="2000", budget=0.05):
    own = dict(contestant=contestant, prompt=prompt, score=score, kind=kind, budget=budget)
    return dict(own, kl=[0.1], read=budget)


def test_needles_are_counted_against_dense(tmp_path):
    path = tmp_path / "retrieval" / "single-report.jsonl"
    dense = [needle(CONTROL, name, score) for name, score in (("a", 1.0), ("b", 0.0))]
    dense.append(needle(CONTROL, "c", 1.0, "8000"))

    def verdict(*scores, about=ABOUT):
        prompts = zip("abc", scores, ("2000", "2000", "8000"), strict=True)
        write(path, [*dense, *(needle("default", *prompt) for prompt in prompts)])
        return evaluation_verdicts.needles("single")(records(tmp_path, about=about))

    found = "1 of 2, dense 1; {} that dense has are lost"
    assert verdict(1.0, 0.0, 0.0) == (found.format(0), "**yes**")
    # A needle that only the sparse steps find makes up for none that they lose.
    assert verdict(0.0, 1.0, 1.0) == (found.format(1), "**no**")
    with pytest.raises(evaluation_verdicts.NotRun, match="of this model"):
        verdict(1.0, 1.0, 1.0, about="another model")
    dense[0]["score"] = 0.0
    with pytest.raises(evaluation_verdicts.NotRun, match="dense attention itself"):
        verdict(1.0, 1.0, 1.0)
    write(path, [*dense, needle("default", "a", 1.0)])
    with pytest.raises(evaluation_verdicts.NotRun, match="not finished"):
        evaluation_verdicts.needles("single")(records(tmp_path))


@pytest.mark.parametrize(
    ("kls", "index", "holds"),
    [
        ((0.01, 0.04, 0.05), 0.1, "**yes**"),
        ((0.01, 0.04, 0.05), 0.13, "**no**"),
        ((0.08, 0.06, 0.09), 0.1, "**no**"),
        ((0.01, 0.01, 0.1), 0.1, "yes, but the interval says both"),
        ((0.01, 0.01, 0.16), 0.1, "no, but the interval says both"),
    ],
)
def test_half_of_quests_kl_with_no_larger_index(tmp_path, kls, index, holds):
    results = []
    for i, kl in enumerate(kls):
        common = dict(budget=0.1, prompt=str(i), kind="manual")
        results.append(dict(common, contestant="default", kl=[kl, kl], index=index))
        results.append(dict(common, contestant="Quest", kl=[0.1, 0.1], index=0.12))
    write(tmp_path / "retrieval" / "text-report.jsonl", results)
    assert evaluation_verdicts.nearness("default", "Quest")(records(tmp_path))[1] == holds


@pytest.mark.parametrize(
    ("shares", "holds"),
    [
        ((0.9, 0.5, 0.7), "**yes**"),  # of tokens that are dense's; rounding alone has .5
        ((0.1, 0.2, 0.0), "**no**"),
        ((0.1, 0.9, 0.9), "yes, but the interval says both"),
        ((0.1, 0.9, 0.2), "no, but the interval says both"),
    ],
)
def test_drift_is_judged_by_its_interval(tmp_path, shares, holds):
    def said(contestant, budget, prompt, share):
        own = dict(contestant=contestant, budget=budget, prompt=prompt, tokens=[0] * 8, same=1)
        return dict(own, equal=share, f1=0.5, nll=[1.0] * 4)

    results = [said("dense", None, str(i), 1.0) for i in range(3)]
    results += [said("dense, float32", None, str(i), 0.5) for i in range(3)]
    # In another order: prompts are paired by name.
    results += [said("AnchorDynamicCache", 0.1, str(i), shares[i]) for i in (2, 0, 1)]
    write(tmp_path / "generation" / "generation-report.jsonl", results)
    assert evaluation_verdicts.drift(records(tmp_path))[1] == holds


def test_what_was_not_run_is_said(tmp_path):
    table = evaluation_verdicts.table(tmp_path, "report", ABOUT)
    assert table.count(" | - |") == len(evaluation_verdicts.ASKED)
    facts = [
        dict(contestant=name, prompt=str(i), right=right, kl=[kl])
        for name, right, kl in (("full prefill", True, 0.0), ("default", False, 0.1))
        for i in range(3)
    ]
    write(tmp_path / "blend-verdicts" / "facts-report.jsonl", facts)
    table = evaluation_verdicts.table(tmp_path, "report", ABOUT)
    assert "| 0 against 3 of 3 (0%) | **no** |" in table
    assert "facts in blend-verdicts is not finished" in table
    assert table.count(" | - |") == len(evaluation_verdicts.ASKED) - 1
    assert "not finished" not in evaluation_verdicts.table(tmp_path, "tune", ABOUT)


def test_pictures_of_what_there_is(tmp_path):
    assert evaluation_pictures.draw(tmp_path, "report", ABOUT) == []
    results = [
        needle(name, "a", score, budget=budget)
        for name, score in (("default", 1.0), ("random blocks", 0.0))
        for budget in (0.05, 0.1)
    ]
    write(tmp_path / "retrieval" / "single-report.jsonl", results)
    (picture,) = evaluation_pictures.draw(tmp_path, "report", ABOUT)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert evaluation_pictures.draw(tmp_path, "report", "another model") == []


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
            part.script.arguments().parse_args(shlex.split(given))
