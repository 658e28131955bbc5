"""A prefix for chunks whose prompts are not known yet: the one token that begins them all."""

from __future__ import annotations

import enum

from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Sink(enum.Enum):
    """The type of :data:`SINK`."""

    SINK = "the token that begins prompts"

    def __repr__(self) -> str:
        return self.name


SINK = Sink.SINK


def sink_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """What :data:`SINK` stands for: the BOS token of the tokenizer, else of the model's
    configuration, else the first EOS token of either.

    A model spends much of its attention on the first token of a prompt, whatever it is (an
    attention sink). A chunk that is encoded alone makes a sink of its own first token, which is
    none once the chunk stands elsewhere; behind this token it does not.

    Raises:
        ValueError: neither has such a token.
    """
    sources = (tokenizer, model.config.get_text_config(decoder=True))
    for name in ("bos_token_id", "eos_token_id"):
        for source in sources:
            found = getattr(source, name, None)
            if isinstance(found, (list, tuple)):
                found = next(iter(found), None)
            if found is not None:
                return (found,)
    raise ValueError(
        "prefix=SINK needs a model or a tokenizer with a BOS or an EOS token, and there is none: "
        "pass the ids of the token that begins your prompts, prefix=[id]"
    )
