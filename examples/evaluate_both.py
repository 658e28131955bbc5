"""Both caches at once: a prompt that is blended from stored chunks, then decoded over sparsely.

    python examples/evaluate_both.py                    # needs no more than the small model
    python examples/evaluate_both.py --ratios 0.15 0.3 --budgets 0.1 --half tune
    python examples/evaluate_both.py --quick

Every prompt's cache is filled by full prefill and by a blend, and over each of the two the gold
tokens are fed one by one, with dense and with sparse attention. What counts is the KL of the
next-token distributions to those of full prefill and dense attention: of the blend alone, of sparse
attention alone, and of both. If the errors simply add up, both cost the sum of the two. Tasks:
"continuation" (ordinary text) and "facts" (cut by chunk borders, among a lot of filler). Results go
to a JSONL record as they are made; a run that is repeated makes only what the record lacks (remove
the record after changing the library).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable

import torch
from blend_runs import Stores, filled
from blend_tasks import BlendPrompt, continuation, facts
from evaluation_metrics import kl, markdown, mean_with_interval
from evaluation_record import Record, described, grouped
from evaluation_script import about_of, common_arguments, keep_section, run_alone
from selection_runs import COMMON, share_read
from tqdm import tqdm

from anchor_cache import AnchorDynamicCache

TASKS: dict[str, Callable[..., list[BlendPrompt]]] = {
    "continuation": lambda tokenizer, args: continuation(
        tokenizer,
        args.half,
        args.prompts,
        args.data,
        args.texts,
        chunks=args.chunks,
        chunk_tokens=args.chunk_tokens,
        gold_tokens=args.steps,
    ),
    "facts": lambda tokenizer, args: facts(
        tokenizer, args.half, args.prompts, sentences=args.sentences
    ),
}


def named(ratio: float | None, budget: float | None) -> str:
    """A way to fill the cache (None: full prefill) and to decode over it (None: densely)."""
    filling = "full prefill" if ratio is None else f"blend {ratio:g}"
    return f"{filling}, {'dense' if budget is None else f'sparse {budget:g}'}"


def decoded(model, cache, prompt: BlendPrompt, budget: float | None):
    """The gold tokens one by one over a copy of the cache. However it was filled, no query of the
    prefill is known to the sparse steps.

    Returns:
        Log-probabilities before each of them ``[G, vocabulary]``, and the share of the cache that
        the steps read.
    """
    if budget is None:
        cache = copy.deepcopy(cache)
    else:
        cache = AnchorDynamicCache.from_cache(copy.deepcopy(cache), budget=budget, **COMMON)
    fed = torch.tensor([[prompt.ids[-1], *prompt.gold[:-1]]], device=model.device)
    logits = [model(token, past_key_values=cache).logits[0, -1] for token in fed.split(1, 1)]
    return torch.stack(logits).float().log_softmax(-1), 1.0 if budget is None else share_read(cache)


def result(prompt: BlendPrompt, way: str, truth: torch.Tensor, own: torch.Tensor, read: float):
    gold = torch.tensor(prompt.gold, device=own.device)
    return dict(
        prompt=prompt.name,
        kind=prompt.kind,
        way=way,
        tokens=len(prompt.ids),
        kl=kl(truth, own).tolist(),
        nll=-own.gather(1, gold[:, None]).mean().item(),
        right=bool((own.argmax(-1) == gold).all()),
        read=read,
    )


@torch.no_grad()
def run(model, tokenizer, task: str, args, folder: str) -> list[dict]:
    """Every way on every prompt; a cache is filled only if the record lacks something over it."""
    record = Record(args.output / f"{task}-{args.half}.jsonl")
    stores, results = Stores(folder, model), []
    for prompt in tqdm(TASKS[task](tokenizer, args), desc=f"both: {task}", unit="prompt"):
        ways = [(r, b) for r in (None, *args.ratios) for b in (None, *args.budgets)]
        keys = {
            (r, b): "|".join(
                (args.about, prompt.name, prompt.digest, named(r, b), described(COMMON))
            )
            for r, b in ways
        }
        missing = [way for way in ways if keys[way] not in record.known]
        if missing:
            cache = filled(model, prompt, None, stores)
            truth, _ = decoded(model, cache, prompt, None)
        filled_by = None
        for ratio, budget in missing:
            if ratio != filled_by:
                cache = filled(model, prompt, dict(recompute_ratio=ratio), stores)
                filled_by = ratio
            own, read = decoded(model, cache, prompt, budget)
            way = named(ratio, budget)
            record.add(keys[ratio, budget], result(prompt, way, truth, own, read))
        stores.clear()
        results += [record.known[key] for key in keys.values()]
    return results


def summary(task: str, results: list[dict], args) -> str:
    """Markdown tables: every way, and what both together cost against the sum of the two."""
    by_way = grouped(results, "way")
    kls = {way: [statistics.mean(one["kl"]) for one in own] for way, own in by_way.items()}
    rows = []
    for way, own in by_way.items():
        cells = [way, mean_with_interval(kls[way], 4), f"{statistics.median(kls[way]):.4f}"]
        cells.append(mean_with_interval([one["nll"] for one in own]))
        if task == "facts":
            cells.append(mean_with_interval([float(one["right"]) for one in own], 2))
        rows.append([*cells, f"{statistics.mean(one['read'] for one in own):.1%}", str(len(own))])
    right = ["right"] if task == "facts" else []
    ways = markdown(["cache and decoding", "KL", "median", "NLL", *right, "read", "n"], rows)
    rows = []
    for ratio in args.ratios:
        for budget in args.budgets:
            blend, sparse = kls[named(ratio, None)], kls[named(None, budget)]
            both = kls[named(ratio, budget)]
            total = [sum(pair) for pair in zip(blend, sparse, strict=True)]
            more = [b - t for b, t in zip(both, total, strict=True)]
            rows.append(
                [
                    f"{ratio:g}",
                    f"{budget:g}",
                    *(f"{statistics.mean(own):.4f}" for own in (blend, sparse, total, both)),
                    mean_with_interval(more, 4),
                ]
            )
    header = ["ratio", "budget", "KL of the blend", "of sparse attention", "sum", "both"]
    return f"{ways}\n\n{markdown([*header, 'both - sum'], rows)}"


def arguments() -> argparse.ArgumentParser:
    parser = common_arguments(__doc__, "both")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.15], help="of the blend")
    parser.add_argument(
        "--budgets", nargs="+", type=float, default=[0.1, 0.05], help="of the sparse steps"
    )
    parser.add_argument("--prompts", type=int, default=20, help="per task, as far as there are")
    text = parser.add_argument_group("continuation")
    text.add_argument("--chunks", type=int, default=8, help="the first is the prefix")
    text.add_argument("--chunk-tokens", type=int, default=256)
    text.add_argument("--steps", type=int, default=32, help="tokens decoded")
    parser.add_argument(
        "--sentences",
        type=int,
        default=28,
        help="of filler per chunk of the facts (28 make prompts of about 2,000 tokens)",
    )
    return parser


def evaluate(args, model, tokenizer) -> str:
    """Every task of the parsed arguments, and its tables: Markdown sections.

    Raises:
        ValueError: no text is long enough for a prompt.
    """
    if args.quick:
        args.prompts, args.steps = 2, 8
        args.chunks, args.chunk_tokens, args.sentences = 4, 128, 8
    args.about = about_of(args, model)
    sections = []
    for task in args.tasks:
        with tempfile.TemporaryDirectory() as folder:
            results = run(model, tokenizer, task, args, folder)
        if not results:
            raise ValueError(
                f"--chunks {args.chunks}, --chunk-tokens {args.chunk_tokens}: no text "
                "is long enough for a prompt of this size"
            )
        tokens = round(statistics.mean(one["tokens"] for one in results))
        title = f"both caches: {task}, {tokens:,} tokens ({args.about}, half: {args.half})"
        text = f"## {title}\n\n{summary(task, results, args)}\n"
        sections.append(keep_section(args.output, f"{task}-{args.half}", text))
    return "\n".join(sections)


def main() -> None:
    run_alone(arguments(), evaluate)


if __name__ == "__main__":
    main()
