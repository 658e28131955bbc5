"""Does a sparse step say what a dense one says? KL, perplexity, needles and other retrieval tasks.

    make eval-selection                      # every task and the main contestants
    python examples/evaluate_selection.py --tasks text --sets builders refinement --budgets 0.1

A prompt is prefilled once, exactly; its answer is then decoded teacher-forced, once densely and
once with every contestant (contestants.py; with --peers also kvpress's, which keeps a share of the
prompt and forgets the rest). What counts is the KL of the next-token distributions,
the likelihood of the answer, and the share of its items (numbers, names) that greedy decoding would
give. Tasks: retrieval_tasks.py. Constants are to be chosen with ``--half tune`` and reported with
``--half report``: they share no prompt. Every figure goes to a JSONL record as it is made; a run
that is repeated makes only what the record lacks (remove the record after changing the library).
"""

from __future__ import annotations

import argparse

import retrieval_tasks
from contestants import CONTESTANTS
from evaluation_peers import kvpress_quality
from evaluation_record import Record, described, grouped
from evaluation_script import about_of, common_arguments, keep_section, run_alone, why_not_run
from retrieval_tasks import MADE, RetrievalPrompt
from selection_runs import COMMON, LEAST, compare, prefill, score
from selection_tables import CONTROL, answer_table, text_table
from small_model import source
from tqdm import tqdm

TASKS = ("text", *MADE, "questions")


def prompts_of(task: str, tokenizer, args) -> list[RetrievalPrompt]:
    """The prompts of a task, in the order in which they are run."""
    if task == "text":
        made = retrieval_tasks.text(
            tokenizer,
            args.half,
            args.places,
            args.tokens,
            args.steps,
            args.data,
            args.texts,
        )
    elif task == "questions":
        made = retrieval_tasks.questions(
            tokenizer, args.half, args.questions, args.tokens, args.data
        )
    else:
        made = retrieval_tasks.made(tokenizer, task, args.half, args.lengths, args.depths)
    return list(made)


def chosen(args) -> dict[str, dict]:
    """Contestants by name, the control first.

    Raises:
        ValueError: ``--only`` names one that the sets do not have.
    """
    named = {name: settings for group in args.sets for name, settings in CONTESTANTS[group].items()}
    unknown = sorted(set(args.only or ()) - set(named))
    if unknown:
        raise ValueError(f"--only {unknown}: not in the sets {args.sets}; choose of {list(named)}")
    control = {CONTROL: CONTESTANTS["main"][CONTROL]}
    return control | {n: s for n, s in named.items() if not args.only or n in args.only}


def run(model, prompts: list[RetrievalPrompt], task: str, args) -> list[dict]:
    """Every contestant on every prompt; prompts are prefilled if the record lacks one of theirs."""
    record = Record(args.output / f"{task}-{args.half}.jsonl")
    ways = chosen(args)
    audit_every = args.audit_every if task == "text" else 0
    results = []
    # Reading everything does not depend on the budget.
    work = [(b, n) for b in args.budgets for n in ways if n != CONTROL or b == args.budgets[0]]
    bar = tqdm(total=len(prompts) * len(work), desc=task, unit="run")
    for prompt in prompts:
        place = None
        for budget, name in work:
            settings = {"budget": budget, **ways[name]}
            if "evict" not in settings:
                settings["audit_every"] = audit_every
            told = described({**COMMON, **settings})
            key = "|".join((args.about, prompt.name, prompt.digest, name, told))
            if key not in record.known:
                place = place or prefill(model, prompt)
                told = dict(about=args.about, task=task, prompt=prompt.name, digest=prompt.digest)
                told |= dict(kind=prompt.kind, contestant=name, budget=budget)
                try:
                    figures = compare(model, place, settings)
                except ValueError as error:
                    figures = dict(error=f"{name}: {error}")
                record.add(key, {**told, **figures})
            results.append(record.known[key])
            bar.update()
    bar.close()
    return results


