"""The evaluation of blended prompts: metrics, prompts, counts, and a run of each script."""

import json
import sys

import blend_contestants
import blend_operations
import blend_tasks
import evaluate_blend
import evaluation_metrics
import kv_deviation
import pytest
import torch
from blend_answers import distributions
from blend_runs import Stores, filled
from families import random_ids, tiny_model
from transformers import AutoModelForCausalLM

from anchor_cache import BlendConfig, BlendedCache, ChunkStore


@pytest.mark.parametrize(
    "answer, accepted, f1, em",
    [
        ("The Tom Hale.", ["tom hale"], 1.0, 1.0),
        ("engineer Tom Hale", ["Tom Hale"], 0.8, 0.0),
        ("1932", ["in 1958", "1932"], 1.0, 1.0),
        ("no no", ["no"], 2 / 3, 0.0),
        ("", ["x"], 0.0, 0.0),
        ("a", ["the"], 1.0, 1.0),
    ],
)
def test_answers_are_scored_as_squad_does(answer, accepted, f1, em):
    assert evaluation_metrics.f1(answer, accepted) == pytest.approx(f1)
    assert evaluation_metrics.exact_match(answer, accepted) == em


def test_the_interval_covers_the_mean_as_often_as_it_says():
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for _ in range(100):
        low, high = evaluation_metrics.interval(torch.randn(40, generator=generator).tolist(), 200)
        hits += low <= 0 <= high
    assert 88 <= hits <= 99
    assert evaluation_metrics.interval([2.0, 2.0]) == (2.0, 2.0)


def test_kl_is_that_of_torch():
    truth, other = torch.randn(2, 5, 30).log_softmax(-1)
    expected = torch.nn.functional.kl_div(other, truth, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(evaluation_metrics.kl(truth, other), expected)


@pytest.fixture(scope="module")
def tokenizer(small_model):
    return small_model[1]


def test_facts_are_cut_by_chunk_borders(tokenizer):
    for cut, whole in zip(
        blend_tasks.facts(tokenizer, "tune", 3),
        blend_tasks.facts(tokenizer, "tune", 3, split=False),
        strict=True,
    ):
        number = tokenizer.decode(cut.gold).strip()
        assert number.isdigit() and len(number) == 7
        fact = f"The special magic number for {cut.kind} is {number}."
        cut_chunks, chunks = (list(map(tokenizer.decode, p.segments[1:-1])) for p in (cut, whole))
        assert "".join(cut_chunks) == "".join(chunks)
        assert sum(fact in chunk for chunk in chunks) == 1
        assert not any(fact in chunk for chunk in cut_chunks)
        (border,) = [i for i, chunk in enumerate(cut_chunks) if chunk.startswith(f" is {number}.")]
        assert cut_chunks[border - 1].endswith(f"magic number for {cut.kind}")
        assert cut.kind in tokenizer.decode(cut.segments[-1])


@pytest.fixture
def data(tmp_path):
    """A data folder in XQuAD's format: four articles of five paragraphs."""
    articles = []
    for a in "abcd":
        paragraphs = []
        for i in range(5):
            answer = {"text": f"{a}{i}", "answer_start": 8}
            qas = [{"question": f"Which one is {a}?", "answers": [answer]}]
            paragraphs.append({"context": f"This is {a}{i}. " * 4, "qas": qas})
        articles.append({"title": a, "paragraphs": paragraphs})
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "xquad.en.json").write_text(json.dumps({"data": articles}))
    return folder


def test_no_prompt_is_in_both_halves(tokenizer, data):
    def pieces(prompts, kind):
        """What two halves must not share: cities, articles, and pieces of text."""
        if kind != "continuation":
            return {p.kind for p in prompts}
        return {tuple(p.ids[i : i + 64]) for p in prompts for i in range(1, len(p.ids), 64)}

    for kind, make in {
        "facts": lambda half: blend_tasks.facts(tokenizer, half, 8),
        "continuation": lambda half: blend_tasks.continuation(tokenizer, half, 30),
        "xquad": lambda half: blend_tasks.xquad(tokenizer, half, 4, data),
    }.items():
        tune, report = make("tune"), make("report")
        assert make("tune") == tune
        assert not pieces(tune, kind) & pieces(report, kind)
        assert len({p.digest for p in tune + report}) == len(tune) + len(report)


