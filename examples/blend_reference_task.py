"""Prompts of evaluate_blend.py in which later documents refer to earlier ones.

No document holds the answer alone: an earlier one says who owns a house, a later one where that
owner was born. The halves "tune" and "report" share neither a person nor a city.
"""

from __future__ import annotations

import random

from blend_tasks import CITIES, BlendPrompt, beginning, encoder, filler

PEOPLE = {
    "tune": "Anna Peter Laura Simon Helen Victor Clara Martin Julia Oscar Emma Robert".split(),
    "report": "Maria Thomas Alice Daniel Sarah George Nina Edward Rosa Philip Jane Walter".split(),
}


def references(tokenizer, half: str, prompts: int, sentences: int = 6) -> list[BlendPrompt]:
    """Four owners of houses among filler, then where each of them was born; one is asked for.

    In every other prompt the later document calls the owner by name and the question by house; in
    the others it is the other way round, so that only the states of a document that has seen the
    earlier one know whom it is about. The answer is a city.

    Args:
        tokenizer: the model's.
        half: "tune" or "report".
        prompts: how many.
        sentences: of filler per chunk (six make prompts of about 460 tokens).
    """
    encode, made = encoder(tokenizer), []
    for i in range(prompts):
        rng = random.Random(f"references {half} {i}")
        people, cities = rng.sample(PEOPLE[half], 4), rng.sample(CITIES[half], 4)
        houses = rng.sample(range(1, 10), 4)
        owners = [f"the owner of house {house}" for house in houses]
        kind = ("by name", "by house")[i % 2]
        told, asked = (people, owners) if kind == "by name" else (owners, people)
        earlier = [
            f" {owner[0].upper()}{owner[1:]} is {person}."
            for owner, person in zip(owners, people, strict=True)
        ]
        later = [
            f" {who[0].upper()}{who[1:]} was born in {city}."
            for who, city in zip(told, cities, strict=True)
        ]
        rng.shuffle(later)
        chunks = []
        for pair in (earlier[:2], earlier[2:], later[:2], later[2:]):
            lines = [filler(rng) for _ in range(sentences)]
            for line in pair:
                lines.insert(rng.randrange(len(lines) + 1), line)
            chunks.append("".join(lines))
        who, city = rng.choice(list(zip(asked, cities, strict=True)))
        prefix = "Read the notes and remember who lives where.\n\nNotes:"
        question = (
            f"\n\nQuestion: Where was {who} born?\nAnswer: {who[0].upper()}{who[1:]} was born in"
        )
        segments = (
            beginning(tokenizer) + encode(prefix),
            *map(encode, chunks),
            encode(question),
        )
        made.append(BlendPrompt(f"{kind} {i}", kind, segments, encode(f" {city}")))
    return made
