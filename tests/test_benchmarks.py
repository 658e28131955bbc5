"""The benchmarks: a quick run of every case, and that wrong results are refused, not timed."""

import json

import benchmark
import benchmark_attention
import benchmark_blend
import benchmark_decode
import benchmark_peers
import pytest
import torch
from benchmark_machine import copy_bandwidth, peak_memory
from benchmark_scaling import exponent
from benchmark_slice import slice_config, slice_model
from benchmark_states import LayerStates, Shape, true_attention
from benchmark_timing import ENOUGH, Pace, WrongResult, alternate, require_close, spread
from blend_prefill import text_prompt
from families import tiny_model
from test_anchor_cache_exact import SMALL
from transformers import DynamicCache

SHAPE, SHORT = Shape(8, 2, 16), Pace(rounds=1, warm_up=0, seconds=60)
SPREAD = {"median", "q1", "q3", "mean", "rounds", "speed"}
FIELDS = {
    "attention": SPREAD | {"sparse", "off", "attended"},
    "whole-model": SPREAD | {"tokens_per_second", "kv_bytes", "index_bytes", "peak_bytes", "off"},
    "blend": SPREAD | {"kl", "operations", "bound", "of_bound"},
}
FIELDS["slice"] = FIELDS["whole-model"]
CONTESTANTS = {
    "attention": {*benchmark_attention.OURS, "dense, strongest", "DynamicCache", "StaticCache"},
    "whole-model": {"AnchorDynamicCache", "DynamicCache", "StaticCache"},
    "slice": {"AnchorDynamicCache", "DynamicCache", "StaticCache"},
    "blend": {"full prefill", "prefix caching"}
    | {f"blend {r}, {store}" for r in ("0", "0.05", "0.15", "0.3") for store in ("memory", "disk")},
}


def test_a_quick_run_of_every_case(tmp_path, capsys):
    assert benchmark.main(["--quick", "--output", str(tmp_path)]) == 0
    said = json.loads((tmp_path / "benchmark.json").read_text())
    assert said["machine"]["processor"] and said["machine"]["threads"] == torch.get_num_threads()
    assert said["versions"]["torch"] == torch.__version__ and said["copy_bandwidth"] > 0
    assert {"python", "transformers", "triton"} < set(said["versions"])
    assert set(said["cases"]) == set(benchmark.CASES) and said["settings"]["quick"]
    text = (tmp_path / "benchmark.md").read_text()
    assert text in capsys.readouterr().out
    for name, case in said["cases"].items():
        assert case["error"] is None and f"## {name}: " in text
    for name, fields in FIELDS.items():
        for result in said["cases"][name]["results"]:
            assert set(result["contestants"]) == CONTESTANTS[name]
            for row in result["contestants"].values():
                assert fields <= set(row)
                assert 0 < row["q1"] <= row["median"] <= row["q3"]
                assert ENOUGH <= row["rounds"] <= 3
                assert row["speed"]

    attention = said["cases"]["attention"]["results"]
    assert [result["dtype"] for result in attention] == ["bfloat16", "float32"]
    for result in attention:
        for name in benchmark_attention.OURS:
            row = result["contestants"][name]
            assert row["sparse"] and row["attended"] <= 512 and 0 < row["mass"] <= 1
            assert row["of_floor"] == pytest.approx(row["median"] / row["floor"])
            read = row["index_bytes"] + (row["attended"] + 1) * 2 * 2 * 64 * (
                2 if result["dtype"] == "bfloat16" else 4
            )
            assert row["floor"] == pytest.approx(read / said["copy_bandwidth"])
    decoding, blending = said["cases"]["scaling"]["results"]
    assert [size["tokens"] for size in decoding["sizes"]] == [1024, 1536, 2048]
    assert set(decoding["costs"]) == {"AnchorDynamicCache", "dense, strongest"}
    assert all(isinstance(cost["exponent"], float) for cost in blending["costs"].values())
    assert "| exponent |" in text


def test_a_wrong_contestant_stops_its_case_and_the_command(tmp_path, monkeypatch, capsys):
    # What skipped blocks add is more than attention over the tokens that were read.
    broken = dict(skipped="mean", dense_below=0, dense_above=1.0)
    monkeypatch.setitem(benchmark_attention.OURS, "broken", broken)
    arguments = ["--quick", "--cases", "attention", "slice", "--output", str(tmp_path)]
    assert benchmark.main(arguments) == 1
    assert "attention: broken, over what it reads: off by" in capsys.readouterr().err
    cases = json.loads((tmp_path / "benchmark.json").read_text())["cases"]
    assert cases["attention"]["results"] == [] and "broken" in cases["attention"]["error"]
    assert len(cases["slice"]["results"]) == 1 and cases["slice"]["error"] is None
    assert "Stopped, a result is wrong" in (tmp_path / "benchmark.md").read_text()


def forgetful(states, room):
    """Attention that misses the first token of the context."""

    def step(new):
        keys, values = (
            torch.cat(pair, 2)[:, :, 1:]
            for pair in ((states.keys, new.key), (states.values, new.value))
        )
        return true_attention(new.query, keys, values).to(states.dtype)

    return step


class Forgetful(DynamicCache):
    """Returns all but the first token to attention."""

    def update(self, *args, **kwargs):
        return tuple(states[:, :, 1:] for states in super().update(*args, **kwargs))


def test_one_missing_token_is_noticed():
    options = dict(dtype=torch.float32, shape=SHAPE, pace=SHORT, stock=("DynamicCache",), ours={})
    result = benchmark_attention.measure_attention(48, **options)
    assert set(result["contestants"]) == {"DynamicCache"}
    with pytest.raises(WrongResult, match="forgetful: off by"):
        benchmark_attention.measure_attention(48, **options, more={"forgetful": forgetful})
    model = tiny_model()
    with pytest.raises(WrongResult, match="forgetful, layer 0: off by"):
        benchmark_decode.measure_decode(
            model, 48, 40, SHORT, {"forgetful": lambda: Forgetful(config=model.config)}, **SMALL
        )


