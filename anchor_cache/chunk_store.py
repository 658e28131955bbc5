"""Prefilled chunks in a folder, addressed by what they are."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable, Iterator, Sized

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .chunk import Chunk, ChunkKey, ChunkReader, DamagedChunk
from .chunk_adding import add_documents
from .chunk_encoder import ChunkEncoder
from .chunk_eviction import ChunkEviction
from .chunk_files import chunk_file, read_header
from .chunk_folder import ChunkFolder
from .chunk_hub import HubChunks
from .chunk_memory import ChunkMemory
from .chunk_precision import storage_dtype
from .chunk_statistics import ChunkStatistics, StoreCounters
from .model_identity import model_identity, require_inference
from .rope import find_rotations
from .segment_ids import Segment, segment_ids
from .sink_token import Sink
from .stored_chunk import StoredChunk, open_chunk_file
from .validation import is_int, require


class ChunkStore(HubChunks):
    """Chunks of text, prefilled once by one model, kept as files.

    Each chunk is encoded as if it stood right after ``prefix``: its tokens then behave much as
    they will in a prompt that begins with that prefix, at no cost when the chunk is used. Keys
    are stored before RoPE, so a chunk fits every position. A file is complete or absent, and what
    it holds is compared with what was asked for, not trusted by its name. A store may be used by
    several threads, and a folder by several stores, processes and models.

    Args:
        url: a folder, made if it does not exist, or any fsspec URL (``s3://bucket/chunks``,
            ``hf://datasets/me/chunks``, ``memory://chunks``). It need not be writable to be read.
        model: the model that encodes the chunks.
        tokenizer: turns strings into ids; not needed if all segments are ids.
        prefix: how prompts begin (system prompt, with its BOS token if the model wants one), as
            text or ids; :data:`SINK` if that is not known yet: the one token that begins all
            prompts of this model; None to encode chunks alone.
        dtype: what keys and values are stored in. None: exactly, in the model's own dtype.
            ``"int8"`` or a float dtype that is no wider than the model's: rounded, and never
            reported as exact.
        max_bytes: how large the folder may grow, all models' chunks together; the least recently
            used files beyond it are deleted. None: without limit.
        memory_bytes: how much host memory holds chunks that were used lately; 0 for none.

    Attributes:
        url: where the chunks are; an absolute path for a local folder.
        is_local: whether that is a folder of this machine.

    Raises:
        NotImplementedError: the model, named, cannot be blended, and why.
        ValueError: an argument, named, is not valid, or the model is in training mode or
            under autocast.

    Example:
        >>> store = ChunkStore("chunks/", model, tokenizer, prefix="You answer from documents.")
        >>> store.add(documents)
    """

    def __init__(
        self,
        url: str | os.PathLike,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefix: Segment | Sink | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        max_bytes: int | None = None,
        memory_bytes: int = 1 << 30,
    ) -> None:
        require_inference(model)
        self.model = model
        no_name = not isinstance(tokenizer, str)
        require(no_name, "tokenizer", tokenizer, "a tokenizer, or None if all segments are ids")
        self.tokenizer = tokenizer
        self.dtype = storage_dtype(dtype, model.dtype)
        limited = max_bytes is None or is_int(max_bytes, 1)
        require(limited, "max_bytes", max_bytes, "a number of bytes, or None for no limit")
        allowed = "a number of bytes, or 0 to keep no chunks in memory"
        require(is_int(memory_bytes, 0), "memory_bytes", memory_bytes, allowed)
        self._layers = len(find_rotations(model))
        self.prefix = () if prefix is None else self.token_ids(prefix, "prefix")
        self._folder = ChunkFolder(url)
        self.url, self.is_local = self._folder.url, self._folder.is_local
        self._eviction = ChunkEviction(self._folder, max_bytes)
        self._memory = ChunkMemory(memory_bytes)
        self._counters = StoreCounters()
        self._damaged: set[str] = set()  # digests, until they are written again

    def token_ids(self, segment: Segment, name: str = "segment") -> tuple[int, ...]:
        """The ids of a segment; text is tokenised alone and without special tokens.

        Raises:
            ValueError: it is empty, text without a tokenizer, or has ids the model does not know.
        """
        return segment_ids(self.model, self.tokenizer, segment, name)

    def prefix_ids(self, prefix: Segment | Sink | None) -> tuple[int, ...]:
        """The ids of a prefix: the store's for None, none for an empty one."""
        if prefix is None:
            return self.prefix
        empty = isinstance(prefix, Sized) and not len(prefix)
        return () if empty else self.token_ids(prefix, "prefix")

    def key(
        self,
        segment: Segment,
        prefix: Segment | Sink | None = None,
        identity: str | None = None,
    ) -> ChunkKey:
        """The key of a chunk of this store's model, by default after this store's prefix; tuples
        are taken for ids. ``identity`` is the model's, for callers that ask for many keys at once.
        """
        ids = segment if isinstance(segment, tuple) else self.token_ids(segment)
        prefix = prefix if isinstance(prefix, tuple) else self.prefix_ids(prefix)
        return ChunkKey(identity or model_identity(self.model), prefix, ids, self.dtype)

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether a whole file is there that says it holds this chunk, as far as it was read."""
        if key.digest in self._damaged:
            return False
        try:
            open_chunk_file(self._folder, key, self._layers)[0].close()
        except DamagedChunk:
            return False
        return True

    def __len__(self) -> int:
        """How many chunk files are in the folder, of all models."""
        return sum(1 for _ in self._folder.files())

    @property
    def nbytes(self) -> int:
        """The size of the chunk files in the folder, of all models."""
        return sum(file.nbytes for file in self._folder.files())

    def keys(self) -> Iterator[ChunkKey]:
        """What the folder holds, of all models, as its files say; unreadable ones are skipped."""
        for stored in self._folder.files():
            try:
                with contextlib.closing(self._folder.open(stored.digest)) as file:
                    key = read_header(file.read, file.size).key
            except (DamagedChunk, OSError):
                continue
            if key.digest == stored.digest:
                yield key

    def stats(self) -> ChunkStatistics:
        """What the folder holds, and what was asked of this store."""
        sizes = [file.nbytes for file in self._folder.files()]
        return self._counters.statistics(len(sizes), sum(sizes))

    def add(
        self,
        documents: Iterable[Segment],
        progress: bool = True,
        batch_tokens: int | None = None,
        prefix: Segment | Sink | None = None,
    ) -> list[ChunkKey]:
        """Prefill and store documents that are not there yet, and the prefix itself.

        They are computed and stored in batches of similar lengths: after an interruption the same
        call goes on where it was.

        Args:
            documents: texts or lists of token ids. A list or a tuple is checked as a whole before
                anything is stored; anything else (a generator, a column of a data set) is read,
                checked and stored some 100,000 tokens at a time.
            progress: show a progress bar.
            batch_tokens: most tokens in one pass, with the prefix of every document and padding;
                a longer document goes alone. None: 4096.
            prefix: what these documents are encoded after, instead of the store's prefix; an
                empty list for nothing.

        Returns:
            The keys of the documents, in order.

        Raises:
            ValueError: a document is empty or not valid. Nothing is stored then if the documents
                are a list; of others, what was read long before may be stored.
        """
        require_inference(self.model)
        return add_documents(self, documents, prefix, batch_tokens, progress)

    def encode(self, key: ChunkKey) -> Chunk:
        """Prefill one chunk after its prefix, without storing it.

        Raises:
            ValueError: the key is another model's, or the model is in training mode or under
                autocast.
        """
        require_inference(self.model)
        if key.model != model_identity(self.model):
            raise ValueError("key is another model's, or this one's before it changed: use key()")
        ((_, encoded),) = ChunkEncoder(self.model, key.prefix).encode([key.ids])
        return Chunk(key, *encoded)

    def put(self, chunk: Chunk) -> None:
        """Store a chunk in its key's dtype; the file appears when it is complete.

        Raises:
            ValueError: the chunk does not fit into ``max_bytes``, or into its dtype.
            OSError: the storage is full, or may not be written to.
        """
        pieces, digest = chunk_file(chunk), chunk.key.digest
        nbytes = sum(map(len, pieces))
        self._eviction.require_room(nbytes)
        self._folder.write(digest, pieces)
        self._damaged.discard(digest)
        self._memory.forget(digest)
        evicted = self._eviction.evict(digest, nbytes)
        for other in evicted:
            self._memory.forget(other)
        self._counters.add(evictions=len(evicted))

    def open(self, key: ChunkKey) -> tuple[ChunkReader | None, str | None]:
        """Open a chunk, whose layers are then read one by one, onto the model's device.

        Its file is not evicted until it is closed.

        Returns:
            The chunk and None, or None and why there is none.
        """
        digest = key.digest
        self._eviction.hold(digest)
        try:
            chunk = self._open(key)
        except BaseException as error:
            self._eviction.release(digest)
            if not isinstance(error, DamagedChunk):
                raise
            self._counters.add(misses=1)
            return None, error.reason
        self._folder.touch(digest)
        self._counters.add(hits=1)
        return chunk, None

    def _open(self, key: ChunkKey) -> StoredChunk:
        remembered, file = self._memory.find(key), None
        if remembered is None:
            started, stamp = time.perf_counter(), self._memory.stamp
            file, header = open_chunk_file(self._folder, key, self._layers)
            self._counters.add(read_seconds=time.perf_counter() - started)
            remembered = self._memory.begin(header, stamp)
        else:
            header = remembered.header
            self._counters.add(memory_hits=1)
        found = header, file, self.model.device, self._memory, remembered, self._counters
        release = functools.partial(self._eviction.release, key.digest)
        return StoredChunk(*found, release, functools.partial(self._damaged.add, key.digest))

    def get(self, key: ChunkKey) -> tuple[Chunk | None, str | None]:
        """Load a chunk onto the model's device.

        Returns:
            The chunk, its tensors its own, and None, or None and why there is none.
        """
        reader, reason = self.open(key)
        if reader is None:
            return None, reason
        try:
            with reader:
                return reader.load(), None
        except DamagedChunk as damage:
            return None, damage.reason

    def delete(self, key: ChunkKey) -> bool:
        """Delete a chunk, from memory too; False if its file was not there."""
        deleted = self._folder.delete(key.digest)
        self._memory.forget(key.digest)
        return deleted

    def clear(self) -> None:
        """Delete all chunk files in the folder, of all models, and nothing else."""
        for file in list(self._folder.files()):
            self._folder.delete(file.digest)
            self._memory.forget(file.digest)
        self._folder.delete_abandoned()
