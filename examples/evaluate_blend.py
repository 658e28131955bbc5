"""How near is a blended prompt to full prefill? Facts cut by chunk borders, text, questions, time.

    make eval-blend                          # every task, the baselines and every selector
    python examples/evaluate_blend.py --tasks facts --sets encodings --half tune --prompts 24
    python examples/evaluate_blend.py --tasks continuation --chunks 2 4 8 --chunk-tokens 128 256
    python examples/evaluate_blend.py --quick

Tasks: "facts" (four facts, each cut by a chunk border; "whole": the same, uncut), "references"
(later documents refer to earlier ones), "continuation" (ordinary text in contiguous chunks),
"xquad" (a question on five paragraphs of an article), "musique" (one that takes several passages),
"nq" (one passage of five answers) and "prefill" (time to first token, and the bound that counting
operations gives). Contestants: blend_contestants.py, with --peers KVBoost in its own environment.
What counts is the KL of the next-token distributions over full prefill's and over the blended
cache, the likelihood of the gold answer, and the answer. Constants are to be chosen with ``--half
tune`` and reported with ``--half report``: no prompt is in both. Every figure goes to a JSONL
record as it is made; a run that is repeated makes only what the record lacks (remove the record
after changing the library).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable

import blend_prefill
import torch
from blend_answers import compare
from blend_contestants import CONTESTANTS, FULL, QUICK, SELECTORS, chosen
from blend_question_tasks import musique, nq
from blend_reference_task import references
from blend_runs import Stores, filled_and_timed
from blend_tasks import BlendPrompt, continuation, facts, xquad
from evaluation_metrics import contains, exact_match, f1, markdown, mean_with_interval
from evaluation_peers import KVBOOST, kvboost_quality
from evaluation_record import Record, described, grouped
from evaluation_script import about_of, common_arguments, keep_section, run_alone, why_not_run
from small_model import source
from tqdm import tqdm

# Changes with what a result holds: those of an earlier record, which lack some of it, do not count.
FIGURES = "with cost"

TASKS: dict[str, Callable[..., list[BlendPrompt]]] = {
    "facts": lambda tokenizer, args: facts(tokenizer, args.half, args.prompts),
    "whole": lambda tokenizer, args: facts(tokenizer, args.half, args.prompts, split=False),
    "continuation": lambda tokenizer, args, **sizes: continuation(
        tokenizer, args.half, args.prompts, args.data, args.texts, **sizes
    ),
    "references": lambda tokenizer, args: references(tokenizer, args.half, args.prompts),
    "xquad": lambda tokenizer, args: xquad(tokenizer, args.half, args.prompts, args.data),
    "musique": lambda tokenizer, args: musique(
        tokenizer, args.half, args.prompts, args.data, args.max_tokens
    ),
    "nq": lambda tokenizer, args: nq(tokenizer, args.half, args.prompts, args.data),
}
_ANSWERS = ["f1", "em", "contains"]
SCORES = {
    **dict.fromkeys(("facts", "whole", "references"), ["right"]),
    **dict.fromkeys(("xquad", "musique", "nq"), _ANSWERS),
}


def grid(args) -> list[tuple[str, dict[str, int]]]:
    """The tasks one by one, with the sizes of those that have several."""
    sizes = [dict(chunks=n, chunk_tokens=t) for n in args.chunks for t in args.chunk_tokens]
    return [(t, own) for t in args.tasks for own in (sizes if t == "continuation" else [{}])]


def key_of(prompt: BlendPrompt, contestant: str, settings: str, args) -> str:
    """What a result is found by."""
    told = (prompt.name, prompt.digest, str(args.answer_tokens), contestant, settings)
    return "|".join((FIGURES, args.about, *told))


@torch.no_grad()
def run(model, tokenizer, prompts: list[BlendPrompt], record: Record, args, folder: str):
    """Every contestant on every prompt; full prefill once per prompt, if anything is missing."""
    ways = {FULL: None, **chosen(args.sets, args.only)}
    stores, kind, results = Stores(folder, model), None, []
    bar = tqdm(total=len(prompts) * len(ways), desc=record.path.stem, unit="run")
    for prompt in prompts:
        if prompt.kind != kind:
            stores.clear()
            kind = prompt.kind
        keys = {name: key_of(prompt, name, described(own), args) for name, own in ways.items()}
        truth = None
        if any(key not in record.known for key in keys.values()):
            cache, cost = filled_and_timed(model, prompt, None, stores)
            figures, truth = compare(model, tokenizer, cache, prompt, None, args.answer_tokens)
            if keys[FULL] not in record.known:
                record.add(keys[FULL], result(args.about, prompt, FULL, figures | cost))
        for name, settings in ways.items():
            if keys[name] not in record.known:
                cache, cost = filled_and_timed(model, prompt, settings, stores)
                figures, _ = compare(model, tokenizer, cache, prompt, truth, args.answer_tokens)
                record.add(keys[name], result(args.about, prompt, name, figures | cost))
            results.append(record.known[keys[name]])
            bar.update()
    bar.close()
    stores.clear()
    return results


def run_kvboost(prompts: list[BlendPrompt], record: Record, args) -> tuple[list[dict], list[str]]:
    """KVBoost on the same prompts: results, and what could not be run."""
    named = {key_of(prompt, KVBOOST, "", args): prompt for prompt in prompts}
    missing = {key: prompt for key, prompt in named.items() if key not in record.known}
    made = kvboost_quality(
        missing,
        source(args.model),
        answer_tokens=args.answer_tokens,
        dtype=args.dtype,
        device=args.device or "cpu",
    )
    errors = {}
    for key, figures in made:
        if "error" in figures:
            errors[f"{KVBOOST}: {figures['error']}"] = None
        else:
            record.add(key, result(args.about, named[key], KVBOOST, figures))
    return [record.known[key] for key in named if key in record.known], list(errors)


def compared(model, tokenizer, task: str, sizes: dict, name: str, args, folder: str) -> str:
    """The table of a task, or why there is none."""
    try:
        prompts = TASKS[task](tokenizer, args, **sizes)
    except (OSError, ValueError) as error:
        return f"Not run: {error}"
    reason = why_not_run(model, [len(p.ids) + len(p.gold) for p in prompts])
    if reason:
        return f"Not run: {reason}"
    record, errors = Record(args.output / f"{name}.jsonl"), []
    results = run(model, tokenizer, prompts, record, args, folder)
    if args.peers:
        more, errors = run_kvboost(prompts, record, args)
        results = results + more
    return "\n\n".join([summary(task, results), *(f"Not run: {error}" for error in errors)])


def result(about: str, prompt: BlendPrompt, contestant: str, figures: dict) -> dict:
    if prompt.answers:
        figures = dict(
            figures,
            f1=f1(figures["answer"], prompt.answers),
            em=exact_match(figures["answer"], prompt.answers),
            contains=contains(figures["answer"], prompt.answers),
        )
    told = dict(about=about, prompt=prompt.name, digest=prompt.digest, kind=prompt.kind)
    return dict(told, contestant=contestant, **figures)


_COSTS = (
    "recomputed: share of the reused tokens (exact ones aside) that a layer computed again. "
    "seconds: to fill the cache, by prefill or from what is stored, median over the prompts, each "
    "timed once on the machine at hand."
)


def summary(task: str, results: list[dict]) -> str:
    """A Markdown table, a row per contestant, and what its costs are."""
    by_name = grouped(results, "contestant")
    scores = SCORES.get(task, [])
    header = [
        "contestant",
        *(c for s in scores for c in (s, "of full")),
        "NLL",
        "KL",
        "median",
        "recomputed",
        "seconds",
        "n",
    ]
    rows = []
    for name, own in by_name.items():
        cells = [name]
        for score in scores:
            full = statistics.mean(one[score] for one in by_name[FULL])
            share = statistics.mean(one[score] for one in own)
            cells.append(mean_with_interval([float(one[score]) for one in own], 2))
            cells.append(f"{share / full:.2f}" if full else "-")
        kls = [statistics.mean(one["kl"]) for one in own]
        cells.append(mean_with_interval([one["nll"] for one in own]))
        cells += [mean_with_interval(kls, 4), f"{statistics.median(kls):.4f}"]
        shares = [one["recomputed"] for one in own if one["recomputed"] is not None]
        cells.append(f"{statistics.mean(shares):.1%}" if shares else "-")
        cells.append(f"{statistics.median(one['seconds'] for one in own):.3f}")
        rows.append([*cells, str(len(own))])
    return f"{markdown(header, rows)}\n\n{_COSTS}"


def run_prefill(model, tokenizer, args, folder: str) -> list[dict]:
    """All lengths; times are never taken from an earlier run, but noted beside its."""
    results = []
    for tokens in args.lengths:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            results += blend_prefill.time_blends(model, tokenizer, tokens, args, own)
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / f"prefill-{args.half}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"about": args.about, **one}) + "\n" for one in results)
    return results


def arguments() -> argparse.ArgumentParser:
    parser = common_arguments(__doc__, "blend")
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=[*TASKS, "prefill"],
        default=["facts", "continuation", "prefill"],
    )
    parser.add_argument(
        "--sets", nargs="+", choices=CONTESTANTS, default=["baselines", "selectors"]
    )
    parser.add_argument("--only", nargs="+", help="only these contestants of the sets")
    parser.add_argument("--prompts", type=int, default=50, help="per task, as far as there are")
    parser.add_argument(
        "--chunks",
        nargs="+",
        type=int,
        default=[6],
        metavar="N",
        help="of the continuation task, 2 to 16; the first is the prefix, so that the second, "
        "encoded after it, is exact; a table for every combination with --chunk-tokens",
    )
    parser.add_argument(
        "--chunk-tokens",
        nargs="+",
        type=int,
        default=[256],
        metavar="N",
        help="per chunk of the continuation task, 64 to 1024",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=3072, help="of a musique prompt: passages that fit"
    )
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="KVBoost too, if `make eval` has installed it",
    )
    timing = parser.add_argument_group("prefill")
    timing.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 8192])
    timing.add_argument("--prefill-ratios", nargs="+", type=float, default=[0.05, 0.15, 0.3])
    timing.add_argument(
        "--prefill-selectors", nargs="+", choices=SELECTORS, default=["query", "HKVD on values"]
    )
    timing.add_argument("--repeats", type=int, default=5, help="timed repetitions")
    timing.add_argument("--source", choices=["disk", "memory"], default="disk")
    timing.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before every blend"
    )
    return parser


def evaluate(args, model, tokenizer) -> str:
    """Every task of the parsed arguments, and its table: Markdown sections."""
    if args.quick:
        named = chosen(args.sets)
        args.prompts = 2
        args.only = args.only or [n for n in QUICK if n in named] or list(named)[:3]
        args.chunks, args.chunk_tokens, args.lengths, args.repeats = [6], [64], [1024], 2
    args.about = about_of(args, model)
    sections = []
    for task, sizes in grid(args):
        size = " x ".join(map(str, sizes.values()))
        title = f"{task}, {size}" if size else task
        name = f"{title}-{args.half}".replace(", ", "-").replace(" ", "")
        with tempfile.TemporaryDirectory() as folder:
            if task == "prefill":
                rows = blend_prefill.summary(run_prefill(model, tokenizer, args, folder))
            else:
                rows = compared(model, tokenizer, task, sizes, name, args, folder)
        text = f"## {title} ({args.about}, half: {args.half})\n\n{rows}\n"
        sections.append(keep_section(args.output, name, text))
    return "\n".join(sections)


def main() -> None:
    run_alone(arguments(), evaluate)


if __name__ == "__main__":
    main()
