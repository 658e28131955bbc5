"""Prompts of evaluate_blend.py with questions on several passages: MuSiQue, Natural Questions.

The halves "tune" and "report" take every other question of a set, and passages of their own
questions only.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from blend_tasks import HALVES, BlendPrompt, question_prompt

NQ_FILE = "nq_oracle_500.jsonl"


def _half(rows, half: str):
    """Every other row, with its number."""
    return itertools.islice(enumerate(rows), HALVES.index(half), None, 2)


def _multi_hop(data: str | Path | None) -> Iterator[tuple[str, list[str], list[tuple[str, bool]]]]:
    """Questions of MuSiQue, answers, and passages with whether they are marked as needed.

    ``musique_s_60.json`` marks none, and its passages are in lower case, so that the answers have
    to be. The rows of the Hub, taken where no folder is given, mark those that support the answer;
    that way is untried: it needs a network.
    """
    folder = data or os.environ.get("ANCHOR_CACHE_DATA")
    if folder is not None:
        for row in json.loads((Path(folder) / "musique_s_60.json").read_text("utf-8")):
            answers = [answer.lower() for answer in row["answers"]]
            yield row["question"], answers, [(own["text"], False) for own in row["ctxs"]]
        return
    from datasets import load_dataset

    for row in load_dataset("dgslibisey/MuSiQue", split="validation"):
        passages = [
            (f"{own['title']}: {own['paragraph_text']}", own["is_supporting"])
            for own in row["paragraphs"]
        ]
        yield row["question"], [row["answer"], *row["answer_aliases"]], passages


def musique(
    tokenizer, half: str, prompts: int, data: str | Path | None = None, max_tokens: int = 3072
) -> list[BlendPrompt]:
    """Questions whose answer takes several passages, each a chunk; in their own order.

    Args:
        tokenizer: the model's.
        half: "tune" or "report".
        prompts: how many, as far as there are.
        data: a folder with ``musique_s_60.json``; None: ``$ANCHOR_CACHE_DATA``, or the Hub.
        max_tokens: of a prompt. As many passages as fit: first those that are marked as needed,
            then those in which an answer occurs, then the others.

    Raises:
        ValueError: the passages that are marked as needed do not fit.
    """
    made = []
    for number, (question, answers, passages) in _half(_multi_hop(data), half):
        if len(made) == prompts:
            break

        def order(i: int, answers=answers, passages=passages) -> tuple[bool, bool]:
            text, needed = passages[i]
            return not needed, not any(a.lower() in text.lower() for a in answers)

        def prompt_of(kept, number=number, question=question, answers=answers, passages=passages):
            texts = [passages[i][0] for i in sorted(kept)]
            name = f"question {number}"
            return question_prompt(tokenizer, name, name, texts, question, answers)

        kept, prompt = [], None
        for i in sorted(range(len(passages)), key=order):
            longer = prompt_of([*kept, i])
            if len(longer.ids) <= max_tokens:
                kept, prompt = [*kept, i], longer
            elif passages[i][1] or prompt is None:
                raise ValueError(
                    f"max_tokens={max_tokens}: question {number} needs {len(longer.ids)} at least"
                )
        made.append(prompt)
    return made


def nq(
    tokenizer, half: str, prompts: int, data: str | Path | None = None, passages: int = 5
) -> list[BlendPrompt]:
    """A question of Natural Questions; the passage that answers it among those of other questions.

    Args:
        tokenizer: the model's.
        half: "tune" or "report".
        prompts: how many, as far as there are.
        data: a folder with ``nq_oracle_500.jsonl``; None: ``$ANCHOR_CACHE_DATA``.
        passages: chunks of a prompt; the place of the answering one is drawn.

    Raises:
        ValueError: no folder is given.
    """
    folder = data or os.environ.get("ANCHOR_CACHE_DATA")
    if folder is None:
        raise FileNotFoundError(
            f"data=None and no $ANCHOR_CACHE_DATA: nq needs a folder with {NQ_FILE} (a line per "
            "question: question, answers, title, text; made of the file nq-open-oracle.jsonl.gz "
            "of github.com/nelson-liu/lost-in-the-middle)"
        )
    lines = (Path(folder) / NQ_FILE).read_text("utf-8").splitlines()
    rows = dict(_half(map(json.loads, lines), half))
    made = []
    for number, row in itertools.islice(rows.items(), prompts):
        rng = random.Random(f"nq {half} {number}")
        answers = [answer.lower() for answer in row["answers"]]
        others = [
            own
            for own in rows.values()
            if own is not row and not any(a in own["text"].lower() for a in answers)
        ]
        chosen = rng.sample(others, passages - 1)
        chosen.insert(rng.randrange(passages), row)
        texts = [f"{own['title']}: {own['text']}" for own in chosen]
        question = row["question"].rstrip("?") + "?"
        name = f"question {number}"
        made.append(question_prompt(tokenizer, name, name, texts, question, row["answers"]))
    return made
