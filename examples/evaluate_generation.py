"""Does selection drift over a long free generation? Beside dense bf16, and its own rounding.

    python examples/evaluate_generation.py
    python examples/evaluate_generation.py --budgets 0.1 --half tune --new-tokens 512
    python examples/evaluate_generation.py --quick

After long contexts of ordinary text every contestant generates greedily, freely, on its own tokens.
The reference is the dense model; two dense runs differ as well, one in float32, with the same
weights, from one in the model's precision: that is the measure of what difference is harmless.
Counted are the tokens before the first difference from the reference, equal tokens at equal places,
the words in common (F1), and the negative log-likelihood (NLL) of the text under the dense float32
model, by quarter of the text: a selection that drifts writes ever less likely text. The anchors
keep their defaults but for 16 sinks and a window of 64, so that small budgets hold more than those,
and they select at any length. Constants are to be chosen with ``--half tune``, reported with
``--half report``. Times are those of this run, contestants one after the other; benchmark.py
measures them with care. Every figure goes to a JSONL record as it is made; a run that is repeated
makes only what the record lacks (remove the record after changing the library).
"""

from __future__ import annotations

import argparse
import copy
import hashlib

import torch
from evaluation_metrics import f1
from evaluation_record import Record, described
from evaluation_script import about_of, common_arguments, keep_section, run_alone, why_not_run
from generation_contestants import CONTESTANTS, cache_of, generate
from generation_tables import PRECISE, QUARTERS, REFERENCE, tables
from selection_runs import COMMON
from texts import long_texts, room, starts
from tqdm import tqdm
from transformers import DynamicCache


def prompts_of(tokenizer, args) -> dict[str, list[int]]:
    """Contexts by name.

    Raises:
        ValueError: the texts are too short for them.
    """
    found = {}
    for name, text in long_texts(args.data, args.texts).items():
        for start in starts(text, args.half, args.places):
            # With what the tokenizer puts before any text.
            ids = tokenizer(text[start:][: 8 * args.tokens], verbose=False)["input_ids"]
            ids = ids[: args.tokens]
            said = tokenizer.decode(ids, skip_special_tokens=True)
            if len(ids) < args.tokens or len(said) > room(text, args.places):
                raise ValueError(
                    f"--tokens {args.tokens}: {name} is too short for {args.places} places in each "
                    "half; take fewer --tokens or --places"
                )
            found[f"{name} {start / len(text):.0%}"] = ids
    return found if args.prompts is None else dict(list(found.items())[: args.prompts])


