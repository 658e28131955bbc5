"""The evaluation of long free generation: who generates, what is counted, and a quick run."""

import copy
import json
import sys

import evaluate_generation
import generation_tables
import pytest
import torch
from families import random_ids, tiny_model
from generation_contestants import CONTESTANTS, cache_of, generate
from streaming_llm import SINKS, SinksAndNewest
from transformers import DynamicCache
from transformers.cache_utils import StaticLayer


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer(small_model):
    return small_model[1]


@pytest.mark.parametrize("name", ["dense", *CONTESTANTS])
def test_with_the_whole_budget_everyone_generates_as_the_model_does(model, name):
    ids = random_ids(1, 200)
    filled = evaluate_generation.prefilled(model, ids)
    cache = cache_of(filled, name, None if name == "dense" else 1.0)
    made = generate(model, cache, ids, 12, end=None)
    expected = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert made.tokens == expected[0, 200:].tolist()
    assert made.read == pytest.approx(200 + 5.5) and made.seconds > 0
    assert filled.get_seq_length() == 199


def test_a_token_that_ends_texts_is_never_chosen(model):
    ids = random_ids(1, 40)
    filled = evaluate_generation.prefilled(model, ids)
    free = generate(model, copy.deepcopy(filled), ids, 6, end=None).tokens
    assert free[0] not in generate(model, copy.deepcopy(filled), ids, 6, end=free[0]).tokens


def test_sinks_and_newest_are_all_that_is_seen(model):
    ids, tokens, budget = random_ids(1, 200), 8, 0.25
    filled = evaluate_generation.prefilled(model, ids)
    made = generate(model, cache_of(filled, "StreamingLLM", budget), ids, tokens, end=None)
    cache, token, expected, read = copy.deepcopy(filled), ids[:, -1:], [], []
    for seen in range(200, 200 + tokens):
        allowed = int(budget * seen)
        mask = torch.zeros(1, seen, dtype=torch.long)
        mask[:, :SINKS] = mask[:, SINKS - allowed :] = 1
        place = torch.tensor([[seen - 1]])
        out = model(token, past_key_values=cache, attention_mask=mask, position_ids=place)
        token = out.logits[:, -1:].argmax(-1)
        expected.append(token.item())
        read.append(allowed)
    assert made.tokens == expected
    assert made.read == pytest.approx(sum(read) / tokens)
    assert made.tokens != generate(model, filled, ids, tokens, end=None).tokens


def test_a_sparse_cache_reads_what_it_may(model):
    ids = random_ids(1, 400)
    filled = evaluate_generation.prefilled(model, ids)
    for name in ("AnchorDynamicCache", "Quest", "oracle"):
        made = generate(model, cache_of(filled, name, 0.4), ids, 6, end=None)
        assert 100 < made.read <= 0.4 * 406 and made.dense_steps == 0


@torch.no_grad()
def test_layers_that_forget_by_themselves_keep_their_window():
    model, ids = tiny_model("gemma3"), random_ids(1, 81)
    cache = SinksAndNewest(evaluate_generation.prefilled(model, ids), 0.5)
    read = cache.forget(80)
    place = torch.tensor([[80]])
    own = model(ids[:, -1:], past_key_values=cache, position_ids=place).logits[0, -1]
    causal = torch.ones(81, 81, dtype=torch.bool).tril()
    window = causal & (torch.arange(81)[:, None] - torch.arange(81) < model.config.sliding_window)
    cut = causal.clone()
    cut[-1, SINKS : SINKS + 81 - read] = False
    masks = dict(full_attention=cut[None, None], sliding_attention=window[None, None])
    expected = model(ids, attention_mask=masks).logits[0, -1]
    assert read == 40 and not torch.allclose(own, model(ids).logits[0, -1], atol=1e-3)
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


def test_other_layers_are_refused_by_name():
    cache = DynamicCache()
    cache.layers.append(StaticLayer(max_cache_len=8))
    with pytest.raises(ValueError, match="layer 0 is a StaticLayer"):
        SinksAndNewest(cache, 0.5)
    sliding = evaluate_generation.prefilled(tiny_model("gemma3"), random_ids(1, 64))
    sliding.layers.reverse()
    with pytest.raises(ValueError, match="layer 1 has a sliding window, and layer 0 has none"):
        SinksAndNewest(sliding, 0.5)


def test_likelihoods_are_those_of_the_whole_text(model):
    ids, tokens = random_ids(1, 50), random_ids(10).tolist()
    filled = evaluate_generation.prefilled(model, ids)
    quarters = evaluate_generation.likelihoods(model, filled, ids, tokens)
    whole = torch.cat((ids, torch.tensor([tokens])), 1)
    logits = model(whole).logits[0, 49:-1].log_softmax(-1)
    own = -logits[range(10), tokens]
    expected = [own[a:b].mean().item() for a, b in ((0, 3), (3, 6), (6, 8), (8, 10))]
    assert quarters == pytest.approx(expected, abs=1e-4)
    assert filled.get_seq_length() == 49


def test_differences_are_counted_by_place(tokenizer):
    reference = tokenizer(" one two three four")["input_ids"]
    assert len(reference) == 4
    other = [reference[0], reference[2], reference[1], reference[3]]
    found = evaluate_generation.compared(tokenizer, other, reference)
    assert found == dict(same=1, equal=0.5, f1=1.0)
    same = evaluate_generation.compared(tokenizer, reference, reference)
    assert same == dict(same=4, equal=1.0, f1=1.0)


