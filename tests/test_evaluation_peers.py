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
from blend_answers import compare, prefilled
from blend_tasks import BlendPrompt
from evaluation_metrics import kl
from evaluation_record import Record
from families import random_ids, tiny_model
from transformers import Cache, DynamicCache

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


PROMPTS = {
    f"key {name}": BlendPrompt(name, "k", ((5, 6, 7), (8, 9), (10, 11, 12)), (13, 14))
    for name in "abc"
}


def test_kvboost_gets_a_few_prompts_per_process(monkeypatch):
    sent = []

    def run_peer(name, model, prompt, script, dtype, device):
        assert name == "kvboost" and script == "peer_kvboost_quality.py"
        sent.append([one["name"] for one in prompt["prompts"]])
        if len(sent) == 2:
            return {"error": "killed"}
        rows = [dict(kl=[0.5])] * (len(sent[-1]) - 1) + [dict(error="none found")]
        return dict(versions=dict(kvboost="0"), rows=rows)

    monkeypatch.setattr(evaluation_peers, "run_peer", run_peer)

    def made(prompts, at_once):
        options = dict(answer_tokens=4, at_once=at_once)
        return dict(evaluation_peers.kvboost_quality(prompts, "m", **options))

    found = made(PROMPTS, 2)
    assert sent == [["a", "b"], ["c"]] and found["key c"] == dict(error="killed")
    assert found["key a"] == dict(kl=[0.5], versions=dict(kvboost="0"))
    assert found["key b"] == dict(error="none found")
    sent.append("so that no process is killed")
    assert made(dict(list(PROMPTS.items())[2:]), 8) == {"key c": dict(error="none found")}
    assert made({}, 8) == {} and len(sent) == 4


class Reusing:
    """A KVBoost that reuses what was warmed, keys where they were, and recomputes nothing."""

    spoiled = False

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.stored = model, tokenizer, {}
        self.cacheblend_recompute = types.SimpleNamespace(recompute_ratio=0.0)

    def reset_cache(self):
        self.stored.clear()

    def _encoded(self, ids, cache):
        self.model(torch.tensor([ids]), past_key_values=cache)
        return cache

    def warm(self, text):
        for _, _, ids in self._split_tokens(self._encode(text)):
            self.stored[tuple(ids)] = self._encoded(ids, DynamicCache())

    def generate(self, text, max_new_tokens, mode):
        cache, reused = DynamicCache(), 0
        splits = self._split_tokens(self._encode(text))
        for _, _, ids in splits:
            found = self.stored.get(tuple(ids))
            for i, layer in enumerate(found.layers if found else ()):
                cache.update(layer.keys, layer.values, i)
            reused += len(ids) if found else 0
        live = [id for _, _, ids in splits if tuple(ids) not in self.stored for id in ids]
        self._encoded(live, cache)
        if self.spoiled:
            cache.layers[0].values += 1
        return types.SimpleNamespace(kv_reuse_ratio=reused / splits[-1][1])


def test_the_kvboost_script_judges_as_other_contestants_are_judged(monkeypatch, small_model):
    fake = types.ModuleType("kvboost")
    fake.KVBoost = Reusing
    engine = types.ModuleType("kvboost.engine")
    engine.GenerationMode = types.SimpleNamespace(CHUNK_KV_REUSE="reuse")
    monkeypatch.setitem(sys.modules, "kvboost", fake)
    monkeypatch.setitem(sys.modules, "kvboost.engine", engine)
    script = importlib.import_module("peer_kvboost_quality")
    monkeypatch.delitem(sys.modules, "peer_kvboost_quality")
    model, tokenizer, prompt = tiny_model(), small_model[1], PROMPTS["key a"]
    engine = script.OfSegments(model, tokenizer)
    figures = script.figures_of(engine, tokenizer, prompt, 4)
    with torch.no_grad():
        _, truth = compare(model, tokenizer, prefilled(model, prompt), prompt, None, 4)
        joined = DynamicCache()
        for segment in prompt.segments[:-1]:
            own = DynamicCache()
            model(torch.tensor([segment]), past_key_values=own)
            for i, layer in enumerate(own.layers):
                joined.update(layer.keys, layer.values, i)
        model(torch.tensor([prompt.segments[-1][:-1]]), past_key_values=joined)
        expected, _ = compare(model, tokenizer, joined, prompt, truth, 4)
    assert figures["kl"] == pytest.approx(expected["kl"], rel=1e-3) and max(figures["kl"]) > 1e-4
    assert figures["nll"] == pytest.approx(expected["nll"]) and figures["right"] is False
    assert figures["reused"] == pytest.approx(5 / 7) and figures["seconds"] > 0
    monkeypatch.setattr(Reusing, "warm", lambda self, text: None)
    assert (
        script.figures_of(engine, tokenizer, prompt, 4)["error"]
        == "it reused 0% of the tokens, not all chunks"
    )
    monkeypatch.setattr(Reusing, "spoiled", True)
    with pytest.raises(WrongResult, match="prefill is off"):
        script.figures_of(engine, tokenizer, prompt, 4)
