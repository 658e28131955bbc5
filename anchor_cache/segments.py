"""Cutting a chat prompt at the borders of its documents."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def segments_from_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict], documents: Sequence[str]
) -> list[str]:
    """Render a chat template and cut it at the documents' borders.

    Args:
        tokenizer: with a chat template.
        messages: the conversation; the documents stand in it word for word.
        documents: in the order in which they appear. Each is cut at its first occurrence, so it
            should not also be a part of what comes before it (a single word might be).

    Returns:
        Segments for :meth:`BlendedCache.blend`: what comes before the first document (make it the
        store's prefix), the documents with whatever stands between them, and the rest, which ends
        with the generation prompt.

    Raises:
        ValueError: a document is empty or not found after the one before it.

    Example:
        >>> segments = segments_from_chat(tokenizer, messages, documents)
        >>> store = ChunkStore("chunks/", model, tokenizer, prefix=segments[0])
    """
    if isinstance(documents, str):
        raise ValueError("documents is one string: pass a list of documents")
    rest = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    segments = []
    for i, document in enumerate(documents):
        if not document:
            raise ValueError(f"documents[{i}] is empty: leave it out")
        before, found, rest = rest.partition(document)
        if not found:
            raise ValueError(
                f"documents[{i}] does not appear in the rendered chat after the documents before "
                "it: messages must contain every document word for word and in order"
            )
        segments += [before, document]
    return [segment for segment in [*segments, rest] if segment]
