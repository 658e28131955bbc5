"""Prefilling chunks that share a prefix: several in a pass, and the prefix once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from .patches.partial_forward import DRY_RUN, PartialForward
from .rope import KVRecorder, tables_are_fixed
from .validation import is_int, require

# SmolLM2-135M, bfloat16, one CPU core: passes of more tokens are no faster. Tokens per second of
# processor time after a prefix of 100 tokens, each chunk alone with its prefix / in batches: chunks
# of 64 tokens 195 / 575, of 256 tokens 375 / 555, of 1024 tokens 400 / 405.
BATCH_TOKENS = 4096
# Chunks are sorted by length, to pad little, among those of so many batches.
_WINDOW = 32

Ids = tuple[int, ...]


class EncodedChunk(NamedTuple):
    """Keys before RoPE and values, one ``[1, H_kv, T, D]`` per layer, and the digest of the rotary
    tables of the pass, as it would be if the chunk had been encoded alone."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rotary: str


class _AfterPrefix:
    """A cache that puts the prefix's keys and values before the fresh ones of every row."""

    def __init__(self, prefix: tuple[torch.Tensor, torch.Tensor], batch: int) -> None:
        self.prefix = [states.expand(batch, -1, -1, -1) for states in prefix]

    def update(self, key_states, value_states, *args, **kwargs):
        fresh = (key_states, value_states)
        return tuple(torch.cat(pair, dim=2) for pair in zip(self.prefix, fresh, strict=True))


class ChunkEncoder:
    """Prefills chunks as if each stood right after the same prefix.

    Chunks go through the model in batches of similar lengths, padded on the right. Where it pays
    (for chunks that are not much longer than the prefix), the prefix is computed once, and only the
    chunks' own tokens after it. Where the rotary tables change with the length of the pass (dynamic
    and long RoPE), only chunks of equal lengths share one, with the prefix in every row: what a
    chunk is encoded to never depends on its company.

    Args:
        model: the model, in eval mode.
        prefix: ids that stand before every chunk.
        batch_tokens: most tokens in one pass, with the prefix of every row and padding; a chunk
            that is longer goes alone. None: 4096.

    Raises:
        ValueError: ``batch_tokens`` is no positive int.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prefix: Sequence[int] = (),
        batch_tokens: int | None = None,
    ) -> None:
        self.batch_tokens = BATCH_TOKENS if batch_tokens is None else batch_tokens
        require(
            is_int(self.batch_tokens, 1), "batch_tokens", batch_tokens, "a positive int, or None"
        )
        self.model, self.prefix = model, tuple(prefix)
        self._fixed_tables = tables_are_fixed(model)
        self._prefix_kv: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._digests: dict[int, str] = {}

    def windows(self, chunks: Iterable[Ids]) -> Iterator[list[Ids]]:
        """Cut a stream of chunks into lists worth encoding together, without reading ahead."""
        window: list[Ids] = []
        tokens = 0
        for chunk in chunks:
            window.append(chunk)
            tokens += len(self.prefix) + len(chunk)
            if tokens >= _WINDOW * self.batch_tokens:
                yield window
                window, tokens = [], 0
        if window:
            yield window

    @torch.no_grad()
    def encode(self, chunks: Sequence[Ids]) -> Iterator[tuple[int, EncodedChunk]]:
        """Prefill chunks, the longest first.

        Yields:
            The index of a chunk and what it became, for all chunks of a batch as soon as that is
            computed.
        """
        for batch in self._batches([len(chunk) for chunk in chunks]):
            yield from zip(batch, self._encode([chunks[i] for i in batch]), strict=True)

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            row = len(self.prefix) + lengths[batch[0] if batch else i]
            full = (len(batch) + 1) * row > self.batch_tokens
            if batch and (full or not (self._fixed_tables or lengths[batch[0]] == lengths[i])):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _encode(self, chunks: list[Ids]) -> list[EncodedChunk]:
        longest = len(chunks[0])
        # A token of the chunk's own is the safest padding: others may have no ordinary states.
        rows = [(*self.prefix, *chunk, *chunk[-1:] * (longest - len(chunk))) for chunk in chunks]
        forward = self._forward(rows)
        hidden, own, start, prefix = forward.embedded, None, len(self.prefix), None
        if self._fixed_tables and self._sharing_pays(longest):
            prefix = self._known_prefix()
            own = torch.arange(start, forward.tokens, device=hidden.device)
            hidden, start = hidden[:, start:], 0
        encoded = [EncodedChunk([], [], self._digest(forward, len(chunk))) for chunk in chunks]
        for layer in range(forward.layers):
            before_rope = KVRecorder(stop=True)
            forward.run(layer, hidden, own, before_rope, rotate=False)
            for i, chunk in enumerate(chunks):
                span = slice(start, start + len(chunk))
                for kept, states in zip(encoded[i][:2], before_rope.kv, strict=True):
                    kept.append(
                        states[i : i + 1, :, span].clone(memory_format=torch.contiguous_format)
                    )
            if layer < forward.layers - 1:
                cache = KVRecorder(stop=False)
                if prefix is not None:
                    cache = _AfterPrefix(prefix[layer], len(chunks))
                hidden = forward.run(layer, hidden, own, cache)
        return encoded

    def _sharing_pays(self, longest: int) -> bool:
        """Whether rows without the prefix's tokens cost less, though their attention needs a mask,
        with which it also computes what causality hides. One pair of query and key costs about as
        much as a token's matrix products divided by 2.5 times the hidden size (measured: sharing
        100 tokens pays for chunks of up to some 550 with a hidden size of 576)."""
        before = len(self.prefix)
        width = self.model.config.get_text_config(decoder=True).hidden_size
        return longest**2 - before**2 < 5 * width * before

    def _forward(self, rows: list[Ids]) -> PartialForward:
        ids = torch.tensor(rows, device=self.model.device)
        if self._fixed_tables:
            return PartialForward(self.model, ids)
        # Dynamic RoPE keeps the tables of the longest pass, another thread's too, until it sees a
        # short one.
        with DRY_RUN:
            PartialForward(self.model, ids[:1, :1])
            return PartialForward(self.model, ids)

    def _known_prefix(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys after RoPE and values of the prefix, all but the last layer's."""
        if self._prefix_kv is None:
            forward = self._forward([self.prefix])
            hidden, self._prefix_kv = forward.embedded, []
            for layer in range(forward.layers - 1):
                recorder = KVRecorder(stop=False)
                hidden = forward.run(layer, hidden, None, recorder)
                self._prefix_kv.append(recorder.kv)
        return self._prefix_kv

    def _digest(self, forward: PartialForward, tokens: int) -> str:
        if not self._fixed_tables:
            return forward.rotary_digest()
        if tokens not in self._digests:
            self._digests[tokens] = forward.rotary_digest(len(self.prefix) + tokens)
        return self._digests[tokens]
