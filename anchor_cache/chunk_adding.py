"""Filling a store: what is missing is encoded, and stored batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from .chunk import Chunk, ChunkKey
from .chunk_encoder import ChunkEncoder
from .model_identity import model_identity

if TYPE_CHECKING:
    from .chunk_store import ChunkStore
    from .segment_ids import Segment
    from .sink_token import Sink


def add_documents(
    store: ChunkStore,
    documents: Iterable[Segment],
    prefix: Segment | Sink | None,
    batch_tokens: int | None,
    progress: bool,
) -> list[ChunkKey]:
    """What :meth:`ChunkStore.add` does."""
    if isinstance(documents, (str, bytes, Mapping)):
        raise ValueError(f"documents is one {type(documents).__name__}: pass a list of documents")
    prefix = store.prefix_ids(prefix)
    encoder = ChunkEncoder(store.model, prefix, batch_tokens)
    chunks = (store.token_ids(text, f"documents[{i}]") for i, text in enumerate(documents))
    if isinstance(documents, (list, tuple)):
        chunks = list(chunks)
    identity = model_identity(store.model)
    keys: list[ChunkKey] = []
    total = len(documents) if isinstance(documents, Sized) else None
    with tqdm(desc="prefilling", unit="chunk", total=total, disable=not progress) as bar:
        if prefix:
            _add_missing(store, ChunkEncoder(store.model), [store.key(prefix, (), identity)])
        for window in encoder.windows(chunks):
            new = [store.key(ids, prefix, identity) for ids in window]
            bar.update(len(new) - _add_missing(store, encoder, new, bar))
            keys += new
    return keys


def _add_missing(
    store: ChunkStore, encoder: ChunkEncoder, keys: list[ChunkKey], bar: tqdm | None = None
) -> int:
    missing = [key for key in dict.fromkeys(keys) if key not in store]
    for i, encoded in encoder.encode([key.ids for key in missing]):
        store.put(Chunk(missing[i], *encoded))
        if bar is not None:
            bar.update()
    return len(missing)
