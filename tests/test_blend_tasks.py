"""The prompts of evaluate_blend.py whose documents refer to each other or answer questions."""

import json

import blend_question_tasks
import blend_reference_task
import evaluation_metrics
import pytest


@pytest.fixture(scope="module")
def tokenizer(small_model):
    return small_model[1]


@pytest.fixture
def questions(tmp_path):
    """A data folder in the formats of MuSiQue and Natural Questions, a dozen questions each."""
    hops = [
        {
            "question": f"Who is number {i}?",
            "answers": [f"Person N{i}"],
            "ctxs": [{"text": f"passage {k} of {i}. " * 20} for k in range(3)]
            + [{"text": f"number {i} is person n{i}. " * 20}],
        }
        for i in range(12)
    ]
    (tmp_path / "musique_s_60.json").write_text(json.dumps(hops))
    rows = [
        {
            "question": f"who is number {i}",
            "answers": ["the same" if i < 4 else f"Person {i}x"],
            "title": f"Title {i}",
            "text": "It is the same." if i < 4 else f"It is Person {i}x.",
        }
        for i in range(20)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "nq_oracle_500.jsonl").write_text(lines)
    return tmp_path


def test_no_document_holds_the_answer_to_a_reference_alone(tokenizer):
    prompts = blend_reference_task.references(tokenizer, "report", 6)
    assert {prompt.kind for prompt in prompts} == {"by name", "by house"}
    for prompt in prompts:
        _, *chunks, question = map(tokenizer.decode, prompt.segments)
        city = tokenizer.decode(prompt.gold).strip()
        (born,) = [i for i, chunk in enumerate(chunks) if f"was born in {city}." in chunk]
        subject = chunks[born].split(f" was born in {city}.")[0].split(". ")[-1].strip()
        asked = question.split("Where was ")[1].split(" born?")[0]
        assert city not in question and asked.lower() != subject.lower()
        house, person = (asked, subject) if prompt.kind == "by name" else (subject, asked)
        owner = f"{house[0].upper()}{house[1:]} is {person}."
        assert [i for i, chunk in enumerate(chunks) if owner in chunk][0] < born
        assert not any(asked in chunk for chunk in chunks[born:])
        assert 400 <= len(prompt.ids) <= 520


def test_halves_of_references_share_no_name(tokenizer):
    halves = [blend_reference_task.references(tokenizer, half, 12) for half in ("tune", "report")]
    assert blend_reference_task.references(tokenizer, "tune", 12) == halves[0]
    filler = set("Notes In Before After On Late Monday Read Question Answer Where The".split())

    def names(prompts):
        words = {w.strip(".,:?") for p in prompts for w in tokenizer.decode(p.ids).split()}
        return {word for word in words if word[:1].isupper()} - filler

    tune, report = map(names, halves)
    assert len(tune) > 16 and len(report) > 16
    assert not tune & report


def test_a_multi_hop_prompt_keeps_the_passages_with_the_answer(tokenizer, questions):
    def prompts(max_tokens):
        return blend_question_tasks.musique(tokenizer, "tune", 3, questions, max_tokens)

    whole = prompts(4096)
    assert [len(prompt.segments) for prompt in whole] == [6, 6, 6]
    room = max(len(prompt.ids) for prompt in whole) - 1
    for number, prompt in zip((0, 2, 4), prompts(room), strict=True):
        _, *chunks, question = map(tokenizer.decode, prompt.segments)
        assert len(prompt.ids) <= room and len(chunks) == 3
        assert f"number {number} is person n{number}." in chunks[-1]
        assert f"passage 0 of {number}." in chunks[0]
        assert question == f"Question: Who is number {number}?\nAnswer:"
        assert prompt.answers == (f"person n{number}",)
    with pytest.raises(ValueError, match="max_tokens=100"):
        prompts(100)


def test_an_answering_passage_is_among_passages_that_do_not_answer(tokenizer, questions):
    prompts = blend_question_tasks.nq(tokenizer, "report", 10, questions)
    places = set()
    for prompt in prompts:
        chunks = list(map(tokenizer.decode, prompt.segments[1:-1]))
        (place,) = [i for i, c in enumerate(chunks) if prompt.answers[0].lower() in c.lower()]
        places.add(place)
        assert len(set(chunks)) == 5
    assert len(prompts) == 10 and len(places) > 1


@pytest.mark.parametrize("task", ["musique", "nq"])
def test_halves_of_questions_share_no_passage(tokenizer, questions, task):
    make = getattr(blend_question_tasks, task)
    tune, report = (make(tokenizer, half, 9, questions) for half in ("tune", "report"))
    assert make(tokenizer, "tune", 9, questions) == tune

    def passages(prompts):
        texts = [tokenizer.decode(own) for p in prompts for own in p.segments[1:-1]]
        return {text.removeprefix("Text: ") for text in texts if "the same" not in text}

    assert passages(tune) and passages(report)
    assert not passages(tune) & passages(report)


def test_questions_without_their_file_say_where_it_is_from(tokenizer, monkeypatch):
    monkeypatch.delenv("ANCHOR_CACHE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="nq_oracle_500.jsonl.*lost-in-the-middle"):
        blend_question_tasks.nq(tokenizer, "tune", 1)


@pytest.mark.parametrize(
    "answer, accepted, contained",
    [
        ("It was the Tom Hale, I think", ["tom hale"], 1.0),
        ("in 19321", ["1932"], 0.0),
        ("1932", ["in 1958", "1932"], 1.0),
        ("Hale Tom", ["Tom Hale"], 0.0),
        ("", ["x"], 0.0),
    ],
)
def test_an_answer_contains_an_accepted_one_word_by_word(answer, accepted, contained):
    assert evaluation_metrics.contains(answer, accepted) == contained
