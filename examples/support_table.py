"""Try both caches on a tiny random model of every family and write what came out.

python examples/support_table.py                 # writes docs/models.md
python examples/support_table.py llama gemma3n   # prints these rows only
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from tiny_models import ALL_FAMILIES, BYPASSING, tiny_family
from tqdm import tqdm
from transformers import DynamicCache

from anchor_cache import AnchorDynamicCache, BlendedCache, ChunkStore, anchor_attention

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "models.md"
COLUMNS = (
    *("family", "class", "sparse", "passed through", "eager", "sdpa", "padded", "why not"),
    "blended",
)
SETTINGS = dict(block_size=8, sink_size=8, window_size=16, dense_below=0, dense_above=1.0)
BUDGET = 48
PADDED = (0, 13)
TOLERANCE = 1e-4

_HEADER = """\
# Models

What `AnchorDynamicCache(model.config)` and `BlendedCache.blend` do with a tiny random model of each
family, 4 layers each. `make support-table` writes this file; `tests/test_families.py` and
`tests/test_blend_families.py` test what it says. A family that is not listed may well work:
`with anchor_attention(model):` refuses, by name, models that cannot, and `cache.report()` says what
was not sparse and why. `ChunkStore(path, model)` tries a model's layers out before anything is
stored, and refuses it, by name and with the reason, if they do not compute single tokens as they
compute whole prompts.

* **sparse**: layers that read at most {budget} tokens of a longer context with `budget={budget}`.
* **passed through**: layers that keep the cache they have in `DynamicCache`.
* **eager**, **sdpa**, **padded**: whether, with `budget=1.0`, greedy generation gives the tokens of
  `DynamicCache(config=model.config)` and its logits to {tolerance:g} in fp32; in both attention
  implementations, and in a batch with left padding. A dash: transformers does not offer it.
* **why not**: what the report says about layers that are not sparse.
* **blended**: whether a prompt of stored chunks, in another order than they were stored in, has
  with `recompute_ratio=1` the keys, values and next logits of a full prefill, to {tolerance:g}, and
  with `recompute_ratio=0` its first layer's keys; in both attention implementations.

Made with transformers {version}.

"""


def prompt(paddings: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Token ids ``[2, 71]`` and their mask, which hides that many tokens at the start of each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 96, (2, 71), generator=generator)
    mask = torch.ones_like(ids)
    for row_mask, padding in zip(mask, paddings, strict=True):
        row_mask[:padding] = 0
    return dict(input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask)


def greedy(model, cache, paddings=(0, 0)) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and logits of a few greedy tokens."""
    out = model.generate(
        **prompt(paddings),
        past_key_values=cache,
        max_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits)


def _agree(model, paddings=(0, 0)) -> str:
    expected = greedy(model, DynamicCache(config=model.config), paddings)
    actual = greedy(model, AnchorDynamicCache(model.config, budget=1.0, **SETTINGS), paddings)
    error = (actual[1] - expected[1]).abs().max().item()
    same = torch.equal(actual[0], expected[0]) and error <= TOLERANCE
    return "yes" if same else f"no ({error:.0e})"


def _refusal(model) -> str | None:
    try:
        with anchor_attention(model):
            return None
    except NotImplementedError as refused:
        return str(refused).split(",")[0]


def _blended(model) -> str:
    prefix, *chunks, question = prompt((0, 0))["input_ids"].flatten().split((5, 40, 30, 1, 50, 16))
    segments = [prefix, *reversed(chunks), question]
    ids = torch.cat(segments)[None]
    full = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=full)
    with tempfile.TemporaryDirectory() as folder:
        try:
            store = ChunkStore(folder, model, prefix=prefix)
        except NotImplementedError as refused:
            return f"refused: {str(refused).split(' cannot be blended: ')[1]}"
        store.add(chunks, progress=False)
        exact, moved = (
            BlendedCache.blend(model, store, segments, recompute_ratio=r) for r in (1, 0)
        )
    pairs = [(moved.layers[0].keys, full.layers[0].keys)]
    for one, other in zip(exact.layers, full.layers, strict=True):
        if other.keys is not None:
            pairs += (one.keys, other.keys), (one.values, other.values)
    pairs.append([model(ids[:, -1:], past_key_values=cache).logits for cache in (exact, full)])
    error = max((one - other).abs().max().item() for one, other in pairs)
    return "yes" if error <= TOLERANCE else f"no ({error:.0e})"


def row(family: str) -> tuple[str, ...]:
    """One line of the table, as :data:`COLUMNS` names them.

    Raises:
        ValueError: this version of transformers does not have the family.
    """
    models = {name: tiny_family(family, name) for name in ("eager", "sdpa")}
    model = models["eager"]
    if model is None:
        raise ValueError(f"transformers {transformers.__version__} has no {family}")
    exact = {k: "-" if m is None else _agree(m) for k, m in models.items()}
    padded = {_agree(m, PADDED) for m in models.values() if m is not None}
    blended = dict.fromkeys(_blended(m) for m in models.values() if m is not None)
    cache = AnchorDynamicCache(model.config, budget=BUDGET, **SETTINGS)
    greedy(model, cache)
    report = cache.report()
    sparse = sum(record.sparse_steps > 0 for record in report.records.values())
    passed = [x for i, x in enumerate(cache.layers) if i not in cache.anchor_layers]
    others = Counter(type(layer).__name__ for layer in passed)
    reasons = [reason for reason in report.reasons if "layers are never sparse" not in reason]
    return (
        family,
        type(model).__name__,
        f"{sparse} of {model.config.num_hidden_layers}",
        ", ".join(f"{count} {name}" for name, count in others.items()),
        exact["eager"],
        exact["sdpa"],
        "yes" if padded == {"yes"} else "; ".join(sorted(padded - {"yes"})),
        _refusal(model) or "; ".join(reasons),
        "; ".join(blended),
    )


def line(cells: tuple[str, ...]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*ALL_FAMILIES, *BYPASSING]
    parser.add_argument("families", nargs="*", help="print these rows instead of writing the file")
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="the file to write")
    args = parser.parse_args()
    if unknown := [name for name in args.families if name not in every]:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(every)}")
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    warnings.filterwarnings("ignore", message="AnchorDynamicCache stays dense")
    rows = [row(name) for name in tqdm(args.families or every, desc="families", unit="family")]
    table = "\n".join(line(cells) for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows))
    if args.families:
        print(table)
        return
    header = _HEADER.format(budget=BUDGET, tolerance=TOLERANCE, version=transformers.__version__)
    args.output.write_text(f"{header}{table}\n")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
