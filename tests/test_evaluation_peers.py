"""Peers in an evaluation: what is sent and recorded, and what their script computes."""

import contextlib
import importlib
import sys
import types

import benchmark_peers
import evaluation_peers
import pytest
import torch
from benchmark_timing import WrongResult
from evaluation_metrics import kl
from evaluation_record import Record
from families import random_ids, tiny_model
from transformers import Cache

BUDGETS = [0.1, 0.05]
PLACES = [dict(name=name, ids=list(range(2, 40)), n_target=4) for name in "abc"]


class Peer:
    """Stands in for run_peer: answers every place, or says why not."""

    def __init__(self, error=None, unable=()):
        self.error, self.unable, self.sent = error, unable, []

    def __call__(self, name, model, prompt, script, presses, budgets, dtype, device, least):
        assert name == "kvpress" and script == "peer_kvpress_quality.py"
        self.sent.append([place["name"] for place in prompt["places"]])
        if self.error and len(self.sent) > 1:
            return {"error": self.error}
        rows = [
            dict(budget=b, contestant=p, place=place["name"])
            | (dict(error="no") if p in self.unable else dict(kl=[0.5], best=[True]))
            for place in prompt["places"]
            for b in budgets
            for p in presses
        ]
        return dict(versions=dict(kvpress="0"), rows=rows)


def test_only_what_the_record_lacks_is_sent(tmp_path, monkeypatch):
    peer = Peer()
    monkeypatch.setattr(evaluation_peers, "run_peer", peer)

    def rows(places, path="record.jsonl", **options):
        record = Record(tmp_path / path)
        return evaluation_peers.kvpress_quality(places, BUDGETS, "m", record, **options)

    presses = len(evaluation_peers.PRESSES)
    first = rows(PLACES[:2])
    assert len(first) == 2 * 2 * presses and peer.sent == [["a", "b"]]
    assert {one["place"] for one in first} == {"a", "b"}
    assert all(one["kl"] == [0.5] and one["versions"] == {"kvpress": "0"} for one in first)
    assert len(rows(PLACES)) == 3 * 2 * presses and peer.sent[1:] == [["c"]]
    assert rows(PLACES[:2]) == first and len(peer.sent) == 2
    rows([dict(PLACES[0], ids=[5] * 38)])
    assert peer.sent[2:] == [["a"]]
    rows(PLACES, dtype="float32", places_at_once=2)
    assert peer.sent[3:] == [["a", "b"], ["c"]]


def test_a_process_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_peers, "run_peer", Peer("killed", unable=["SnapKVPress"]))

    def rows():
        record = Record(tmp_path / "record.jsonl")
        one_by_one = dict(places_at_once=1)
        return evaluation_peers.kvpress_quality(PLACES[:2], BUDGETS, "m", record, **one_by_one)

    made = rows()
    assert [one["place"] for one in made if "error" not in one] == ["a"] * 6
    assert [one["error"] for one in made if "error" in one] == ["no"] * 2 + ["killed"] * 2
    assert [one["budget"] for one in made if one["place"] is None] == BUDGETS
    again = Peer()
    monkeypatch.setattr(evaluation_peers, "run_peer", again)
    made = rows()
    assert again.sent == [["b"]] and len(made) == 16
    assert [one["place"] for one in made if "error" in one] == ["a"] * 2


def test_a_peer_that_is_not_installed_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_peers, "ROOT", tmp_path)
    record = Record(tmp_path / "record.jsonl")
    rows = evaluation_peers.kvpress_quality(PLACES, BUDGETS, "m", record)
    assert [(one["budget"], one["contestant"]) for one in rows] == [
        (0.1, "kvpress"),
        (0.05, "kvpress"),
    ]
    assert all("not installed: make bench-peers" in one["error"] for one in rows)
    assert not record.known


