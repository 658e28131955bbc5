"""The evaluation of sparse decoding: its prompts, its rivals, and a run that goes on."""

import json
import sys

import evaluate_selection
import pytest
import retrieval_tasks
import texts
import torch
from benchmark_machine import commit
from contestants import CONTESTANTS
from evaluation_record import Record, results_of
from families import random_ids, tiny_model
from selection_runs import LEAST, compare, decode, prefill
from selection_tables import CONTROL

from anchor_cache import AnchorConfig


@pytest.fixture(scope="module")
def tokenizer(small_model):
    return small_model[1]


@pytest.mark.parametrize("task", retrieval_tasks.MADE)
def test_made_prompts_hold_what_they_ask_for(tokenizer, task):
    prompts = list(retrieval_tasks.made(tokenizer, task, "report", [1000, 2000], 3))
    assert [p.kind for p in prompts] == ["1000"] * 3 + ["2000"] * 3
    assert len({p.name for p in prompts}) == len({p.digest for p in prompts}) == 6
    for prompt in prompts:
        assert 0.93 * int(prompt.kind) < len(prompt.ids) < 1.07 * int(prompt.kind)
        asked = tokenizer.decode(prompt.ids)
        document = asked[: asked.rindex("\n\n")]
        items = [tokenizer.decode(prompt.target[a:b]) for a, b in prompt.items]
        assert all(item.strip() in document for item in items)
        assert len(items) == {"multivalue": 4, "tracing": 4, "counting": 3}.get(task, 1)
    other = next(retrieval_tasks.made(tokenizer, task, "tune", [1000], 3))
    assert not set(other.digest for _ in [0]) & {p.digest for p in prompts}


@pytest.mark.parametrize("task", ["single", "tracing"])
def test_a_fact_stands_at_its_depth(tokenizer, task):
    early, _, late = retrieval_tasks.made(tokenizer, task, "tune", [1000], 3)
    for prompt, depth in ((early, 0.25 / 3), (late, 2.25 / 3)):
        document = tokenizer.decode(prompt.ids)
        number = tokenizer.decode(prompt.target).strip()
        if task == "tracing":
            number = document.split("have the value ")[1].split(",")[0]
        assert abs(document.index(number) / len(document) - depth) < 0.15


def test_common_words_are_the_most_common(tokenizer):
    (prompt,) = retrieval_tasks.made(tokenizer, "counting", "report", [1000], 1)
    words = tokenizer.decode(prompt.ids).split("A word of the day is ")[1:]
    counts = {}
    for word in (w.split(".")[0] for w in words):
        counts[word] = counts.get(word, 0) + 1
    often = sorted(sorted(counts, key=counts.get)[-3:])
    assert [tokenizer.decode(prompt.target[a:b]).strip() for a, b in prompt.items] == often


