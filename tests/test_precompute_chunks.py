"""The example that fills a store, run as users run it: by two processes, more than once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import random_ids, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from anchor_cache import SINK, ChunkStore

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "precompute_chunks.py"
TWO = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
TWO += ["--main_process_port", "0", "--num_machines", "1", "--mixed_precision", "no"]
CHUNK = 20


@pytest.fixture
def folder(tmp_path):
    """A model with its tokenizer, and documents of 0 to 50 words, a token each."""
    words = {"<unk>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, 96)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().save_pretrained(tmp_path / "model")
    texts = [" ".join(f"w{i}" for i in random_ids(n).tolist()) for n in range(0, 51, 5)]
    lines = [json.dumps({"body": text}) for text in texts]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(folder, launcher, *arguments, dataset="documents.jsonl", check=True):
    command = [sys.executable, *launcher, str(SCRIPT), "--model", str(folder / "model")]
    command += ["--dataset", str(folder / dataset), "--column", "body"]
    command += ["--store", str(folder / "store"), "--chunk-tokens", str(CHUNK), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode == 0) == check, result.stderr
    return result.stdout if check else result.stderr


def expected_keys(folder, prefix):
    """The keys that this process would give the chunks, and the prefix's."""
    from small_model import load

    store = ChunkStore(folder / "store", *load(folder / "model"), prefix=prefix)
    lines = (folder / "documents.jsonl").read_text().splitlines()
    words = [json.loads(line)["body"].split() for line in lines]
    ids = [[int(word[1:]) for word in text] for text in words]
    pieces = [text[i : i + CHUNK] for text in ids for i in range(0, len(text), CHUNK)]
    return store, [store.key(store.prefix, ()), *map(store.key, pieces)]


def test_two_processes_fill_a_store_once(folder):
    head = (folder / "documents.jsonl").read_text().splitlines()[:4]
    (folder / "head.jsonl").write_text("\n".join(head))
    run(folder, [], "--sink", dataset="head.jsonl")
    before = {path: path.stat().st_mtime_ns for path in (folder / "store").iterdir()}
    assert len(before) == 4  # the sink and three chunks

    said = run(folder, TWO, "--sink", "--batch-tokens", "50")
    store, keys = expected_keys(folder, SINK)
    assert store.prefix == (1,)
    assert {path.stem for path in Path(store.url).iterdir()} == {key.digest for key in keys}
    assert {path: path.stat().st_mtime_ns for path in before} == before
    new = len(keys) - len(before)
    size = sum(path.stat().st_size for path in Path(store.url).iterdir())
    assert f"{len(keys) - 1} chunks, 275 tokens, after a prefix of 1 tokens" in said
    assert f"{new} chunks newly stored" in said and "by 2 process(es)" in said
    assert f"{len(keys)} chunks, {size:,} bytes" in said
    for key in keys:
        stored, again = store.get(key)[0], store.encode(key)
        assert stored.rotary == again.rotary
        assert all((a - b).abs().max() < 2e-5 for a, b in zip(stored.keys, again.keys, strict=True))


def test_files_of_other_kinds_and_wrong_columns(folder):
    (folder / "notes.csv").write_text("body,other\nw3 w4,x\n")
    assert "1 documents, 1 chunks, 2 tokens" in run(
        folder, [], "--prefix", "w5 w6", dataset="notes.csv"
    )
    said = run(folder, [], "--column", "nothing", dataset="notes.csv", check=False)
    assert "--column nothing: the data set has body, other" in said
