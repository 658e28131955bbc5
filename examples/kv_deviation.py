"""Do few tokens carry the KV deviation, the same in every layer? CacheBlend's two insights.

    python examples/kv_deviation.py                             # ordinary text, the small model
    python examples/kv_deviation.py --documents xquad --data FOLDER --encoding prefix

The chunks of a prompt are encoded apart and compared, token by token and layer by layer, with what
full prefill makes of them. Tables say what share of the tokens carries 50, 80, 85 and 95 % of the
squared deviation, how the tokens' ranking of one layer correlates (Spearman) with those of the
layer before and of layer 1, and the KL to full prefill for every selector and ratio. Tables,
pictures and all figures as JSON go to the output folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile

import torch
from blend_answers import distributions
from blend_contestants import SELECTORS
from blend_runs import Stores, filled
from blend_tasks import BlendPrompt, continuation, xquad
from deviation_pictures import draw
from evaluation_metrics import kl, markdown
from evaluation_script import common_arguments, run_alone
from tqdm import tqdm

SHARES = (0.5, 0.8, 0.85, 0.95)
GRID = 101


def spearman(one: torch.Tensor, other: torch.Tensor) -> float:
    """Rank correlation of two vectors ``[T]``."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (one, other)])
    return torch.corrcoef(ranks)[0, 1].item()


def carried(deviation: torch.Tensor) -> torch.Tensor:
    """Share of the squared deviation ``[T]`` that the most deviating tokens carry together:
    entry i for the first i + 1 of them."""
    squared = deviation.double().square().sort(descending=True).values
    return squared.cumsum(0) / squared.sum()


def tokens_carrying(share: float, deviation: torch.Tensor) -> float:
    """The smallest share of the tokens that carries this share of the squared deviation."""
    enough = carried(deviation) >= share - 1e-12
    return (enough.int().argmax().item() + 1) / len(enough)


def curve(deviation: torch.Tensor) -> list[float]:
    """:func:`carried` at 0, 1, ... 100 % of the tokens."""
    reached = torch.cat((torch.zeros(1, dtype=torch.float64), carried(deviation)))
    places = torch.linspace(0, len(deviation), GRID, dtype=torch.float64)
    low = places.floor().long().clamp(max=len(deviation) - 1)
    return torch.lerp(reached[low], reached[low + 1], places - low).tolist()


def of_layers(deviation: torch.Tensor) -> list[dict]:
    """The figures of each layer from 1 on.

    Args:
        deviation: ``[layers, tokens]``, of tokens that were reused and are not exact.
    """
    figures = []
    for i in range(1, len(deviation)):
        own = deviation[i]
        figures.append(
            dict(
                layer=i,
                tokens={f"{share:.0%}": tokens_carrying(share, own) for share in SHARES},
                top15=curve(own)[15],
                before=spearman(own, deviation[i - 1]) if i > 1 else float("nan"),
                first=spearman(own, deviation[1]),
                curve=curve(own),
            )
        )
    return figures


def measure(model, prompts: list[BlendPrompt], args, folder: str) -> list[dict]:
    """Per layer, the mean of the prompts' figures."""
    settings = dict(SELECTORS["random"], recompute_ratio=1.0, deviation=args.measure)
    settings["encoding"] = args.encoding
    per_prompt = []
    for prompt in tqdm(prompts, desc="deviation", unit="prompt"):
        stores = Stores(folder, model)
        deviation = filled(model, prompt, settings, stores).report().deviation
        per_prompt.append(of_layers(deviation[:, ~deviation[1].isnan()]))
        stores.clear()
    return [_mean(layer) for layer in zip(*per_prompt, strict=True)]