class Counted:
    """Counts the multiply-adds of every linear map that runs while it is entered."""

    def __init__(self, model):
        self.total, self.model = 0, model

    def __enter__(self):
        def note(module, args, output):
            self.total += module.weight.numel() * args[0].shape[:-1].numel()

        linear = [m for m in self.model.modules() if isinstance(m, torch.nn.Linear)]
        self.hooks = [m.register_forward_hook(note) for m in linear]
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("selector", ["query", "hkvd", "first", "none"])
def test_operations_are_those_that_run(tmp_path, family, selector):
    model = tiny_model(family)
    text = model.config
    prefix, question = [1, 5, 9], random_ids(6).tolist()
    chunks = [random_ids(n).tolist() for n in (20, 15)]
    ids = torch.tensor([prefix + chunks[0] + chunks[1] + question])
    tokens, pair = ids.shape[1], 2 * text.num_attention_heads * text.head_dim
    windows = [None] * text.num_hidden_layers
    if family == "gemma3":
        windows = [24 if kind == "sliding_attention" else None for kind in text.layer_types]

    def pairs(rows, layers):
        """Naively, every key that every row sees."""
        return sum(
            pair
            for window in windows[:layers]
            for row in rows
            for key in range(tokens)
            if key <= row and (window is None or row - key < window)
        )

    with Counted(model) as counted:
        model(ids, logits_to_keep=1)
    expected = counted.total + pairs(range(tokens), None)
    assert blend_operations.prefill_operations(model, tokens) == expected

    store = ChunkStore(tmp_path, model, prefix=prefix)
    store.add(chunks, progress=False)
    config = BlendConfig(recompute_ratio=0.25, selector=selector)
    with Counted(model) as counted:
        cache = BlendedCache.blend(model, store, [prefix, *chunks, question], config)
        model(ids[:, -1:], past_key_values=cache)
    report = cache.report()
    fresh, last = list(range(38, tokens - 1)), len(windows)
    expected = counted.total + pairs([*report.selected, *fresh], last - 1)
    expected += pairs([tokens - 1], last)
    if selector == "query":
        expected += pairs(fresh, last)
    if selector == "hkvd":
        # Layer 0 runs for all; at the check layer the blend computes the keys of some rows twice.
        left = set(range(23, 38)) - set(report.selected)
        expected += pairs(left, 1)
        attention = model.get_decoder().layers[1].self_attn
        twice = [attention.q_proj, attention.k_proj, attention.v_proj]
        again = len(report.selected) + len(fresh)
        expected -= again * sum(m.weight.numel() for m in twice)
    assert blend_operations.blend_operations(model, report, tokens) == expected


def test_contestants_are_settings_of_a_blend():
    for settings in blend_contestants.chosen(list(blend_contestants.CONTESTANTS)).values():
        encoding = settings.get("encoding", "prefix")
        assert encoding in blend_contestants.ENCODINGS
        of_the_store = ("encoding", "stored")
        BlendConfig(**{n: value for n, value in settings.items() if n not in of_the_store})
    with pytest.raises(ValueError, match="only=.*nobody.*choose of"):
        blend_contestants.chosen(["ratios"], ["nobody"])


@pytest.mark.parametrize("other", [lambda x: x, lambda x: -x, lambda x: x**3])
def test_rank_correlation_sees_only_the_order(other):
    values = torch.randn(50)
    expected = -1 if other(torch.ones(1)) < 0 else 1
    assert kv_deviation.spearman(values, other(values)) == pytest.approx(expected)


def test_share_of_the_tokens_that_carries_the_deviation():
    deviation = torch.tensor([1.0, 3.0, 1.0, 0.0, 1.0, 2.0])  # squares: 9 4 1 1 1 0 of 16
    shares = [kv_deviation.tokens_carrying(share, deviation) for share in (0.5, 0.8, 0.85, 1.0)]
    assert shares == pytest.approx([1 / 6, 2 / 6, 3 / 6, 5 / 6])
    curve = kv_deviation.curve(deviation)
    assert curve[0] == 0 and curve[50] == pytest.approx(14 / 16) and curve[-1] == pytest.approx(1)


