"""What is stored, how it is found, and what is not believed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import random_ids, tiny_model
from safetensors.torch import load_file, safe_open, save_file

from anchor_cache import SINK, BlendedCache, ChunkStore


def row(n):
    return random_ids(n).tolist()


def file_of(store, key):
    return Path(store.url) / f"{key.digest}.safetensors"


@pytest.fixture
def store(tmp_path):
    return ChunkStore(tmp_path / "chunks", tiny_model(), prefix=[1, 5, 9])


def test_add_is_idempotent_and_stores_the_prefix_too(store):
    documents = [row(5), row(7), row(5)]
    keys = store.add([*documents, documents[0]], progress=False)
    assert len(store) == 4 and keys[0] == keys[3]
    times = {path: path.stat().st_mtime_ns for path in Path(store.url).iterdir()}
    assert store.add(documents, progress=False) == keys[:3]
    assert {path: path.stat().st_mtime_ns for path in Path(store.url).iterdir()} == times


def test_a_chunk_file_describes_itself(store):
    (key,) = store.add([row(6)], progress=False)
    with safe_open(file_of(store, key), "pt") as file:
        assert file.metadata()["format"].startswith("anchor_cache chunk")
        assert tuple(file.get_tensor("token_ids").tolist()) == key.ids
        assert tuple(file.get_tensor("prefix_ids").tolist()) == (1, 5, 9)
        assert file.get_tensor("layer.0000.keys").shape == (1, 2, 6, 12)


def test_a_stored_chunk_is_unchanged_by_use(store):
    documents = [row(9), row(9)]
    store.add(documents, progress=False)
    before = {path: path.read_bytes() for path in Path(store.url).iterdir()}
    for ratio in (0, 0.5, 1):
        BlendedCache.blend(
            store.model, store, [[1, 5, 9], *documents, row(3)], recompute_ratio=ratio
        )
    assert {path: path.read_bytes() for path in Path(store.url).iterdir()} == before


def test_the_key_depends_on_model_prefix_and_tokens(tmp_path, store):
    ids = row(6)
    base = store.key(ids)
    assert store.key(ids) == base and store.key(ids).digest == base.digest
    other_weights = tiny_model()
    other_weights.lm_head.weight.data[0, 0] += 1
    others = [
        store.key(ids[:-1]),
        store.key(ids, ()),
        ChunkStore(tmp_path, other_weights, prefix=[1, 5, 9]).key(ids),
        ChunkStore(tmp_path, tiny_model().to(torch.bfloat16), prefix=[1, 5, 9]).key(ids),
        ChunkStore(tmp_path, tiny_model(rope_theta=5e5), prefix=[1, 5, 9]).key(ids),
    ]
    digests = {key.digest for key in [base, *others]}
    assert len(digests) == 6


def test_the_same_key_in_every_process(store, tmp_path):
    store.model.save_pretrained(tmp_path / "model")
    script = (
        "import sys; from transformers import AutoModelForCausalLM as M\n"
        "from anchor_cache import ChunkStore\n"
        "model = M.from_pretrained(sys.argv[1])\n"
        "print(ChunkStore(sys.argv[2], model, prefix=[1, 5, 9]).key([3, 4]).digest)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model"), str(tmp_path / "other")]
    digests = {
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    }
    assert len(digests) == 1


def test_a_file_under_a_wrong_name_is_a_reported_miss(store):
    a, b = row(6), row(6)
    key_a, key_b = store.add([a, b], progress=False)
    file_of(store, key_a).rename(file_of(store, key_b))
    report = BlendedCache.blend(store.model, store, [b, row(2)]).report()
    assert report.reused_tokens == 0
    assert report.reasons == {"chunk file holds another chunk than its name says": 1}


@pytest.mark.parametrize("damage", ["truncated", "other format", "gone"])
def test_damaged_files_are_reported_misses(store, damage):
    ids = row(6)
    (key,) = store.add([ids], progress=False)
    path = file_of(store, key)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "gone":
        path.unlink()
    else:
        save_file(load_file(path), path, metadata={"format": "another"})
    chunk, reason = store.get(key)
    assert chunk is None and reason
    segments = [ids, row(2)]
    blended = BlendedCache.blend(store.model, store, segments)
    expected = store.model(torch.tensor([sum(segments, [])])).logits[0, -1]
    actual = store.model(blended.input_ids[:, -1:], past_key_values=blended).logits[0, -1]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert blended.report().reasons == {reason: 1}


def test_no_partial_file_is_left_behind_or_seen(store, monkeypatch):
    from anchor_cache import chunk_folder

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(chunk_folder.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        store.add([row(4)], progress=False)
    assert list(Path(store.url).iterdir()) == []


NO_IDS = [5, {"text": "a row"}, b"bytes", {3, 4}, [3.0], [[3, 4]]]
BAD = [["text"], [None], [torch.tensor(3)], *([[3], bad] for bad in NO_IDS)]


@pytest.mark.parametrize(
    "bad",
    [
        "one string",
        b"bytes",
        {"a": [3]},
        [[]],
        [[3], [1000]],
        ["text"],
        *([[3], x] for x in NO_IDS),
    ],
)
def test_bad_documents_store_nothing(store, bad):
    with pytest.raises(ValueError, match="document"):
        store.add(bad, progress=False)
    assert len(store) == 0


@pytest.mark.parametrize("bad", NO_IDS)
def test_bad_prefixes_and_segments_are_named(store, bad):
    for call in (
        lambda: ChunkStore(store.url, store.model, prefix=bad),
        lambda: store.add([[3]], prefix=bad, progress=False),
        lambda: store.key([3], bad),
    ):
        with pytest.raises(ValueError, match="^prefix must be text or a flat .*, and is"):
            call()
    with pytest.raises(ValueError, match="^segment must be text or a flat .*, and is"):
        store.key(bad)


def test_a_key_takes_what_add_takes(store):
    store.tokenizer = lambda text, **options: {"input_ids": [len(word) for word in text.split()]}
    (key,) = store.add(["how many are there"], progress=False)
    for same in ("how many are there", [3, 4, 3, 5], torch.tensor([3, 4, 3, 5])):
        assert store.key(same) == key and store.key(same) in store
    assert store.key(key.ids, [1, 5, 9]) == store.key(key.ids, torch.tensor([1, 5, 9])) == key
    assert store.key(key.ids, []).prefix == () and store.key(key.ids, SINK).prefix == (1,)


def test_no_model_encodes_what_another_is_named_in(store):
    (key,) = store.add([row(6)], progress=False)
    expected = store.encode(key).keys[3]
    assert (expected - store.get(key)[0].keys[3]).abs().max() < 1e-5
    store.model.to(torch.bfloat16)
    for other in (store, ChunkStore(store.url, tiny_model(rope_theta=5e5))):
        with pytest.raises(ValueError, match="key is another model's"):
            other.encode(key)


def test_reports_are_json(store):
    store.add([row(9)], progress=False)
    report = BlendedCache.blend(store.model, store, [[1, 5, 9], row(9), row(2)]).report()
    assert json.loads(json.dumps(report.to_dict()))["fresh_tokens"] == 11