def test_a_script_of_its_own_gets_lists_of_options(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_peers, "ROOT", tmp_path)
    python = tmp_path / ".venv-some" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / ".venv-some" / "installed").touch()
    python.write_text('#!/bin/sh\necho "{\\"said\\": \\"$*\\"}" >"$7"\n')
    python.chmod(0o755)
    options = dict(script="other.py", budgets=[0.1, 0.2], dtype="auto")
    said = benchmark_peers.run_peer("some", "m", {}, **options)["said"]
    assert "/other.py --model m" in said and said.endswith("--budgets 0.1 0.2 --dtype auto")


class Newest:
    """A press as kvpress has them, which keeps the newest tokens."""

    spoiled = False

    def __init__(self, compression_ratio):
        self.ratio = compression_ratio

    def cut(self, module, args, kwargs, output):
        (cache,) = [value for value in kwargs.values() if isinstance(value, Cache)]
        layer = cache.layers[module.layer_idx]
        kept = int(layer.keys.shape[2] * (1 - self.ratio)) - self.spoiled
        layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]

    @contextlib.contextmanager
    def __call__(self, model):
        attention = [layer.self_attn for layer in model.model.layers]
        hooks = [a.register_forward_hook(self.cut, with_kwargs=True) for a in attention]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class Unable(Newest):
    """Compresses nothing, and refuses to compress."""

    def cut(self, *args):
        if self.ratio:
            raise AssertionError("cannot")


@pytest.fixture
def script(monkeypatch):
    """The peer's script, with presses of our own for kvpress'."""

    class Spoiled(Newest):
        spoiled = True

    fake = types.SimpleNamespace(Newest=Newest, Unable=Unable, Spoiled=Spoiled)
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    monkeypatch.delitem(sys.modules, "peer_kvpress_quality", raising=False)
    yield importlib.import_module("peer_kvpress_quality")
    sys.modules.pop("peer_kvpress_quality")


def test_the_script_compares_with_what_a_cut_context_says(script, monkeypatch):
    model, ids = tiny_model(), random_ids(1, 60)
    place = dict(name="a", ids=ids[0].tolist(), n_target=9)
    whole, cut, unable = (
        script.rows_of(model, [place], ["Newest"], [1.0, 0.5])
        + script.rows_of(model, [place], ["Unable"], [1.0, 0.5])[1:]
    )
    assert max(whole["kl"]) < 1e-5 and whole["attended"] == whole["kept"] == 1
    truth = model(ids).logits[0, 50:-1].log_softmax(-1)
    # Only the fed tokens miss what was cut; the context was prefilled with it.
    mask = torch.ones(60, 60, dtype=torch.bool).tril()
    mask[50:, :25] = False
    other = model(ids, attention_mask=mask[None, None]).logits[0, 50:-1].log_softmax(-1)
    targets = ids[0, 51:]
    assert cut["kl"] == pytest.approx(kl(truth, other).tolist(), rel=1e-3, abs=1e-5)
    assert cut["nll"] == pytest.approx(-other[range(9), targets].mean().item(), abs=1e-4)
    assert cut["kept"] == 0.5 and 0.5 < cut["attended"] < 0.6 and cut["prefill"] > 0
    assert not all(cut["best"]) and unable["error"] == "AssertionError: cannot"
    monkeypatch.setattr(Newest, "window_size", 25, raising=False)
    (row,) = script.rows_of(model, [place], ["Newest"], [0.5])
    assert row["error"] == "its window takes 25 tokens, the budget holds 25"


def test_targets_that_are_the_most_likely_ones_are_right(script):
    model, ids = tiny_model(), random_ids(1, 40)
    ids = model.generate(ids, max_new_tokens=5, do_sample=False)
    place = dict(name="a", ids=ids[0].tolist(), n_target=5)
    (row,) = script.rows_of(model, [place], ["Newest"], [1.0])
    assert row["best"] and all(row["best"])


def test_a_press_that_changes_what_it_does_not_compress_stops_the_script(script):
    place = dict(name="a", ids=random_ids(40).tolist(), n_target=5)
    with pytest.raises(WrongResult, match="Spoiled, compressing nothing, is off by"):
        script.rows_of(tiny_model(), [place], ["Spoiled"], [0.5])
