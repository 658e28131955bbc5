"""Long prompts whose answer lies somewhere in them: the kinds of RULER's tasks, made here.

"single": one fact in a long manual; "multikey": asked for one of several alike; "multivalue": one
subject with several numbers, all asked for; "tracing": variables that copy each other's value;
"counting": the words that are mentioned most often; "questions": a question on one of many articles
(XQuAD). "text" is ordinary text, of which only the likelihood is looked at.

A prompt ends where its answer begins, and the answer is known: a model that decodes greedily gives
an item of it exactly if each of the item's tokens is the most likely one. The halves "tune" and
"report" share no city, variable, word, window of text or article.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator

from blend_tasks import CITIES, HALVES, in_turns, xquad_articles
from texts import long_texts, manual, room, starts

MADE = ("single", "multikey", "multivalue", "tracing", "counting")
WORDS = {
    "tune": "apple river stone window garden letter bridge candle summer pocket".split(),
    "report": "basket mirror forest ticket hammer island carpet winter ladder button".split(),
}
# More than any tokenizer needs for ordinary text.
_CHARACTERS_PER_TOKEN = 8
_AROUND = 70  # tokens of the question and the chat template
_RARE = "cloud paper lamp horse coat door road ship bread wheel clock glass salt rope wool".split()


@dataclasses.dataclass(frozen=True)
class RetrievalPrompt:
    """A prompt and the tokens that answer it.

    Attributes:
        name: unique within its task and half.
        kind: what results are also grouped by: the length in tokens, or the text.
        ids: the prompt, up to where the answer begins.
        target: the answer.
        items: ranges of the answer that count: a number, a name; none for ordinary text.
    """

    name: str
    kind: str
    ids: tuple[int, ...]
    target: tuple[int, ...]
    items: tuple[tuple[int, int], ...] = ()

    @property
    def digest(self) -> str:
        """Changes with any token of prompt and answer."""
        text = json.dumps([self.ids, self.target, self.items])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Maker:
    """Cuts text into tokens and puts prompts together, with the model's chat template."""

    def __init__(self, tokenizer, half: str) -> None:
        self.tokenizer, self.half = tokenizer, half
        text = manual()
        middle = len(text) // 2
        self.text = text[:middle] if half == "tune" else text[middle:]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def document(self, rng: random.Random, length: int, facts: list[tuple[float, str]]) -> str:
        """Ordinary text with facts at these depths (0 to 1) of it, for a prompt of so many
        tokens. Facts at the same depth keep their order."""
        tokens = length - _AROUND - sum(len(self.encode(fact)) for _, fact in facts)
        characters = _CHARACTERS_PER_TOKEN * tokens
        start = rng.randrange(max(len(self.text) - characters, 1))
        ids = self.encode(self.text[start:][:characters])[:tokens]
        cut = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        sentences = [f"{sentence}. " for sentence in cut.split(". ")]
        places = [(depth * len(sentences) - 0.5, fact) for depth, fact in facts]
        pieces = sorted([*enumerate(sentences), *places], key=lambda piece: piece[0])
        return "".join(piece for _, piece in pieces)

    def prompt(self, name, kind, document: str, question: str, said: str, items: list[str]):
        """A question on a document; the answer has begun with ``said``, and ``items`` follow."""
        asked = f"{document.strip()}\n\n{question}"
        if self.tokenizer.chat_template:
            asked = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False
            )
        else:
            asked = f"{self.tokenizer.bos_token or ''}{asked}\n"
        # The answer's tokens are those that it has in its place: tokenizers join what touches.
        text, ranges = asked + said, []
        ids = self.encode(text)
        for i, item in enumerate(items):
            text += "," if i else ""
            start = len(self.encode(text))
            text += f" {item}"
            ranges.append((start - len(ids), len(self.encode(text)) - len(ids)))
        whole = self.encode(text)
        if whole[: len(ids)] != ids:
            raise ValueError(f"{name}: this tokenizer joins the prompt and its answer")
        return RetrievalPrompt(name, kind, ids, whole[len(ids) :], tuple(ranges))


def _magic(city: str, number: int) -> str:
    return f"The special magic number for {city} is {number}. "


def _numbers(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1_000_000, 10_000_000) for _ in range(count)]


def _needle(maker, rng, name, length, depth, keys: int):
    cities, numbers = rng.sample(CITIES[maker.half], keys), _numbers(rng, keys)
    depths = [depth, *(rng.random() for _ in cities[1:])]
    facts = [(d, _magic(c, n)) for d, c, n in zip(depths, cities, numbers, strict=True)]
    question = f"What is the special magic number for {cities[0]}? Answer with the number."
    said = f"The special magic number for {cities[0]} is"
    document = maker.document(rng, length, facts)
    return maker.prompt(name, str(length), document, question, said, [str(numbers[0])])