@pytest.fixture(scope="module")
def tiny(tokenizer, tmp_path_factory):
    """A random model that knows the real model's tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_evaluation_runs_and_goes_on_from_its_record(tiny, data, tmp_path, monkeypatch, capsys):
    tasks = ["facts", "continuation", "xquad", "prefill"]
    command = ["x", "--quick", "--model", tiny, "--data", str(data), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--dtype", "float32", "--tasks", *tasks])
    evaluate_blend.main()
    tables = capsys.readouterr().out
    assert all(f"## {task}" in tables for task in tasks)
    path = tmp_path / "facts-report.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(results) == 2 * (1 + len(blend_contestants.QUICK))
    assert all((sum(one["kl"]) == 0) == (one["contestant"] == "full prefill") for one in results)
    assert all(one["seconds"] > 0 for one in results)
    shares = {one["contestant"]: one["recomputed"] for one in results}
    assert shares["full prefill"] is None and shares["full reuse, prefix"] == 0
    assert 0.1 < shares["default"] < 0.3 < shares["CacheBlend as published, 0.15"]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(sys, "argv", [*command, "--dtype", "float32", "--tasks", "facts"])
    evaluate_blend.main()
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert again[:-1] == results[:-1]
    assert again[-1].pop("seconds") != results[-1].pop("seconds") and again == results


def test_continuation_has_a_table_per_size(tiny, data, tmp_path, monkeypatch, capsys):
    sizes = ["--chunks", "2", "3", "200", "--chunk-tokens", "24", "--prompts", "1"]
    command = ["x", "--model", tiny, "--dtype", "float32", "--data", str(data), *sizes]
    only = ["--only", "full reuse, prefix", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--tasks", "continuation", *only])
    evaluate_blend.main()
    tables = capsys.readouterr().out
    for size in ("2x24", "3x24"):
        file = tmp_path / f"continuation-{size}-report.jsonl"
        full, reuse = [json.loads(line) for line in file.read_text().splitlines()]
        # The first chunk after the prefix was encoded in its real context.
        assert full["kl"] == [0] * 128
        assert (max(reuse["kl"]) < 1e-5) == (size == "2x24")
        assert (reuse["recomputed"] is None) == (size == "2x24")
    assert "## continuation, 200 x 24" in tables
    assert "Not run: up to 4,961 tokens are needed, and the model has 4,096 positions" in tables


@pytest.mark.parametrize("encoding", blend_contestants.ENCODINGS)
def test_encodings_are_what_they_say(tiny, tokenizer, tmp_path, encoding):
    """Everything recomputed, or nothing reused but the prefix, is full prefill."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    (prompt,) = blend_tasks.facts(tokenizer, "tune", 1)
    stores = Stores(tmp_path / "stores", model)
    truth = distributions(model, filled(model, prompt, None, stores), prompt)

    def distance(**settings):
        cache = filled(model, prompt, dict(settings, encoding=encoding), stores)
        assert cache.get_seq_length() == len(prompt.ids) - 1
        return evaluation_metrics.kl(truth, distributions(model, cache, prompt)).mean().item()

    reuse = distance(recompute_ratio=0.0)
    if encoding == "prefix only":
        assert reuse < 1e-5
    else:
        assert reuse > 1e-3
    if encoding != "unmoved":
        assert distance(recompute_ratio=1.0) < 1e-5


def test_the_deviation_tool_runs(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["x", "--model", tiny, "--dtype", "float32", "--prompts", "2", "--chunk-tokens", "24"]
        + ["--selectors", "HKVD on values", "first (EPIC)"]
        + ["--ratios", "0", "0.3", "1", "--output", str(tmp_path)],
    )
    kv_deviation.main()
    assert "rank corr." in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [one["layer"] for one in figures["layers"]] == [1, 2, 3]
    assert figures["layers"][0]["first"] == pytest.approx(1)
    for own in figures["kl"].values():
        assert own["1"] < 1e-4 < own["0"]
    for name in ("concentration", "correlation", "quality"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
