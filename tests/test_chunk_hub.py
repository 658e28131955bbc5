"""Chunk stores on the Hub: a local server speaks the part of its interface that is needed."""

import base64
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import torch
from families import random_ids, tiny_model
from huggingface_hub import constants

from anchor_cache import BlendedCache, ChunkStore

PREFIX = [1, 5, 9]
REPO = "somebody/chunks"


class Hub(ThreadingHTTPServer):
    """Repositories in memory, all files small enough to travel inside a commit."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Requests)
        self.created, self.files, self.commits, self.validated = [], {}, [], []

    @property
    def sha(self):
        return hashlib.sha1(
            json.dumps([len(self.commits), sorted(self.files)]).encode()
        ).hexdigest()


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, body=None, status=200, content=None, **headers):
        content = json.dumps(body).encode() if content is None else content
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        hub, path = self.server, unquote(urlparse(self.path).path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer({"url": f"{constants.ENDPOINT}/datasets/{REPO}"})
        elif path == f"/api/datasets/{REPO}/preupload/main":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                | ({"oid": blob(hub.files[f["path"]])} if f["path"] in hub.files else {})
                for f in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif path == f"/api/datasets/{REPO}/commit/main":
            lines = [json.loads(line) for line in body.splitlines()]
            added = [line["value"] for line in lines if line["key"] == "file"]
            hub.files |= {f["path"]: base64.b64decode(f["content"]) for f in added}
            (header,) = (line["value"] for line in lines if line["key"] == "header")
            hub.commits.append((header["summary"], sorted(f["path"] for f in added)))
            url = f"{constants.ENDPOINT}/datasets/{REPO}/commit/{hub.sha}"
            self.answer({"success": True, "commitOid": hub.sha, "commitUrl": url})
        elif path == "/api/validate-yaml":
            hub.validated.append(json.loads(body)["content"])
            self.answer({"errors": [], "warnings": []})
        else:
            self.answer({"error": f"no {path}"}, status=404)

    def do_GET(self):
        hub, path = self.server, unquote(urlparse(self.path).path)
        name = path.rsplit("/", 1)[-1]
        if path in (f"/api/datasets/{REPO}", f"/api/datasets/{REPO}/revision/main"):
            self.answer({"id": REPO, "sha": hub.sha, "siblings": []})
        elif path.startswith(f"/api/datasets/{REPO}/tree/"):
            self.answer(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": blob(data)}
                    for name, data in hub.files.items()
                ]
            )
        elif path.startswith(f"/datasets/{REPO}/resolve/") and name in hub.files:
            content = hub.files[name]
            self.answer(content=content, ETag=f'"{blob(content)}"', X_Repo_Commit=hub.sha)
        else:
            self.answer({"error": f"no {path}"}, status=404)

    do_HEAD = do_GET


def blob(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server
        server.shutdown()


def row(n):
    return random_ids(n).tolist()


@pytest.fixture
def store(tmp_path):
    return ChunkStore(tmp_path / "chunks", tiny_model(), prefix=PREFIX)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("target", ["cache_dir", "local_dir"])
def test_a_store_goes_to_the_hub_and_comes_back(hub, store, tmp_path, target):
    documents = [row(9), row(14)]
    store.add(documents, progress=False)
    for name in ("half.123.partial", "model.safetensors", "own/model.safetensors"):
        (tmp_path / "foreign" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "foreign" / name).write_bytes(b"not a chunk")
    shutil.copytree(tmp_path / "foreign", store.url, dirs_exist_ok=True)
    url = store.push_to_hub(REPO, private=True, token="hf_secret", commit_message="Two notes")
    assert url.endswith(f"/datasets/{REPO}")
    (created,) = hub.created
    assert created["type"] == "dataset" and created["name"] == "chunks"
    assert created.get("private") or created.get("visibility") == "private"
    chunks = {f"{key.digest}.safetensors" for key in store.keys()}
    assert set(hub.files) == {*chunks, "README.md"}
    assert hub.commits == [
        ("Two notes", sorted(chunks)),
        ("Two notes", ["README.md"]),
    ]

    options = {target: tmp_path / "there"}
    other = ChunkStore.from_hub(REPO, store.model, token="hf_secret", prefix=PREFIX, **options)
    assert (tmp_path / "there") in [Path(other.url), *Path(other.url).parents]
    there = contents(Path(other.url))
    assert there == {n: d for n, d in contents(Path(store.url)).items() if n in chunks}
    segments = [PREFIX, *documents, row(3)]
    report = BlendedCache.blend(store.model, other, segments).report()
    assert report.reused_tokens == 3 + 9 + 14 and not report.reasons


def test_only_what_is_new_is_sent(hub, store):
    store.add([row(5)], progress=False)
    store.push_to_hub(REPO, token="hf_secret")
    (key,) = store.add([row(6)], progress=False)
    hub.commits.clear()
    store.push_to_hub(REPO, token="hf_secret")
    assert [paths for _, paths in hub.commits] == [[f"{key.digest}.safetensors"], ["README.md"]]


def test_the_card_says_what_is_there(hub, store, small_model):
    store.tokenizer = small_model[1]
    store.add([row(5), row(6)], progress=False)
    store.add([row(7)], prefix=(), progress=False)
    store.push_to_hub(REPO, token="hf_secret")
    card = hub.files["README.md"].decode()
    assert "LlamaForCausalLM" in card and f'from_hub("{REPO}", model' in card
    identity = store.key([1]).model
    assert f"| `{identity}` | none | 2 | 10 |" in card  # the prefix itself is one
    text = repr(store.tokenizer.decode(PREFIX))
    assert f"| `{identity}` | 3 tokens: `{text}` | 2 | 11 |" in card.replace("\\|", "|")
    assert card.startswith("---\n") and "anchor_cache chunk 2" in card and "viewer: false" in card


def test_chunks_of_another_model_are_refused(hub, store, tmp_path):
    store.add([row(5)], progress=False)
    store.push_to_hub(REPO, token="hf_secret")
    other = tiny_model().to(torch.bfloat16)
    with pytest.raises(ValueError, match=f"{REPO} holds chunks of other weights"):
        ChunkStore.from_hub(REPO, other, local_dir=tmp_path / "there")


def test_nothing_to_push_and_nothing_to_load(hub, store, tmp_path):
    with pytest.raises(ValueError, match="the store is empty"):
        store.push_to_hub(REPO, token="hf_secret")
    assert hub.created == []
    hub.files |= {"README.md": b"# something else\n", "model.safetensors": b"a model"}
    with pytest.raises(ValueError, match=f"{REPO} holds no chunks"):
        ChunkStore.from_hub(REPO, store.model, local_dir=tmp_path / "there")