def run_kvpress(task: str, prompts: list[RetrievalPrompt], args) -> tuple[list[dict], list[str]]:
    """kvpress's presses on the same prompts: results, and what could not be run."""
    places = [dict(name=p.name, ids=[*p.ids, *p.target], n_target=len(p.target)) for p in prompts]
    path, named = source(args.model), {p.name: p for p in prompts}
    record = Record(args.output / f"{task}-{args.half}-kvpress.jsonl")
    rows = kvpress_quality(
        places,
        args.peer_budgets or args.budgets,
        path,
        record,
        dtype=args.dtype,
        device=args.device or "cpu",
        least=LEAST,
    )
    results, errors = [], {}
    for row in rows:
        if "error" in row:
            errors[f"{row['contestant']}, {row['budget']:.0%}: {row['error']}"] = None
            continue
        prompt = named[row["place"]]
        results.append(
            dict(
                about=args.about,
                digest=prompt.digest,
                prompt=prompt.name,
                kind=prompt.kind,
                contestant=f"{row['contestant']} (kvpress)",
                score=score(prompt, row["best"]),
                read=row["attended"],
                index=0.0,
                **{name: row[name] for name in ("budget", "kl", "nll")},
            )
        )
    return results, list(errors)


def by_budget(results: list[dict], budgets: list[float]) -> dict[float, list[dict]]:
    """Results per budget, with the control's in each."""
    groups = grouped(results, "budget")
    control = [result for result in results if result["contestant"] == CONTROL]
    return {
        budget: control + [r for r in groups.get(budget, []) if r["contestant"] != CONTROL]
        for budget in budgets
    }


def compared(model, tokenizer, task: str, args) -> str:
    """The tables of a task, one per budget, and what could not be run."""
    about = f"({args.about}, half: {args.half})"
    try:
        prompts = prompts_of(task, tokenizer, args)
        reason = why_not_run(model, [len(p.ids) + len(p.target) for p in prompts])
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason:
        return f"## {task} {about}\n\nNot run: {reason}\n\n"
    results, text = run(model, prompts, task, args), ""
    errors = sorted({one["error"] for one in results if "error" in one})
    results = [one for one in results if "error" not in one]
    if args.peers:
        lengths = set(args.lengths) - set(args.peer_lengths or args.lengths)
        own = [prompt for prompt in prompts if prompt.kind not in map(str, lengths)]
        more, their_errors = run_kvpress(task, own, args)
        results, errors = results + more, errors + their_errors
    for budget, own in by_budget(results, args.budgets).items():
        table = (text_table if task == "text" else answer_table)(own)
        text += f"## {task}, {budget:.0%} read {about}\n\n{table}\n\n"
    return text + "".join(f"Not run: {error}\n\n" for error in errors)


def evaluate(args, model, tokenizer) -> str:
    """Every task of the parsed arguments: Markdown sections, written and printed too."""
    if args.quick:
        args.budgets, args.tokens, args.steps, args.places = [0.1], 1024, 8, 1
        args.lengths, args.depths, args.questions = [1000], 2, 2
    args.about = about_of(args, model)
    sections = []
    for task in args.tasks:
        text = compared(model, tokenizer, task, args)
        sections.append(keep_section(args.output, f"{task}-{args.half}", text))
    return "".join(sections)


def arguments():
    parser = common_arguments(__doc__, "selection")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--sets", nargs="+", choices=CONTESTANTS, default=["main"])
    parser.add_argument("--only", nargs="+", help="only these contestants of the sets")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--peer-budgets", nargs="+", type=float, help="default: --budgets")
    parser.add_argument(
        "--peer-lengths", nargs="+", type=int, help="of the made tasks; default: --lengths"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="context of text and questions")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded after a text")
    parser.add_argument("--places", type=int, default=2, help="places of every text")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--depths", type=int, default=10, help="per length of the made tasks")
    parser.add_argument("--audit-every", type=int, default=8, help="on text; 0: never")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="kvpress too, if `make eval` has installed it",
    )
    return parser


def main() -> None:
    run_alone(arguments(), evaluate)


if __name__ == "__main__":
    main()
