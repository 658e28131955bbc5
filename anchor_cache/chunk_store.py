"""Prefilled chunks on disk, addressed by what they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .model_identity import model_identity
from .patches.partial_forward import PartialForward
from .rope import KVRecorder, find_rotations

FORMAT = "anchor_cache chunk 1"

Segment = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """What a chunk is: the model that encoded it, the prefix it was encoded after, its tokens."""

    model: str
    prefix: tuple[int, ...]
    ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the key, the same in every process and on every machine."""
        fields = [FORMAT, self.model, list(self.prefix), list(self.ids)]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


@dataclasses.dataclass
class Chunk:
    """Keys before RoPE and values of one chunk: one ``[1, H_kv, T, D]`` pair per layer.

    ``rotary`` is a digest of the rotary tables with which the chunk was encoded: some models
    change them with the length of the prompt, and what was encoded with others is not exact.
    """

    key: ChunkKey
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rotary: str


def require_eval(model: PreTrainedModel) -> None:
    """Raise ValueError for a model in training mode: its dropout would be stored."""
    if model.training:
        raise ValueError("model is in training mode: call model.eval() first")


class ChunkStore:
    """Chunks of text, prefilled once by one model, kept in a folder.

    Each chunk is encoded as if it stood right after ``prefix``: its tokens then behave much as
    they will in a prompt that begins with that prefix, at no cost when the chunk is used. Keys
    are stored before RoPE, so a chunk fits every position. A file is complete or absent, and what
    it holds is compared with what was asked for, not trusted by its name.

    Args:
        path: the folder; made if it does not exist. Several stores and processes may share it.
        model: the model that encodes the chunks.
        tokenizer: turns strings into ids; not needed if all segments are ids.
        prefix: how prompts begin (system prompt, with its BOS token if the model wants one), as
            text or ids; None to encode chunks alone.

    Raises:
        ValueError: the model is in training mode.
        NotImplementedError: the model, named, cannot be blended, and why.

    Example:
        >>> store = ChunkStore("chunks/", model, tokenizer, prefix="You answer from documents.")
        >>> store.add(documents)
    """

    def __init__(
        self,
        path: str | Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefix: Segment | None = None,
    ) -> None:
        self.path = Path(path)
        self.model = model
        self.tokenizer = tokenizer
        require_eval(model)
        find_rotations(model)
        self.prefix = () if prefix is None else self.token_ids(prefix, "prefix")
        self.path.mkdir(parents=True, exist_ok=True)

    def token_ids(self, segment: Segment, name: str = "segment") -> tuple[int, ...]:
        """The ids of a segment; text is tokenised alone and without special tokens.

        Raises:
            ValueError: it is empty, text without a tokenizer, or has ids the model does not know.
        """
        if isinstance(segment, str):
            if self.tokenizer is None:
                raise ValueError(f"{name} is text, but the store has no tokenizer: pass one")
            segment = self.tokenizer(segment, add_special_tokens=False)["input_ids"]
        if not isinstance(segment, (list, tuple)):
            segment = segment.tolist()  # a tensor or an array
        if not all(isinstance(i, int) for i in segment):
            raise ValueError(f"{name} must be text or a flat sequence of int token ids")
        ids = tuple(segment)
        if not ids:
            raise ValueError(f"{name} is empty: leave it out or give it at least one token")
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"{name} has ids outside the model's vocabulary of {vocabulary}")
        return ids

    def key(
        self,
        ids: Sequence[int],
        prefix: Sequence[int] | None = None,
        identity: str | None = None,
    ) -> ChunkKey:
        """The key of a chunk of this store's model, by default after this store's prefix.
        ``identity`` is the model's, for callers that ask for many keys at once."""
        prefix = self.prefix if prefix is None else prefix
        identity = identity or model_identity(self.model)
        return ChunkKey(identity, tuple(prefix), tuple(ids))

    def _file(self, key: ChunkKey) -> Path:
        return self.path / f"{key.digest}.safetensors"

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether a whole file is there that says it holds this chunk."""
        return self._open(key, lambda file: None)[1] is None

    def __len__(self) -> int:
        return sum(1 for _ in self.path.glob("*.safetensors"))

    def add(self, documents: Sequence[Segment], progress: bool = True) -> list[ChunkKey]:
        """Prefill and store documents that are not there yet, and the prefix itself.

        Args:
            documents: texts or lists of token ids.
            progress: show a progress bar.

        Returns:
            The keys of the documents, in order.

        Raises:
            ValueError: a document is empty; nothing is stored then.
        """
        if isinstance(documents, str):
            raise ValueError("documents is one string: pass a list of documents")
        ids = [self.token_ids(document, f"documents[{i}]") for i, document in enumerate(documents)]
        identity = model_identity(self.model)
        keys = [self.key(document, identity=identity) for document in ids]
        wanted = [self.key(self.prefix, (), identity), *keys] if self.prefix else keys
        missing = [key for key in dict.fromkeys(wanted) if key not in self]
        for key in tqdm(missing, desc="prefilling chunks", unit="chunk", disable=not progress):
            self.put(self.encode(key))
        return keys

    @torch.no_grad()
    def encode(self, key: ChunkKey) -> Chunk:
        """Prefill one chunk after its prefix, without storing it.

        Raises:
            ValueError: the model is in training mode.
        """
        require_eval(self.model)
        ids = torch.tensor([key.prefix + key.ids], device=self.model.device)
        forward = PartialForward(self.model, ids)
        own = slice(len(key.prefix), None)
        hidden, keys, values = forward.embedded, [], []
        for layer in range(forward.layers):
            before_rope = KVRecorder(stop=True)
            forward.run(layer, hidden, None, before_rope, rotate=False)
            for kept, states in zip((keys, values), before_rope.kv, strict=True):
                kept.append(states[:, :, own].contiguous())
            if layer < forward.layers - 1:
                hidden = forward.run(layer, hidden, None, KVRecorder(stop=False))
        return Chunk(key, keys, values, forward.rotary_digest())

    def put(self, chunk: Chunk) -> None:
        """Store a chunk; the file appears when it is complete."""
        tensors = {
            f"{name}.{i}": states
            for name, layers in (("keys", chunk.keys), ("values", chunk.values))
            for i, states in enumerate(layers)
        }
        tensors["token_ids"] = torch.tensor(chunk.key.ids)
        tensors["prefix_ids"] = torch.tensor(chunk.key.prefix, dtype=torch.long)
        header = {
            "format": FORMAT,
            "model": chunk.key.model,
            "layers": str(len(chunk.keys)),
            "keys": "before RoPE",
            "rotary": chunk.rotary,
        }
        target = self._file(chunk.key)
        partial = target.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            # save_file would make a file that other users of a shared store cannot read.
            partial.write_bytes(save(tensors, metadata=header))
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def get(self, key: ChunkKey) -> tuple[Chunk | None, str | None]:
        """Load a chunk onto the model's device.

        Returns:
            The chunk and None, or None and why there is none.
        """
        return self._open(key, lambda file: self._read(file, key))

    def _open(self, key: ChunkKey, read: Callable) -> tuple[Any, str | None]:
        """Open a chunk's file, compare what it says with the key, and read it."""
        try:
            with safe_open(self._file(key), "pt", device=str(self.model.device)) as file:
                reason = self._mismatch(file, key)
                return (None, reason) if reason else (read(file), None)
        except FileNotFoundError:
            return None, "chunk not in the store"
        except (SafetensorError, KeyError, ValueError):
            return None, "chunk file is damaged"
        except OSError as error:
            return None, f"chunk file cannot be read: {error.strerror or error}"

    def _mismatch(self, file, key: ChunkKey) -> str | None:
        header = file.metadata() or {}
        if header.get("format") != FORMAT:
            return "chunk file has another format"
        if int(header["layers"]) != len(find_rotations(self.model)):
            return "chunk file is damaged"
        prefix, ids = (tuple(file.get_tensor(n).tolist()) for n in ("prefix_ids", "token_ids"))
        if ChunkKey(header["model"], prefix, ids) != key:
            return "chunk file holds another chunk than its name says"
        return None

    def _read(self, file, key: ChunkKey) -> Chunk:
        layers = range(len(find_rotations(self.model)))
        keys, values = (
            [file.get_tensor(f"{name}.{i}") for i in layers] for name in ("keys", "values")
        )
        return Chunk(key, keys, values, file.metadata()["rotary"])
