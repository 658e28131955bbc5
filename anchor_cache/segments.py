"""Cutting a chat prompt at the borders of its documents."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# Private characters around a number stand for a document while the template is rendered.
_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000(\\d+)\ue001")


def segments_from_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict], documents: Sequence[str]
) -> list[str]:
    """Render a chat template and cut it at the documents' borders.

    Args:
        tokenizer: with a chat template.
        messages: the conversation; the documents stand in its contents word for word.
        documents: in the order in which they appear. Each is cut at its first occurrence after the
            one before it.

    Returns:
        Segments for :meth:`BlendedCache.blend`: what comes before the first document (make it the
        store's prefix), the documents with whatever stands between them, and the rest, which ends
        with the generation prompt.

    Raises:
        ValueError: a document is empty or not found after the one before it, or the template
            changes it.

    Example:
        >>> segments = segments_from_chat(tokenizer, messages, documents)
        >>> store = ChunkStore("chunks/", model, tokenizer, prefix=segments[0])
    """
    if isinstance(documents, str):
        raise ValueError("documents is one string: pass a list of documents")
    for i, document in enumerate(documents):
        if not document:
            raise ValueError(f"documents[{i}] is empty: leave it out")
    marked, found = [], 0
    for message in messages:
        content, rest = "", message["content"]
        while isinstance(rest, str) and found < len(documents) and documents[found] in rest:
            before, _, rest = rest.partition(documents[found])
            content += before + _MARK.format(found)
            found += 1
        marked.append({**message, "content": content + rest if content else rest})
    if found < len(documents):
        raise ValueError(
            f"documents[{found}] does not appear in the messages after the documents before it: "
            "they must contain every document word for word and in order"
        )
    options = dict(tokenize=False, add_generation_prompt=True)
    pieces = _MARKS.split(tokenizer.apply_chat_template(marked, **options))
    # Every other piece is the number of a document.
    segments = [documents[int(p)] if i % 2 else p for i, p in enumerate(pieces)]
    if "".join(segments) != tokenizer.apply_chat_template(messages, **options):
        raise ValueError(
            "documents are changed by the chat template (it may trim a message that ends with "
            "one): take the white space around them into the messages instead"
        )
    return [segment for segment in segments if segment]
