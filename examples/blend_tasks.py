"""The prompts of evaluate_blend.py: facts cut by a chunk border, ordinary text, XQuAD.

Every prompt is a list of token-id segments (prefix, chunks, question) and the tokens that should
follow. The halves "tune" and "report" never share a city, a window of text or an article. More
tasks: blend_reference_task.py, blend_question_tasks.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
from pathlib import Path

from texts import long_texts

HALVES = ("tune", "report")
CITIES = {
    "tune": "Oslo Lima Cairo Delhi Quito Tokyo Rome Berlin Boston Dublin Athens Kyoto".split(),
    "report": "Paris London Madrid Vienna Prague Moscow Chicago Lisbon Sydney Havana Seoul "
    "Toronto".split(),
}
_WHO = "teacher gardener baker sailor doctor farmer painter driver singer neighbour".split()
_DID = ["looked for", "talked about", "carried", "cleaned", "bought", "forgot", "repaired", "drew"]
_WHAT = ["a wooden chair", "the old lamp", "a blue coat", "the small boat", "a basket of apples"]
_WHAT += ["the garden gate", "a bag of flour", "the kitchen table", "a long letter", "two maps"]
_WHERE = ["near the station", "behind the school", "by the river", "in the market", "at home"]
_WHEN = ["in the morning", "after lunch", "before the rain", "on Monday", "late in the evening"]

# More than any tokenizer needs for ordinary text, so that a window of text is long enough.
_CHARACTERS_PER_TOKEN = 6

SHOTS = (
    (
        "The old bridge over the Arda was opened in 1932 by a local engineer, Tom Hale. It was "
        "closed for repairs after the flood of 1958 and carries only pedestrians today.",
        (
            ("Who opened the bridge?", "Tom Hale"),
            ("Who may cross the bridge today?", "pedestrians"),
        ),
    ),
    (
        "Green tea leaves are heated soon after they are picked, which stops them from turning "
        "brown. Most of the harvest is sold in the two weeks before the summer festival.",
        (("What stops the leaves from turning brown?", "heat"),),
    ),
)


@dataclasses.dataclass(frozen=True)
class BlendPrompt:
    """A prompt in segments, and what should follow it.

    Attributes:
        name: unique within its task and half.
        kind: what results are also grouped by (the text, the article).
        segments: token ids: prefix, chunks, question.
        gold: token ids of the right continuation.
        answers: accepted answers as text; empty where none is to be decoded.
    """

    name: str
    kind: str
    segments: tuple[tuple[int, ...], ...]
    gold: tuple[int, ...]
    answers: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The whole prompt as one list."""
        return [token for segment in self.segments for token in segment]

    @property
    def digest(self) -> str:
        """Changes with any token of the prompt."""
        text = json.dumps([self.segments, self.gold])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def encoder(tokenizer):
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def beginning(tokenizer) -> tuple[int, ...]:
    """The token that prompts begin with, for models that have one."""
    return () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)


def filler(rng: random.Random) -> str:
    who, did, what, where, when = map(rng.choice, (_WHO, _DID, _WHAT, _WHERE, _WHEN))
    return f" {when[0].upper()}{when[1:]}, the {who} {did} {what} {where}."


def facts(tokenizer, half: str, prompts: int, split: bool = True, sentences: int = 5):
    """Four facts among filler; a question asks for one of them, whose number is the gold answer.

    Args:
        tokenizer: the model's.
        half: "tune" or "report".
        prompts: how many.
        split: the border between two chunks runs through each fact, before "is"; False: behind it.
        sentences: of filler per chunk (five make prompts of about 460 tokens).
    """
    encode, made = encoder(tokenizer), []
    for i in range(prompts):
        rng = random.Random(f"facts {half} {i}")
        cities = rng.sample(CITIES[half], 4)
        numbers = [str(rng.randrange(1_000_000, 10_000_000)) for _ in cities]
        chunks, rest = [], ""
        for city, number in zip(cities, numbers, strict=True):
            subject, value = f" The special magic number for {city}", f" is {number}."
            body = rest + "".join(filler(rng) for _ in range(sentences)) + subject
            chunks.append(body if split else body + value)
            rest = value if split else ""
        chunks.append(rest + "".join(filler(rng) for _ in range(sentences)))
        city, number = rng.choice(list(zip(cities, numbers, strict=True)))
        prefix = "Read the notes and remember the special magic numbers.\n\nNotes:"
        question = (
            f"\n\nQuestion: What is the special magic number for {city}?\n"
            f"Answer: The special magic number for {city} is"
        )
        segments = (
            beginning(tokenizer) + encode(prefix),
            *map(encode, chunks),
            encode(question),
        )
        name = f"{'split' if split else 'whole'} {i}"
        made.append(BlendPrompt(name, city, segments, encode(f" {number}")))
    return made