@torch.no_grad()
def prefilled(model, ids: torch.Tensor) -> DynamicCache:
    """All tokens but the last."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def likelihoods(model, filled, ids: torch.Tensor, tokens: list[int]) -> list[float]:
    """NLL per token of a continuation, by quarter."""
    fed = torch.cat((ids[:, -1:], torch.tensor([tokens[:-1]], device=ids.device)), 1)
    logits = model(fed, past_key_values=copy.deepcopy(filled)).logits[0].float().log_softmax(-1)
    own = -logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return [part.mean().item() for part in own.tensor_split(len(QUARTERS))]


def compared(tokenizer, tokens: list[int], reference: list[int]) -> dict:
    """How much of the reference a continuation repeats."""
    same = [a == b for a, b in zip(tokens, reference, strict=True)]
    return dict(
        same=same.index(False) if False in same else len(same),
        equal=sum(same) / len(same),
        f1=f1(tokenizer.decode(tokens), [tokenizer.decode(reference)]),
    )


class Models:
    """The model, and the same weights in float32, made when they are first needed."""

    def __init__(self, model) -> None:
        self.model, self._precise = model, None

    @property
    def precise(self):
        if self.model.dtype == torch.float32:
            return self.model
        if self._precise is None:
            self._precise = copy.deepcopy(self.model).float()
        return self._precise


class Prompt:
    """A prompt, prefilled once in each precision, when something is missing."""

    def __init__(self, models: Models, ids: list[int]) -> None:
        self.models, self.ids = models, torch.tensor([ids], device=models.model.device)
        self._filled: dict = {}

    def filled(self, model) -> DynamicCache:
        if model not in self._filled:
            self._filled[model] = prefilled(model, self.ids)
        return self._filled[model]


def ways(args, rounds: bool) -> list[tuple[str, float | None]]:
    """Who runs with which budget; the reference first."""
    dense = [(REFERENCE, None)] + [(PRECISE, None)] * rounds
    return dense + [(name, budget) for budget in args.budgets for name in CONTESTANTS]


def one_run(
    prompt: Prompt, name: str, budget, tokenizer, args, reference: list[int] | None
) -> dict:
    """The figures of one contestant on one prompt; ``error`` where it cannot run."""
    precise = prompt.models.precise
    model = precise if name == PRECISE else prompt.models.model
    try:
        cache = cache_of(prompt.filled(model), name, budget)
    except ValueError as error:
        return dict(error=f"{name} cannot run: {error}")
    made = generate(model, cache, prompt.ids, args.new_tokens, tokenizer.eos_token_id)
    return dict(
        **compared(tokenizer, made.tokens, reference or made.tokens),
        nll=likelihoods(precise, prompt.filled(precise), prompt.ids, made.tokens),
        read=made.read,
        seconds=made.seconds,
        dense_steps=made.dense_steps,
        tokens=made.tokens,
    )


def run(model, tokenizer, args) -> list[dict]:
    """Every contestant on every prompt; what the record has is not run again."""
    record = Record(args.output / f"generation-{args.half}.jsonl")
    models, results = Models(model), []
    prompts = prompts_of(tokenizer, args)
    chosen = ways(args, rounds=model.dtype != torch.float32)
    bar = tqdm(total=len(prompts) * len(chosen), desc="generation", unit="run")
    for place, ids in prompts.items():
        prompt, reference = Prompt(models, ids), None
        digest = hashlib.sha256(str(ids).encode()).hexdigest()[:16]
        for name, budget in chosen:
            settings = {"budget": budget, **COMMON, **(CONTESTANTS.get(name) or {})}
            told = described(None if budget is None else settings)
            key = "|".join((args.about, place, digest, str(args.new_tokens), name, told))
            if key not in record.known:
                figures = one_run(prompt, name, budget, tokenizer, args, reference)
                told = dict(about=args.about, prompt=place, digest=digest, contestant=name)
                record.add(key, dict(told, budget=budget, **figures))
            results.append(record.known[key])
            reference = reference or results[-1]["tokens"]
            bar.update()
    bar.close()
    return results


def arguments() -> argparse.ArgumentParser:
    parser = common_arguments(__doc__, "generation")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.2, 0.1, 0.05])
    parser.add_argument("--tokens", type=int, default=4096, help="length of the contexts")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--places", type=int, default=2, help="contexts per text")
    parser.add_argument("--prompts", type=int, help="only the first so many contexts")
    return parser


def evaluate(args, model, tokenizer) -> str:
    """The parsed arguments' evaluation: a Markdown section.

    Raises:
        ValueError: the texts are too short for the contexts, too few tokens are generated, or the
            model has too few positions.
    """
    if args.quick:
        args.prompts, args.tokens, args.new_tokens = 1, 512, 32
        args.budgets = args.budgets[:1]
    if args.new_tokens < len(QUARTERS):
        raise ValueError(f"--new-tokens {args.new_tokens}: at least one per quarter is needed")
    args.about = about_of(args, model)
    reason = why_not_run(model, [args.tokens + args.new_tokens])
    if reason:
        raise ValueError(f"--tokens {args.tokens}, --new-tokens {args.new_tokens}: {reason}")
    results = run(model, tokenizer, args)
    title = f"## generation ({args.about}, half: {args.half})"
    counts = f"{args.tokens:,} tokens of context, {args.new_tokens} generated"
    text = f"{title}\n\n{counts}.\n\n{tables(results, model.dtype)}\n"
    return keep_section(args.output, f"generation-{args.half}", text)


def main() -> None:
    run_alone(arguments(), evaluate)


if __name__ == "__main__":
    main()