def test_the_halves_of_a_text_share_no_token(tokenizer):
    tune, report = (
        list(retrieval_tasks.text(tokenizer, half, 2, 512, 16)) for half in ("tune", "report")
    )
    assert len(tune) == len(report) == 2 * len({p.kind for p in tune})
    texts = retrieval_tasks.long_texts()
    for kind in {p.kind for p in tune}:
        spans = []
        for prompt in tune + report:
            if prompt.kind == kind:
                said = tokenizer.decode(prompt.ids + prompt.target)
                start = texts[kind].index(said[:400])
                spans.append((start, start + len(said)))
        spans.sort()
        assert all(end < start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    with pytest.raises(ValueError, match="too short for 20 places"):
        list(retrieval_tasks.text(tokenizer, "tune", 20, 4096, 16))


def place(model, tokens=200, answer=6):
    ids = random_ids(1, tokens + answer)[0].tolist()
    prompt = retrieval_tasks.RetrievalPrompt(
        "x", str(tokens), tuple(ids[:tokens]), tuple(ids[tokens:]), ((0, 1), (1, answer))
    )
    return prefill(model, prompt)


def test_truth_is_the_model_without_any_cache():
    model = tiny_model()
    own = place(model)
    ids = torch.tensor([own.prompt.ids + own.prompt.target])
    logits = model(ids).logits[0, len(own.prompt.ids) - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(own.truth, logits)
    everything = compare(model, own, dict(budget=1.0))
    assert max(map(abs, everything["kl"])) < 1e-5 and everything["read"] == 1
    gold = torch.tensor(own.prompt.target)
    assert everything["nll"] == pytest.approx(-logits.gather(1, gold[:, None]).mean().item())


def test_items_are_right_if_each_of_their_tokens_is_the_most_likely():
    model = tiny_model()
    own = place(model)
    best = own.truth.argmax(-1)
    own.target = best.clone()
    assert compare(model, own, dict(budget=1.0))["score"] == 1
    own.target[3] = (best[3] + 1) % 7  # within the second of two items
    assert compare(model, own, dict(budget=1.0))["score"] == 0.5


def test_evicted_tokens_are_gone_and_the_others_stay_where_they_were():
    model = tiny_model()
    own = place(model)
    logits, cache, _ = decode(model, own, dict(budget=0.3, evict=True))
    n = len(own.prompt.ids) - 1
    assert cache.layers[0].keys.shape[2] == max(int(0.3 * (n + 6)), int(LEAST / n * (n + 6)))
    assert not torch.allclose(logits, own.truth, atol=1e-3)
    whole, _, _ = decode(model, own, dict(budget=1.0, evict=True))
    torch.testing.assert_close(whole, own.truth, atol=1e-4, rtol=1e-4)


def test_every_contestant_is_a_valid_setting():
    for group in CONTESTANTS.values():
        for settings in group.values():
            AnchorConfig(**{"budget": 0.1, **{k: v for k, v in settings.items() if k != "evict"}})


def test_a_record_forgets_an_unfinished_line_and_names_a_wrong_one(tmp_path):
    path = tmp_path / "a" / "record.jsonl"
    Record(path).add("one", {"x": 1})
    path.write_text(path.read_text() + '{"key": "tw')
    record = Record(path)
    assert record.known["one"]["x"] == 1 and set(record.known) == {"one"}
    assert record.known["one"]["commit"] == commit()
    record.add("two", {"x": 2})
    assert Record(path).known["two"]["x"] == 2 == results_of(path)[1]["x"]
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1.*remove"):
        Record(path)


def test_the_evaluation_runs_and_goes_on(tokenizer, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "tiny"
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = ["x", "--quick", "--model", str(folder), "--dtype", "float32"]
    command += ["--output", str(tmp_path / "out"), "--tasks", "text", "single"]
    monkeypatch.setattr(sys, "argv", command)
    evaluate_selection.main()
    said = capsys.readouterr().out
    path = tmp_path / "out" / "single-report.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(results) == 2 * len(CONTESTANTS["main"])
    by_name = {r["contestant"]: r for r in results}
    assert sum(by_name[CONTROL]["kl"]) < 1e-4 < sum(by_name["random blocks"]["kl"])
    assert by_name["default"]["read"] < 0.15 and by_name["default"]["index"] > 0
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    evaluate_selection.main()
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert again[:-1] == results[:-1] and again[-1]["kl"] == results[-1]["kl"]
    assert said.count("## ") == 2


def test_a_contestant_that_nobody_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--only", "nobody"])
    args = evaluate_selection.arguments().parse_args()
    with pytest.raises(ValueError, match="nobody.*choose of"):
        evaluate_selection.chosen(args)


def test_texts_of_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [json.dumps({"body": f"{i} " + "word " * 2000}) for i in range(20)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    given = f"{folder}:::body"
    assert texts.long_texts(datasets=[given])[given].startswith("0 word word")
    with pytest.raises(ValueError, match="no column 'text'; there are .'body'."):
        texts.long_texts(datasets=[str(folder)])
    (folder / "train.jsonl").write_text(rows[0])
    with pytest.raises(ValueError, match="10,002 characters, at least 150,000"):
        texts.long_texts(datasets=[given])
