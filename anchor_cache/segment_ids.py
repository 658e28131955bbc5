"""What a segment of a prompt is: text or token ids."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .sink_token import SINK, Sink, sink_ids

Segment = str | Sequence[int]


def segment_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    segment: Segment | Sink,
    name: str,
) -> tuple[int, ...]:
    """The ids of a segment; text is tokenised alone and without special tokens.

    Raises:
        ValueError: it, by ``name``, is empty, text without a tokenizer, or no ids of the model's.
    """
    if segment is SINK:
        segment = sink_ids(model, tokenizer)
    if isinstance(segment, str):
        if tokenizer is None:
            raise ValueError(f"{name} is text, but the store has no tokenizer: pass one")
        segment = tokenizer(segment, add_special_tokens=False)["input_ids"]
    if hasattr(segment, "tolist"):  # a tensor or an array
        segment = segment.tolist()
    if not isinstance(segment, (list, tuple)) or not all(isinstance(i, int) for i in segment):
        raise ValueError(
            f"{name} must be text or a flat sequence of int token ids, and is {segment!r:.80}"
        )
    ids = tuple(segment)
    if not ids:
        raise ValueError(f"{name} is empty: leave it out or give it at least one token")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(f"{name} has ids outside the model's vocabulary of {vocabulary}")
    return ids