def _mean(values):
    """The mean of numbers, or of every number within equal dicts and lists."""
    if isinstance(values[0], dict):
        return {name: _mean([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], list):
        return [_mean(column) for column in zip(*values, strict=True)]
    mean = statistics.fmean(values)
    return int(mean) if isinstance(values[0], int) else mean


def quality(model, prompts: list[BlendPrompt], args, folder: str) -> dict[str, dict[str, float]]:
    """Mean KL(full || blended) over the prompts' continuations, per selector and ratio."""
    ways = {(name, ratio): [] for name in args.selectors for ratio in args.ratios}
    stores = Stores(folder, model)
    bar = tqdm(total=len(prompts) * len(ways), desc="quality", unit="run")
    for prompt in prompts:
        truth = distributions(model, filled(model, prompt, None, stores), prompt)
        for (name, ratio), values in ways.items():
            settings = dict(SELECTORS[name], recompute_ratio=ratio, encoding=args.encoding)
            own = distributions(model, filled(model, prompt, settings, stores), prompt)
            values.append(kl(truth, own)[:-1].mean().item())
            bar.update()
        stores.clear()
    bar.close()
    return {
        name: {f"{ratio:g}": statistics.fmean(ways[name, ratio]) for ratio in args.ratios}
        for name in args.selectors
    }


def layer_table(layers: list[dict]) -> str:
    header = ["layer", *(f"tokens with {share:.0%}" for share in SHARES), "top 15 % carry"]
    rows = [
        [
            str(one["layer"]),
            *(f"{share:.1%}" for share in one["tokens"].values()),
            f"{one['top15']:.1%}",
            f"{one['before']:.2f}" if one["layer"] > 1 else "-",
            f"{one['first']:.2f}",
        ]
        for one in layers
    ]
    return markdown([*header, "rank corr. with layer before", "with layer 1"], rows)


def quality_table(kls: dict[str, dict[str, float]]) -> str:
    ratios = list(next(iter(kls.values())))
    rows = [[name, *(f"{own[ratio]:.4f}" for ratio in ratios)] for name, own in kls.items()]
    return markdown(["KL at ratio", *ratios], rows)


def arguments() -> argparse.ArgumentParser:
    parser = common_arguments(__doc__, "kv_deviation")
    parser.add_argument("--documents", choices=["text", "xquad"], default="text")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--chunk-tokens", type=int, default=256, help="of text, six chunks")
    parser.add_argument("--encoding", choices=["alone", "sink", "prefix"], default="alone")
    parser.add_argument("--measure", choices=["values", "keys", "both"], default="values")
    parser.add_argument("--selectors", nargs="*", choices=SELECTORS, default=list(SELECTORS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.0, 0.05, 0.15, 0.3, 0.6, 1.0])
    return parser


@torch.no_grad()
def evaluate(args, model, tokenizer) -> str:
    """The tables of the parsed arguments, in Markdown; figures and pictures are written too."""
    if args.quick:
        args.prompts, args.chunk_tokens = 1, 64
        args.selectors, args.ratios = ["HKVD on values"], [0.0, 0.15]
    if args.documents == "xquad":
        prompts = xquad(tokenizer, args.half, args.prompts, args.data)
    else:
        prompts = continuation(
            tokenizer,
            args.half,
            args.prompts,
            args.data,
            args.texts,
            chunk_tokens=args.chunk_tokens,
        )
    if not prompts:
        raise ValueError(f"--chunk-tokens {args.chunk_tokens}: no text is long enough for a prompt")
    about = (
        f"{args.model or 'small model'}, {model.dtype}, {args.documents}, {len(prompts)} prompts, "
        f"chunks encoded: {args.encoding}, deviation of {args.measure}"
    )
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        layers = measure(model, prompts, args, folder)
        tables = f"## KV deviation ({about})\n\n{layer_table(layers)}\n"
        print(f"\n{tables}", flush=True)
        kls = quality(model, prompts, args, folder) if args.selectors else {}
    if kls:
        print(f"\n{quality_table(kls)}\n", flush=True)
        tables += f"\n{quality_table(kls)}\n"
    (args.output / "tables.md").write_text(tables, "utf-8")
    figures = {"about": about, "layers": layers, "kl": kls}
    (args.output / "figures.json").write_text(json.dumps(figures), "utf-8")
    for picture in draw(layers, kls, args.output):
        print(f"picture: {picture}")
    return tables


def main() -> None:
    run_alone(arguments(), evaluate)


if __name__ == "__main__":
    main()