@pytest.mark.parametrize("together", [True, False])
def test_caches_take_turns_together_or_one_at_a_time(monkeypatch, together):
    monkeypatch.setattr(benchmark_decode, "free_memory", lambda device: together * 2**40)
    pace = Pace(rounds=4, warm_up=1, seconds=60)
    result = benchmark_decode.measure_decode(tiny_model(), 96, 48, pace, **SMALL)
    assert result["caches_at_once"] == (3 if together else 1)
    rows = result["contestants"]
    assert all(row["rounds"] == 4 for row in rows.values())
    ours = rows["AnchorDynamicCache"]
    assert ours["sparse"] and ours["off"] > rows["StaticCache"]["off"] < 1e-4
    assert ours["kv_bytes"] == rows["DynamicCache"]["kv_bytes"] > 0 < ours["index_bytes"]


def test_a_prompt_that_is_answered_by_another_one_is_noticed(small_model):
    model, tokenizer = small_model
    prompt = text_prompt(tokenizer, "report", 96, None, 32)
    other = text_prompt(tokenizer, "tune", 96, None, 32)

    def swapped(prompt):
        cache = DynamicCache(config=model.config)
        model(torch.tensor([other.segments[0]]), past_key_values=cache, logits_to_keep=1)
        return cache

    with pytest.raises(WrongResult, match="swapped: KL to full prefill"):
        benchmark_blend.measure_blend(model, prompt, SHORT, (0.15,), more={"swapped": swapped})


def test_made_states_hold_what_a_query_asks_for():
    shape, length = Shape(8, 2, 128), 16384
    states = LayerStates(shape, length, torch.float32)
    new = states.step(3)
    assert torch.equal(new.query, LayerStates(shape, length, torch.float32).step(3).query)
    assert not torch.equal(new.query, states.step(4).query)
    grouped = new.query.view(shape.kv_heads, -1, shape.dim)
    mass = (grouped @ states.keys[0].transpose(1, 2) * shape.dim**-0.5).softmax(-1)
    few = mass.mean(1).topk(length // 8).values.sum(-1)
    assert few.min() > 0.6 and few.max() < 0.99
    expected = torch.nn.functional.scaled_dot_product_attention(
        new.query, states.keys, states.values, enable_gqa=True
    )
    actual = true_attention(new.query, states.keys, states.values)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_the_slice_has_no_repeated_rows_and_computes_positions():
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    config = slice_config(2, **sizes, num_key_value_heads=2, head_dim=16, vocab_size=32)
    model = slice_model(config, torch.float32)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert len(weight.unique(dim=0)) == 64
    logits = model(torch.tensor([[5, 5, 7]])).logits
    assert logits.isfinite().all() and not torch.equal(logits[0, 1], logits[0, 2])
    assert model.model.rotary_emb.inv_freq[0] == 1


def test_contestants_take_turns_and_stop_in_time():
    called = []
    steps = {name: lambda turn, name=name: called.append((name, turn)) for name in "abc"}
    before = []
    seconds = alternate(steps, Pace(3, 1, seconds=60), before=before.append)
    assert "".join(name for name, _ in called) == "abcbcacababc" == "".join(before)
    assert {len(own) for own in seconds.values()} == {3}
    seconds = alternate(steps, Pace(1000, 1, seconds=0.0))
    assert {len(own) for own in seconds.values()} == {ENOUGH}
    assert spread([3.0, 1.0, 2.0]) == dict(median=2.0, q1=1.5, q3=2.5, mean=2.0, rounds=3)
    assert spread([3.0])["q1"] == spread([3.0])["q3"] == 3.0


@pytest.mark.parametrize("wrong", [2.0, float("nan")])
def test_only_results_within_the_limit_pass(wrong):
    truth = torch.ones(2, 4)
    assert require_close("same", truth + 1e-6, truth, 1e-4) < 1e-5
    actual = truth.clone()
    actual[1, 2] = wrong
    with pytest.raises(WrongResult, match="it: off by"):
        require_close("it", actual, truth, 1e-2)
    with pytest.raises(WrongResult, match="instead of"):
        require_close("it", truth[:1], truth, 1e-2)


def test_exponents_are_those_of_power_laws():
    points = [(n, 3 * n**1.5) for n in (10, 30, 70)]
    assert exponent(points) == pytest.approx(1.5)
    assert exponent(points[:1]) is None


def test_memory_is_measured():
    size = 1 << 27
    peak = peak_memory(lambda: torch.ones(size, dtype=torch.uint8))
    assert peak is None or 0.9 * size < peak < 1.5 * size
    assert copy_bandwidth(size=1 << 22) > 1e6


def test_a_peer_that_is_not_there_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark_peers, "ROOT", tmp_path)
    said = benchmark_peers.run_peer("kvpress", "model", {"ids": [1]})
    assert "make bench-peers" in said["error"]
    folder = tmp_path / ".venv-kvpress"
    folder.mkdir()
    (folder / "install.log").write_text("ERROR: no such version\n")
    said = benchmark_peers.run_peer("kvpress", "model", {"ids": [1]})
    assert said == {"error": "not installed: ERROR: no such version"}
    result = dict(tokens=64, contestants={"kvpress": said}, versions=None)
    about = dict(machine=dict(processor="x", threads=1), commit="y", decoding=[result], blending=[])
    assert "| 64 | kvpress | not installed: ERROR" in benchmark_peers.report(about)
