"""Where chunks lie: any fsspec URL, in exact and lossy dtypes side by side."""

import os
import zipfile
from pathlib import Path

import fsspec
import pytest
import torch
from families import random_ids, tiny_model
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from anchor_cache import BlendedCache, ChunkStore
from anchor_cache.chunk import DamagedChunk

PREFIX = [1, 5, 9]


def row(n):
    return random_ids(n).tolist()


class RangedStorage(AbstractFileSystem):
    """A storage that is read by ranges, as remote ones are, and notes them; over local files."""

    protocol = "ranged"
    ranges: list = []

    def ls(self, path, detail=True, **kwargs):
        return fsspec.filesystem("file").ls("/" + path, detail=detail)

    def info(self, path, **kwargs):
        return fsspec.filesystem("file").info("/" + path)

    def rm_file(self, path):
        os.unlink("/" + path)

    def pipe_file(self, path, value, **kwargs):
        Path("/" + path).write_bytes(value)

    def makedirs(self, path, exist_ok=False):
        os.makedirs("/" + path, exist_ok=exist_ok)

    def _open(self, path, mode="rb", **kwargs):
        return RangedStorageFile(self, path, mode, **kwargs)


class ListedStorage(RangedStorage):
    """One that goes by the listings it has, as storages over a network do."""

    protocol = "listed"

    def ls(self, path, detail=True, **kwargs):
        if path not in self.dircache:
            self.dircache[path] = super().ls(path)
        return self.dircache[path]

    def info(self, path, **kwargs):
        for known in self.ls(self._parent(path)):
            if known["name"].strip("/") == path.strip("/"):
                return known
        raise FileNotFoundError(path)

    def invalidate_cache(self, path=None):
        self.dircache.clear()