def _multivalue(maker, rng, name, length, depth, values: int = 4):
    (city,), numbers = rng.sample(CITIES[maker.half], 1), _numbers(rng, values)
    depths = sorted([depth, *(rng.random() for _ in numbers[1:])])
    facts = [
        (d, f"One of the special magic numbers for {city} is {n}. ")
        for d, n in zip(depths, numbers, strict=True)
    ]
    question = f"What are all the special magic numbers for {city}, in order of appearance?"
    said = f"The special magic numbers for {city} are"
    document = maker.document(rng, length, facts)
    return maker.prompt(name, str(length), document, question, said, list(map(str, numbers)))


def _tracing(maker, rng, name, length, depth, hops: int = 3):
    letters = "ABCDEFGHIJKLM" if maker.half == "tune" else "NOPQRSTUVWXYZ"
    names = ["".join(rng.sample(letters, 3)) for _ in range(2 * (hops + 1))]
    while len(set(names)) < len(names):
        names = ["".join(rng.sample(letters, 3)) for _ in names]
    chains, facts = (names[: hops + 1], names[hops + 1 :]), []
    values = _numbers(rng, 2)
    for chain, value in zip(chains, values, strict=True):
        # What is copied stands before its copies.
        depths = sorted([depth, *(depth + (1 - depth) * rng.random() for _ in chain[1:])])
        sources = [str(value), *(f"VAR {one}" for one in chain)]
        for d, one, source in zip(depths, chain, sources, strict=False):
            facts.append((d, f"VAR {one} = {source}. "))
    question = f"Which variables have the value {values[0]}, directly or by copying?"
    said = f"The variables with the value {values[0]} are"
    document = maker.document(rng, length, facts)
    return maker.prompt(name, str(length), document, question, said, chains[0])


def _counting(maker, rng, name, length, depth, common: int = 3):
    often = rng.sample(WORDS[maker.half], common)
    words = often * 8 + _RARE
    said_of = [f"A word of the day is {word}. " for word in words]
    # All over the text, from the depth on.
    facts = [(depth + (1 - depth) * rng.random(), one) for one in said_of]
    document = maker.document(rng, length, facts)
    question = f"Which {common} words are a word of the day most often, in alphabetical order?"
    said = "The most frequent words of the day are"
    return maker.prompt(name, str(length), document, question, said, sorted(often))


_MAKERS = {
    "single": lambda *args: _needle(*args, keys=1),
    "multikey": lambda *args: _needle(*args, keys=4),
    "multivalue": _multivalue,
    "tracing": _tracing,
    "counting": _counting,
}


def made(tokenizer, task: str, half: str, lengths, depths: int) -> Iterator[RetrievalPrompt]:
    """Prompts of one of the tasks in ``MADE``: for every length, ``depths`` evenly spread ones."""
    maker = _Maker(tokenizer, half)
    for length in lengths:
        for i in range(depths):
            depth = (i + (0.25 if half == "tune" else 0.75)) / depths
            rng = random.Random(f"{task} {half} {length} {i}")
            yield _MAKERS[task](maker, rng, f"{length} at {depth:.2f}", length, depth)


def text(tokenizer, half: str, places: int, length: int, steps: int, data=None, datasets=None):
    """Ordinary text: contexts of ``length`` tokens and the ``steps`` tokens that follow them, at
    ``places`` of every text, between those of the other half.

    Raises:
        ValueError: the texts are too short for that.
    """
    own = []
    for name, whole in long_texts(data, datasets).items():
        own.append([])
        for start in starts(whole, half, places):
            part = whole[start:][: 8 * (length + steps)]
            # With what the tokenizer puts before any text.
            ids = tuple(tokenizer(part, verbose=False)["input_ids"][: length + steps])
            said = tokenizer.decode(ids, skip_special_tokens=True)
            if len(ids) < length + steps or len(said) > room(whole, places):
                raise ValueError(
                    f"{name} is too short for {places} places of {length + steps} tokens in each "
                    "half; take fewer --places or --tokens"
                )
            place = f"{name} {start / len(whole):.0%}"
            own[-1].append(RetrievalPrompt(place, name, ids[:length], ids[length:]))
    yield from in_turns(own)


def questions(tokenizer, half: str, prompts: int, length: int, data=None):
    """A question on one paragraph of many (XQuAD), about ``length`` tokens together."""
    maker = _Maker(tokenizer, half)
    both = enumerate(xquad_articles(data))
    articles = [article for i, article in both if i % 2 == HALVES.index(half)]
    for i in range(prompts):
        rng = random.Random(f"questions {half} {i}")
        asked = rng.choice(articles[i % len(articles)])
        question = rng.choice(asked[1])
        others = [p for article in articles for p in article if p is not asked]
        rng.shuffle(others)
        chosen, room = [asked], length - len(maker.encode(asked[0])) - 100
        for other in others:
            room -= len(maker.encode(other[0]))
            if room < 0:
                break
            chosen.append(other)
        rng.shuffle(chosen)
        document = "\n\n".join(context for context, _ in chosen)
        task = f"Answer with a few words from the text. {question['question']}"
        yield maker.prompt(
            f"question {i}", str(length), document, task, "Answer:", [question["answers"][0]]
        )
