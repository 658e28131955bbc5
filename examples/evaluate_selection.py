"""How well do anchors choose? KL to dense attention, needles, mass and recall, per byte of index.

    make eval-selection                      # every builder and refinement, both budgets
    python examples/evaluate_selection.py --sets selection --budgets 0.1 --half report

Ordinary text is decoded teacher-forced after a long context, once densely and once with every
contestant; what counts is the KL of the next-token distributions. Needles are facts in a long
document, whose digits must be given the highest probability. Constants are to be chosen with
``--half tune`` and reported with ``--half report``: the two read different places of every text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import warnings
from pathlib import Path

import torch
from contestants import CONTESTANTS
from demo import fact, long_document, say, table
from small_model import load
from texts import long_texts
from tqdm import tqdm

from anchor_cache import AnchorDynamicCache

COMMON = dict(sink_size=16, window_size=64, dense_below=0, dense_above=1.0)
TASKS = ("text", "needles")
HALVES = {"tune": (0.1, 0.5), "report": (0.3, 0.7)}


@dataclasses.dataclass
class Place:
    """A prefilled context and the tokens that come after it."""

    name: str
    cache: AnchorDynamicCache
    first: torch.Tensor  # the last token of the context, not in the cache yet
    tokens: torch.Tensor  # [1, T]
    truth: torch.Tensor  # dense log-probabilities [T, vocabulary], each before its token


@torch.no_grad()
def prefill(model, name: str, ids: torch.Tensor, n_target: int) -> Place:
    """Prefill all but the last ``n_target`` tokens, and run these densely."""
    # A builder that looks at queries, so that they are kept for the contestants.
    cache = AnchorDynamicCache(model.config, builder="tangent", **COMMON)
    model(ids[:, : -n_target - 1], past_key_values=cache, logits_to_keep=1)
    length = cache.get_seq_length()
    logits = model(ids[:, -n_target - 1 :], past_key_values=cache).logits[0, :-1]
    cache.crop(length - cache.get_seq_length())
    target = ids[:, -n_target:]
    return Place(name, cache, ids[:, -n_target - 1, None], target, logits.float().log_softmax(-1))


@torch.no_grad()
def decode(model, place: Place, settings: dict):
    """Log-probabilities of the sparse steps ``[T, vocabulary]``, and the cache."""
    cache = AnchorDynamicCache.from_cache(place.cache, **COMMON, **settings)
    fed = torch.cat((place.first, place.tokens[:, :-1]), 1)
    logits = [model(token, past_key_values=cache).logits[0, -1] for token in fed.split(1, 1)]
    return torch.stack(logits).float().log_softmax(-1), cache


def text_places(model, tokenizer, args) -> list[Place]:
    places = []
    for name, text in long_texts(args.data).items():
        for share in HALVES[args.half]:
            part = text[int(share * len(text)) :][: 8 * args.tokens]
            ids = tokenizer(part, return_tensors="pt", add_special_tokens=False)["input_ids"]
            ids = ids[:, : args.tokens + args.steps].to(model.device)
            places.append(prefill(model, f"{name} {share:.0%}", ids, args.steps))
    return places


def needle_places(model, tokenizer, args) -> list[Place]:
    depths = [
        (i + (0.25 if args.half == "tune" else 0.75)) / args.needles for i in range(args.needles)
    ]
    places = []
    for length in args.needle_tokens:
        for depth in depths:
            ids, _ = long_document(model, tokenizer, length, depth)
            number = fact("Paris").split()[-1].rstrip(".")
            answer = f"The special magic number for Paris is {number}"
            answer = tokenizer(answer, return_tensors="pt", add_special_tokens=False)["input_ids"]
            digits = len(number)
            ids = torch.cat((ids, answer.to(ids.device)), 1)
            places.append(prefill(model, f"{length} at {depth:.2f}", ids, digits))
    return places


def compare(model, place: Place, settings: dict) -> dict:
    """All figures of one contestant at one place."""
    logits, cache = decode(model, place, settings)
    truth = place.truth
    kl = (truth.exp() * (truth - logits)).sum(-1)
    answered = logits.argmax(-1) == place.tokens[0].to(logits.device)
    likelihood = logits.gather(1, place.tokens.t().to(logits.device))
    audits = [a for layer in cache.anchor_layers.values() for a in layer.record.audits]
    keys = sum(layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)
    index = [layer.index for layer in cache.anchor_layers.values() if layer.index is not None]

    def mean(name):
        values = [getattr(audit, name).nanmean().item() for audit in audits]
        return statistics.mean(values) if values else float("nan")

    return dict(
        kl=kl.tolist(),
        right=bool(answered.all()),
        nll=-likelihood.mean().item(),
        index=sum(part.nbytes for part in index) / keys,
        attended=cache.report().tokens_attended / cache.get_seq_length(),
        mass=mean("mass"),
        recall=mean("recall"),
        error=mean("output_error"),
        estimated=mean("estimated"),
    )


def by_name(results: list[dict], name) -> dict[str, list[dict]]:
    """Results in groups, by what ``name`` says of each."""
    groups: dict[str, list[dict]] = {}
    for result in results:
        groups.setdefault(name(result), []).append(result)
    return groups


def contestant_of(result: dict) -> str:
    return result["contestant"]


def kind_of(result: dict) -> str:
    """The text, or the needle's length."""
    return result["place"].split()[0]