class RangedStorageFile(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        if not Path("/" + self.path).exists():
            raise RuntimeError("404")  # storages have errors of their own
        self.fs.ranges.append((start, end))
        return Path("/" + self.path).read_bytes()[start:end]


@pytest.fixture(params=["local", "file://", "memory://", "ranged://"])
def url(request, tmp_path):
    fsspec.register_implementation("ranged", RangedStorage, clobber=True)
    folder = tmp_path / "chunks"
    return folder if request.param == "local" else f"{request.param}{folder}"


def put_foreign(url):
    """A file of someone else, and one that looks like a chunk but holds none."""
    fs, path = fsspec.core.url_to_fs(str(url))
    fs.pipe_file(f"{path}/model.safetensors", b"a model")
    fs.pipe_file(f"{path}/{'0' * 64}.safetensors", b"junk")
    return fs, path


def test_a_store_anywhere(url, tmp_path):
    model = tiny_model()
    store = ChunkStore(url, model, prefix=PREFIX)
    documents = [row(19), row(30)]
    assert len(store) == 0 and list(store.keys()) == [] and store.nbytes == 0
    keys = store.add(documents, progress=False)
    fs, path = put_foreign(url)
    assert len(store) == 4 and set(keys) < set(store.keys()) and len(list(store.keys())) == 3
    again = ChunkStore(store.url, model, prefix=PREFIX)
    assert again.add(documents, progress=False) == keys
    cache = BlendedCache.blend(model, again, [PREFIX, documents[0], row(4)], recompute_ratio=0)
    assert cache.report().reused_tokens == 22 and cache.report().reasons == {}
    expected = model(cache.input_ids).logits[0, -1]
    actual = model(cache.input_ids[:, -1:], past_key_values=cache).logits[0, -1]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert again.delete(keys[0]) and not again.delete(keys[0]) and keys[0] not in store
    assert store.get(keys[0]) == (None, "chunk not in the store")
    store.clear()
    assert len(store) == 0 and fs.cat_file(f"{path}/model.safetensors") == b"a model"
    local = fs if store.is_local or "memory" in str(url) else fsspec.filesystem("file")
    local.rm(str(tmp_path / "chunks") if local is not fs else path, recursive=True)
    assert store.add(documents, progress=False) == keys and len(store) == 3


def test_remote_layers_are_read_by_exact_ranges(tmp_path):
    fsspec.register_implementation("ranged", RangedStorage, clobber=True)
    store = ChunkStore(f"ranged://{tmp_path}/chunks", tiny_model())
    (key,) = store.add([row(300)], progress=False)
    RangedStorage.ranges.clear()
    reader, _ = store.open(key)
    stored = reader.header.layers
    assert len(RangedStorage.ranges) == 1
    with reader:
        for i in (2, 0):
            reader.layer(i)
    assert RangedStorage.ranges[1:] == [(stored[i].start, stored[i].end) for i in (2, 0)]


def test_what_others_write_to_a_storage_with_listings_is_found(tmp_path):
    fsspec.register_implementation("listed", ListedStorage, clobber=True)
    model = tiny_model()
    other = ChunkStore(tmp_path / "chunks", model)
    store = ChunkStore(f"listed://{tmp_path}/chunks", model)
    for found_at_once in (True, False):  # a miss is not looked for again at once
        assert len(store) == len(other)
        (key,) = other.add([row(9)], progress=False)
        assert (key in store) == found_at_once
    store._folder._relisted -= 6  # seconds
    assert key in store and store.get(key)[1] is None


def test_a_file_that_vanishes_while_it_is_read(tmp_path):
    fsspec.register_implementation("ranged", RangedStorage, clobber=True)
    store = ChunkStore(f"ranged://{tmp_path}/chunks", tiny_model())
    (key,) = store.add([row(300)], progress=False)
    reader, _ = store.open(key)
    os.unlink(tmp_path / "chunks" / f"{key.digest}.safetensors")
    with reader, pytest.raises(DamagedChunk, match="cannot be read: RuntimeError: 404"):
        reader.layer(1)
    local = ChunkStore(tmp_path / "local", store.model)
    (key,) = local.add([row(9)], progress=False)
    reader, _ = local.open(key)
    local.delete(key)
    with reader:  # an open local file stays readable
        assert reader.layer(3)[0].shape == (1, 2, 9, 12)
    assert local.open(key) == (None, "chunk not in the store")


def test_a_store_that_cannot_be_written_to(tmp_path):
    model = tiny_model()
    writable = ChunkStore(tmp_path / "chunks", model)
    keys = writable.add([row(9), row(5)], progress=False)
    with zipfile.ZipFile(tmp_path / "chunks.zip", "w") as archive:
        for path in Path(writable.url).iterdir():
            archive.write(path, f"inside/{path.name}")
    store = ChunkStore(f"zip://inside::{tmp_path}/chunks.zip", model)
    assert set(store.keys()) == set(keys) and len(store) == 2
    chunk, _ = store.get(keys[0])
    assert torch.equal(chunk.keys[2], writable.get(keys[0])[0].keys[2])
    assert store.add([keys[0].ids], progress=False) == keys[:1]
    with pytest.raises(OSError):
        store.add([row(4)], progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(url="nowhere://x"), "url='nowhere://x' is not valid .*nowhere.* use a folder, or"),
        (dict(url=7), "url=7 is not valid: a folder or a fsspec URL"),
        (dict(url=""), "url='' is not valid: a folder or a fsspec URL"),
        (dict(model="name"), "model='name' is not valid: a model of transformers"),
        (dict(tokenizer="name"), "tokenizer='name' is not valid: a tokenizer, or None"),
        (dict(url=__file__), "url='.*' is not valid: there is a file of this name"),
        (dict(dtype="int4"), "dtype='int4' is not valid: use None for the model's own dtype"),
        (dict(dtype=torch.float64), r"dtype=torch.float64 is not valid: .*no wider"),
        (dict(max_bytes=0), "max_bytes=0 is not valid: a number of bytes, or None"),
        (dict(max_bytes=1e9), "max_bytes=1000000000.0 is not valid"),
        (dict(memory_bytes=-1), "memory_bytes=-1 is not valid: a number of bytes, or 0"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        ChunkStore(**{"url": tmp_path, "model": tiny_model(), **arguments})


def test_a_protocol_whose_package_is_missing_says_which(tmp_path):
    fsspec.register_implementation("needy", "no_such.Storage", errtxt="Install no-such")
    with pytest.raises(ValueError, match="url='needy://x' needs a package.*Install no-such"):
        ChunkStore("needy://x", tiny_model())


def test_exact_and_lossy_files_lie_side_by_side(tmp_path):
    model, ids = tiny_model(), row(40)
    stores = {
        d: ChunkStore(tmp_path, model, prefix=PREFIX, dtype=d)
        for d in (None, "int8", torch.bfloat16)
    }
    keys = {d: store.add([ids], progress=False)[0] for d, store in stores.items()}
    assert [key.is_lossy for key in keys.values()] == [False, True, True]
    assert len({key.digest for key in keys.values()}) == len(stores[None]) / 2 == 3
    for key in keys.values():
        assert stores["int8"].get(key)[0].keys[0].dtype == torch.float32
    assert ChunkStore(tmp_path, model, dtype=torch.float32).key(ids, PREFIX) == keys[None]
    for dtype, store in stores.items():  # what is rounded is not exact, and recomputed if asked
        blended = BlendedCache.blend(model, store, [PREFIX, ids, row(4)], recompute_ratio=1)
        report = blended.report()
        assert (report.reused_tokens, report.exact_prefix_tokens) == (43, 0 if dtype else 43)
        expected = model(blended.input_ids).logits[0, -1]
        actual = model(blended.input_ids[:, -1:], past_key_values=blended).logits[0, -1]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
