"""Several processes and threads in one folder: what is read is right, or a miss."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from families import random_ids, tiny_model
from test_blend_hard_cases import ROPE

from anchor_cache import ChunkStore
from anchor_cache.chunk import Chunk, DamagedChunk
from anchor_cache.chunk_encoder import ChunkEncoder

PREFIX = [1, 5, 9]

# Each document follows the prefix it was encoded after, so a blend without recomputation has the
# logits of a full prefill, whatever was found and whatever was a miss.
WORKER = """
import json, random, sys, threading
import torch
from transformers import AutoModelForCausalLM
from anchor_cache import BlendedCache, ChunkStore

folder, model, max_bytes, seed, rounds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(model).eval()
documents = [[(i * 31 + j * 7) % 90 + 2 for j in range(40)] for i in range(6)]
prefix, question = [1, 5, 9], [11, 12, 13]
with torch.no_grad():
    truth = [model(torch.tensor([prefix + d + question])).logits[0, -1] for d in documents]
store = ChunkStore(
    folder, model, prefix=prefix, max_bytes=max_bytes, memory_bytes=(seed % 2) * 100_000
)
reused, failures, lock = [0], [], threading.Lock()

@torch.no_grad()
def work(chosen):
    try:
        for _ in range(rounds):
            i, key = chosen.randrange(6), None
            key = store.key(documents[i])
            act = chosen.random()
            if act < 0.1:
                store.delete(key)
            elif act < 0.12:
                store.clear()
            elif act < 0.4:
                store.add(documents[i : i + 2], progress=False)
            cache = BlendedCache.blend(
                model, store, [prefix, documents[i], question], recompute_ratio=0
            )
            logits = model(cache.input_ids[:, -1:], past_key_values=cache).logits[0, -1]
            torch.testing.assert_close(logits, truth[i], atol=1e-4, rtol=1e-4)
            with lock:
                reused[0] += cache.report().reused_tokens
            unexpected = set(cache.report().reasons) - {"chunk not in the store"}
            assert not unexpected, unexpected
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=work, args=(random.Random(seed * 10 + n),)) for n in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(dict(failures=failures, reused=reused[0], **store.stats().to_dict())))
"""


def test_processes_write_read_delete_and_evict_in_one_folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    folder = tmp_path / "chunks"
    store = ChunkStore(folder, tiny_model(), prefix=PREFIX)
    store.add([random_ids(40).tolist()], progress=False)
    limit = max(path.stat().st_size for path in folder.iterdir()) * 4
    store.clear()
    command = [sys.executable, "-c", WORKER, str(folder), str(tmp_path / "model"), str(limit)]
    workers = [
        subprocess.Popen(
            [*command, str(seed), "40"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parent.parent,
        )
        for seed in range(2)
    ]
    results = []
    for worker in workers:
        out, errors = worker.communicate()
        assert worker.returncode == 0, errors
        results.append(json.loads(out.splitlines()[-1]))
    assert [result["failures"] for result in results] == [[], []]
    assert all(result["reused"] and result["hits"] and result["misses"] for result in results)
    assert sum(result["evictions"] for result in results)
    assert all(path.suffix == ".safetensors" for path in folder.iterdir())


def test_threads_that_encode_do_not_share_changing_tables():
    """Dynamic RoPE keeps its tables in the model, for passes of whatever length come next."""
    rope = dict(rope_theta=1e4, **ROPE["dynamic"])
    model = tiny_model(max_position_embeddings=40, rope_parameters=rope)
    chunks = [tuple(random_ids(n).tolist()) for n in (20, 45, 60, 90, 35, 120)]

    def rotary(chunk):
        ((_, encoded),) = ChunkEncoder(model, PREFIX).encode([chunk])
        return encoded.rotary

    expected = [rotary(chunk) for chunk in chunks]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rotary, chunks * 12)) == expected * 12


def test_layers_are_read_while_the_chunk_is_closed_deleted_and_written_anew(tmp_path):
    """Each chunk holds one number everywhere, so that a layer of another is seen at once."""
    store = ChunkStore(tmp_path, tiny_model(), memory_bytes=30_000)
    keys = [store.key(random_ids(30).tolist()) for _ in range(5)]
    chunks = []
    for number, key in enumerate(keys):
        states = [torch.full((1, 2, 30, 12), float(number)) for _ in range(8)]
        chunks.append(Chunk(key, states[:4], states[4:], ""))
        store.put(chunks[-1])
    failures, read = [], [0]

    def disturb():
        for i in range(200):
            (store.put(chunks[i % 5]) if i % 3 else store.delete(keys[i % 5]))

    def load(first):
        try:
            for i in range(first, first + 200):
                number = i % 5
                reader, reason = store.open(keys[number])
                if reader is None:
                    assert reason == "chunk not in the store"
                    continue
                closing = threading.Timer(0.0005, reader.close)
                closing.start()
                try:
                    for layer in range(4):
                        for states in reader.layer(layer):
                            assert (states == number).all()
                            read[0] += 1
                except ValueError as error:
                    assert "the chunk was closed" in str(error)
                except DamagedChunk as error:
                    assert error.reason == "chunk not in the store"
                closing.join()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(3)]
    threads += [threading.Thread(target=disturb) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and read[0] > 100
    assert not store._eviction._held