def test_repetition_is_counted():
    assert generation_tables.repeated([1, 2, 3, 4, 5, 6, 7]) == 0
    assert generation_tables.repeated([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert generation_tables.repeated([1] * 9) == pytest.approx(5 / 6)


def parsed(*command):
    return evaluate_generation.arguments().parse_args(command)


def test_halves_share_no_text(tokenizer, monkeypatch):
    numbers = " ".join(map(str, range(100_000, 130_000)))
    monkeypatch.setattr(
        evaluate_generation, "long_texts", lambda data, datasets: {"numbers": numbers}
    )
    command = ("--tokens", "6000", "--places", "2")
    seen = {}
    for half in ("tune", "report"):
        made = evaluate_generation.prompts_of(tokenizer, parsed(*command, "--half", half))
        assert [len(ids) for ids in made.values()] == [6000, 6000]
        whole = [set(tokenizer.decode(ids).split()[1:-1]) for ids in made.values()]
        assert all(len(words) > 500 for words in whole) and not whole[0] & whole[1]
        seen[half] = whole[0] | whole[1]
    assert not seen["tune"] & seen["report"]
    with pytest.raises(ValueError, match="numbers is too short for 20 places"):
        evaluate_generation.prompts_of(tokenizer, parsed("--tokens", "6000", "--places", "20"))


def made_up(contestant, budget, same, nll):
    figures = dict(equal=same / 8, f1=same / 8, read=100, seconds=0.1, dense_steps=0)
    about = dict(prompt="p", contestant=contestant, budget=budget, tokens=[0] * 8)
    return dict(**about, same=same, nll=nll, **figures)


def test_what_rounding_does_is_the_measure():
    results = [
        made_up(generation_tables.REFERENCE, None, 8, [1.0, 1.0, 1.0, 1.0]),
        made_up(generation_tables.PRECISE, None, 4, [1.0, 1.1, 0.9, 1.0]),
        made_up("near", 0.1, 4, [1.0, 0.9, 1.1, 1.0]),
        made_up("far", 0.1, 2, [1.0, 1.2, 1.1, 1.5]),
        dict(prompt="p", contestant="none", budget=0.1, error="none cannot run: no room"),
    ]
    text = generation_tables.tables(results, torch.bfloat16)
    rows = [line for line in text.splitlines() if "yes" in line or ", no" in line]
    assert rows[0].split(" | ")[0] == "| near, 10%" and ", no" not in rows[0]
    verdicts = [cell.split(", ")[1] for cell in rows[1].strip("| ").split(" | ")[1:]]
    assert verdicts == ["no", "no", "no", "yes", "no", "yes", "no"]
    assert "| far, 10% | 0.000 [0.000, 0.000] | 0.200" in text and text.endswith("no room")
    assert "0.500 [0.500, 0.500] |" in text  # 4th - 1st
    text = generation_tables.tables([results[0], *results[2:]], torch.float32)
    assert "no coarser rounding" in text and "yes" not in text


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A random model that knows the real model's tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_quick_run_goes_on_from_its_record(folder, tmp_path, monkeypatch, capsys, dtype):
    command = ["x", "--quick", "--model", folder, "--output", str(tmp_path), "--dtype", dtype]
    monkeypatch.setattr(sys, "argv", command)
    evaluate_generation.main()
    said = capsys.readouterr().out
    path = tmp_path / "generation-report.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    results = [json.loads(line) for line in lines]
    dense = ["dense", "dense, float32"] if dtype == "bfloat16" else ["dense"]
    names = [*dense, *CONTESTANTS]
    assert [one["contestant"] for one in results] == names
    assert all(len(one["tokens"]) == 32 and len(one["nll"]) == 4 for one in results)
    assert results[0]["same"] == 32 and results[0]["read"] == pytest.approx(512 + 15.5)
    assert all(one["read"] < 120 for one in results[len(dense) :])
    assert ("plus 10%" in said) == (dtype == "bfloat16")
    assert ("no coarser rounding" in said) == (dtype == "float32")
    assert (tmp_path / "generation-report.md").read_text() in said

    path.write_text("".join(lines[:-1]))
    monkeypatch.setattr(evaluate_generation, "Prompt", Counted)
    Counted.filled_with.clear()
    evaluate_generation.main()
    again = path.read_text().splitlines(keepends=True)
    assert again[:-1] == lines[:-1]
    last = json.loads(again[-1])
    assert {**last, "seconds": 0} == {**results[-1], "seconds": 0}
    assert len(Counted.filled_with) == len(dense)
    evaluate_generation.main()
    assert len(Counted.filled_with) == len(dense)


class Counted(evaluate_generation.Prompt):
    """A prompt that notes each model it was prefilled with."""

    filled_with: list = []

    def filled(self, model) -> DynamicCache:
        if model not in self._filled:
            self.filled_with.append(model)
        return super().filled(model)


def test_too_few_tokens_for_quarters_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="--new-tokens 3"):
        evaluate_generation.evaluate(parsed("--new-tokens", "3"), model, tokenizer)