def text_rows(results: list[dict]) -> list[list[str]]:
    rows = []
    for contestant, own in by_name(results, contestant_of).items():
        steps = [kl for result in own for kl in result["kl"]]
        texts = by_name(own, kind_of)
        per_text = [statistics.mean(k for r in rs for k in r["kl"]) for rs in texts.values()]

        def mean(name, own=own):
            return statistics.mean(result[name] for result in own)

        rows.append(
            [
                contestant,
                f"{mean('index'):.1%}",
                f"{mean('attended'):.1%}",
                f"{statistics.mean(steps):.4f}",
                f"{statistics.median(steps):.4f}",
                " ".join(f"{kl:.3f}" for kl in per_text),
                f"{mean('mass'):.3f}",
                f"{mean('estimated'):.3f}",
                f"{mean('recall'):.3f}",
                f"{mean('error'):.3f}",
            ]
        )
    return rows


def needle_rows(results: list[dict]) -> list[list[str]]:
    rows = []
    for contestant, own in by_name(results, contestant_of).items():
        lengths = by_name(own, kind_of)
        right = [f"{sum(r['right'] for r in rs)}/{len(rs)}" for rs in lengths.values()]
        nll = [f"{statistics.mean(r['nll'] for r in rs):.2f}" for rs in lengths.values()]
        rows.append([contestant, " ".join(right), " ".join(nll)])
    return rows


def run(model, kind: str, make_places, args) -> dict[float, list[dict]]:
    """Every contestant at every place; what the record of an earlier run holds is not run again."""
    chosen = {n: s for group in args.sets for n, s in CONTESTANTS[group].items()}
    chosen = {n: s for n, s in chosen.items() if not args.only or n in args.only}
    path = args.output / f"{kind}-{args.half}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if path.is_file():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        known = {(line["budget"], line["contestant"], line["place"]): line for line in lines}
    places = make_places()
    results: dict[float, list[dict]] = {}
    work = [(b, n, p) for b in args.budgets for n in chosen for p in places]
    with path.open("a") as record:
        for budget, name, place in tqdm(work, desc=kind, unit="run"):
            key = (budget, name, place.name)
            if key not in known:
                audit_every = args.audit_every if kind == "text" else 0
                settings = {"budget": budget, "audit_every": audit_every, **chosen[name]}
                known[key] = dict(zip(("budget", "contestant", "place"), key, strict=True))
                known[key] |= compare(model, place, settings)
                record.write(json.dumps(known[key]) + "\n")
                record.flush()
            results.setdefault(budget, []).append(known[key])
    return results


TEXT_HEADER = ["contestant", "index/K", "read", "KL mean", "KL median", "KL by text", "mass"]
TEXT_HEADER += ["believed", "recall", "error"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--data", help="folder with xquad.en.json, a further text")
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--sets", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--only", nargs="+", help="only these contestants")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.1, 0.05])
    parser.add_argument("--tokens", type=int, default=4096, help="length of the texts' contexts")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded at each place")
    parser.add_argument("--needle-tokens", nargs="*", type=int, default=[1000, 2000, 4000])
    parser.add_argument("--needles", type=int, default=5, help="depths per length")
    parser.add_argument("--audit-every", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("eval_output/selection"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    model, tokenizer = load(args.model)
    say(f"{type(model).__name__}, {model.dtype}, {model.device}, half: {args.half}")
    texts, needles = {}, {}
    if "text" in args.tasks:
        texts = run(model, "text", lambda: text_places(model, tokenizer, args), args)
    for budget, results in texts.items():
        names = ", ".join(by_name(results, kind_of))
        title = f"Text, {args.tokens} tokens, budget {budget:.0%} ({names})"
        table(title, TEXT_HEADER, text_rows(results))
    if "needles" in args.tasks:
        needles = run(model, "needles", lambda: needle_places(model, tokenizer, args), args)
    for budget, results in needles.items():
        title = f"Needles, budget {budget:.0%}: all digits right, and NLL per digit"
        lengths = " ".join(by_name(results, kind_of))
        table(title, ["contestant", f"right at {lengths} tokens", "NLL"], needle_rows(results))
    say(f"\nevery figure: {args.output}")


if __name__ == "__main__":
    main()
