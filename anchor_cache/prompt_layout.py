"""Where the keys and values of every token of a prompt come from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from .chunk import ChunkKey, ChunkReader
from .chunk_store import ChunkStore
from .model_identity import model_identity
from .patches.partial_forward import PartialForward
from .segment_ids import Segment

OTHER_PREFIX = "chunk encoded after another prefix than the prompt's"


@dataclasses.dataclass
class PromptLayout:
    """A prompt, cut into segments, and the stored chunks that fit into it.

    Attributes:
        ids: ``[1, T + 1]``; the last one is left to ``generate``.
        segment_starts: first token of each segment.
        chunks: first position and stored chunk, by position.
        exact: tokens ``[T]`` whose stored context is the real one.
        reused: tokens ``[T]`` that were stored, exact ones included.
        before, after: tokens of the own segment before and after each ``[T]``.
        reasons: what was not reused, or not as good as it could be.
        missing: segments that were not stored.
    """

    ids: torch.Tensor
    segment_starts: list[int]
    chunks: list[tuple[int, ChunkReader]]
    exact: torch.Tensor
    reused: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    reasons: Counter
    missing: list[Sequence[int]]

    @property
    def tokens(self) -> int:
        """All but the last."""
        return self.ids.shape[1] - 1

    @property
    def inexact(self) -> torch.Tensor:
        """Reused tokens whose stored context is another one ``[T]``."""
        return self.reused & ~self.exact

    def doubt_other_tables(self, forward: PartialForward) -> None:
        """A chunk in its real context is exact only if its rotary tables are the prompt's, too."""
        for start, chunk in self.chunks:
            span = slice(start, start + len(chunk.key.ids))
            if self.exact[span.start] and chunk.rotary != forward.rotary_digest(span.stop):
                self.exact[span] = False

    def close(self) -> None:
        """Let go of the chunks."""
        for _, chunk in self.chunks:
            chunk.close()


def look_up(
    store: ChunkStore, segments: Sequence[Segment], without: Mapping[ChunkKey, str] | None = None
) -> PromptLayout:
    """Find the stored chunks of a prompt.

    A segment's chunk is looked for as it was encoded after all that stands before it, after the
    prompt's first segment, and after the store's prefix, in this order.

    Args:
        store: where the chunks are.
        segments: texts or lists of token ids; the last one is the question.
        without: chunks that cannot be read after all, and why.

    Raises:
        ValueError: no segments, or one that is empty or unknown to the model.
    """
    if isinstance(segments, str) or not len(segments):
        raise ValueError("segments must be a list that ends with the question")
    ids = [store.token_ids(segment, f"segments[{i}]") for i, segment in enumerate(segments)]
    lengths = torch.tensor([len(segment) for segment in ids])
    starts = (lengths.cumsum(0) - lengths).tolist()
    flat = tuple(token for segment in ids for token in segment)
    before = torch.arange(len(flat)) - torch.tensor(starts).repeat_interleave(lengths)
    after = lengths.repeat_interleave(lengths) - 1 - before
    exact = torch.zeros(len(flat) - 1, dtype=torch.bool)
    reused, reasons, missing = exact.clone(), Counter(), []
    chunks: list[tuple[int, ChunkReader]] = []
    opened: dict[ChunkKey, ChunkReader] = {}
    identity = model_identity(store.model)
    try:
        for i, (start, segment) in enumerate(zip(starts[:-1], ids[:-1], strict=True)):
            contexts = dict.fromkeys([flat[:start], ids[0] if i else (), store.prefix])
            keys = [store.key(segment, context, identity) for context in contexts]
            chunk, reason = _first_stored(store, keys, opened, without or {})
            if chunk is None:
                reasons[reason] += 1
                if i or segment != store.prefix:  # which the store adds by itself
                    missing.append(segment)
                continue
            chunks.append((start, chunk))
            span = slice(start, start + len(segment))
            reused[span] = True
            exact[span] = chunk.key.prefix == flat[:start] and not chunk.key.is_lossy
            if chunk.key.prefix != flat[: len(chunk.key.prefix)]:
                reasons[OTHER_PREFIX] += 1
    except BaseException:
        for chunk in opened.values():
            chunk.close()
        raise
    device = store.model.device
    return PromptLayout(
        torch.tensor([flat], device=device),
        starts,
        chunks,
        exact.to(device),
        reused.to(device),
        before[:-1].to(device),
        after[:-1].to(device),
        reasons,
        missing,
    )


def _first_stored(store, keys, opened, without) -> tuple[ChunkReader | None, str | None]:
    """The first of the keys that is stored, or why the last is not: it is the store's own way to
    encode the chunk, so the one that should be there."""
    reason = None
    for key in keys:
        if key in without:
            reason = without[key]
            continue
        if key not in opened:
            chunk, reason = store.open(key)
            if chunk is None:
                continue
            opened[key] = chunk
        return opened[key], None
    return None, reason