def continuation(
    tokenizer,
    half: str,
    prompts: int,
    data: str | Path | None = None,
    datasets: list[str] | None = None,
    chunks: int = 6,
    chunk_tokens: int = 256,
    question_tokens: int = 32,
    gold_tokens: int = 128,
):
    """Contiguous chunks of ordinary text, the first of which is the prefix; what follows is split
    into the "question" (fresh) and the continuation on which distributions are compared."""
    start, length = beginning(tokenizer), chunks * chunk_tokens
    window = length + question_tokens + gold_tokens
    encode, by_text = encoder(tokenizer), []
    characters = _CHARACTERS_PER_TOKEN * window
    for name, text in long_texts(data, datasets).items():
        places = list(range(HALVES.index(half), len(text) // characters, 2))
        random.Random(f"{name} {half}").shuffle(places)
        by_text.append([(name, place, text[place * characters :][:characters]) for place in places])
    made = []
    for name, place, text in in_turns(by_text):
        if len(made) == prompts:
            break
        ids = encode(text)[:window]
        if len(ids) < window:
            continue
        pieces = [ids[i * chunk_tokens :][:chunk_tokens] for i in range(chunks)]
        segments = (
            start + pieces[0],
            *pieces[1:],
            ids[length:][:question_tokens],
        )
        made.append(BlendPrompt(f"{name} {place}", name, segments, ids[-gold_tokens:]))
    return made


def in_turns(lists: list[list]) -> list:
    """The first of every list, then the second of every list that has one, and so on."""
    return [own[i] for i in range(max(map(len, lists))) for own in lists if i < len(own)]


def xquad_articles(data: str | Path | None) -> list[list[tuple[str, list[dict]]]]:
    """Articles of XQuAD: paragraphs with their questions and answers."""
    folder = data or os.environ.get("ANCHOR_CACHE_DATA")
    if folder is not None:
        articles = json.loads((Path(folder) / "xquad.en.json").read_text("utf-8"))["data"]
        return [
            [
                (
                    p["context"],
                    [
                        {
                            "question": qa["question"],
                            "answers": [a["text"] for a in qa["answers"]],
                        }
                        for qa in p["qas"]
                    ],
                )
                for p in article["paragraphs"]
            ]
            for article in articles
        ]
    from datasets import load_dataset

    paragraphs: dict[str, list[dict]] = {}
    for row in load_dataset("google/xquad", "xquad.en", split="validation"):
        own = paragraphs.setdefault(row["context"], [])
        own.append({"question": row["question"], "answers": row["answers"]["text"]})
    listed = list(paragraphs.items())
    return [listed[i : i + 5] for i in range(0, len(listed), 5)]  # every article has five


def question_prompt(tokenizer, name: str, kind: str, passages, question: str, answers):
    """A question on passages, one chunk each, after a prefix that shows how to answer."""
    encode = encoder(tokenizer)
    prefix = "Answer each question with a few words from the text.\n\n"
    for text, pairs in SHOTS:
        prefix += f"Text: {text}\n\n"
        prefix += "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in pairs)
    chunks = [f"{passage}\n\n" for passage in passages]
    chunks[0] = "Text: " + chunks[0]
    segments = (
        beginning(tokenizer) + encode(prefix),
        *map(encode, chunks),
        encode(f"Question: {question}\nAnswer:"),
    )
    return BlendPrompt(name, kind, segments, encode(" " + answers[0]), tuple(answers))


def xquad(tokenizer, half: str, prompts: int, data: str | Path | None = None):
    """Five paragraphs of one article as chunks, a few-shot prefix, one question."""
    both = enumerate(xquad_articles(data))
    articles = {i: article for i, article in both if i % 2 == HALVES.index(half)}
    asked = []
    for number, article in articles.items():
        pairs = [qa for _, qas in article for qa in qas]
        random.Random(f"xquad {number} {half}").shuffle(pairs)
        each = -(-prompts // len(articles))
        asked += [(round_, number, qa) for round_, qa in enumerate(pairs[:each])]
    # One question of every article before the second of any, then article by article.
    asked = sorted(sorted(asked, key=lambda a: a[:2])[:prompts], key=lambda a: a[1])
    return [
        question_prompt(
            tokenizer,
            f"article {number}, question {round_}",
            f"article {number}",
            [context for context, _ in articles[number]],
            qa["question"],
            qa["answers"],
        )
        for round_, number, qa in asked
    ]
