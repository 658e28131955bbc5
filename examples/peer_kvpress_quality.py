"""What caches that kvpress has compressed still say; run by `evaluation_peers.py`.

    .venv-kvpress/bin/python examples/peer_kvpress_quality.py --model FOLDER --prompt places.json \
        --presses SnapKVPress KnormPress --budgets 0.1 0.05 --output result.json

The file has ``{"places": [{"name", "ids", "n_target"}]}``. Each place's ids but the last
``n_target + 1`` are prefilled under a press, which keeps a share of them; the rest is fed at once.
The truth is this environment's own dense run. Before any figure is taken, a press that is to
compress nothing must leave the dense run's result. Nothing of anchor_cache is imported: kvpress
needs an older transformers.
"""

from __future__ import annotations

import contextlib
import copy
import json
import statistics
import time

import kvpress
import torch
from benchmark_timing import require_that, synchronize
from evaluation_metrics import kl
from peer_script import model_of, peer_arguments, write
from transformers import AutoConfig, DynamicCache

_ROUNDING = 1e-3  # nats, between runs that compute the same
# Tokens fed at once and one by one are not summed in the same order.
_ORDER = {torch.float32: 1e-2}


def prefill(model, ids: torch.Tensor, press) -> tuple[DynamicCache, float]:
    """The cache of these ids, compressed unless ``press`` is None, and the seconds it took."""
    cache = DynamicCache()
    synchronize(model.device)
    started = time.perf_counter()
    with contextlib.nullcontext() if press is None else press(model):
        model(ids, past_key_values=cache, logits_to_keep=1)
    synchronize(model.device)
    return cache, time.perf_counter() - started


def said(model, cache: DynamicCache, fed: torch.Tensor, start: int) -> torch.Tensor:
    """Log-probabilities before each target, ``[n_target, vocabulary]``.

    The keys keep the positions that they had, so the fed tokens are told theirs; the mask, which
    transformers makes from the cache's length, lets each see the whole cache and those before it.

    Args:
        model: the model.
        cache: used up.
        fed: the last token of the context, and the targets.
        start: position of the first of them.
    """
    places = torch.arange(start, start + fed.shape[1], device=fed.device)[None]
    logits = model(fed, past_key_values=cache, position_ids=places).logits[0, :-1]
    return logits.float().log_softmax(-1)


def farthest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference among log-probabilities of tokens that are not hopeless."""
    likely = expected > -10
    return (actual - expected)[likely].abs().max().item()


def check(model, context: torch.Tensor, fed: torch.Tensor, truth: torch.Tensor, presses) -> None:
    """That the figures can be trusted.

    Raises:
        WrongResult: a press of no compression changes the result, or a cache that lacks tokens
            says something else if the targets are fed one by one.
    """
    start = context.shape[1]
    for name in presses:
        cache, _ = prefill(model, context, getattr(kvpress, name)(compression_ratio=0.0))
        off = farthest(said(model, cache, fed, start), truth)
        require_that(off <= _ROUNDING, f"{name}, compressing nothing, is off by {off:.2g} nats")
    cache, _ = prefill(model, context, None)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]
    one_by_one = copy.deepcopy(cache)
    at_once = said(model, cache, fed, start)
    steps = [
        model(
            token, past_key_values=one_by_one, position_ids=torch.tensor([[start + i]]).to(fed)
        ).logits[0, -1]
        for i, token in enumerate(fed[:, :-1].split(1, 1))
    ]
    apart = kl(at_once, torch.stack(steps).float().log_softmax(-1)).max().item()
    limit = _ORDER.get(model.dtype, 0.1)
    require_that(apart <= limit, f"tokens fed at once and one by one differ: KL {apart:.2g}")


def press_of(name: str, budget: float, length: int, least: int):
    """A press that keeps this share of the tokens, ``least`` at least, and the number it keeps."""
    kept = min(max(int(budget * length), least), length)
    # What kvpress keeps is rounded down: half a token more makes it this number.
    ratio = max(1 - (kept + 0.5) / length, 0.0)
    return getattr(kvpress, name)(compression_ratio=ratio), kept


def compare(model, context, fed, truth, name: str, budget: float, least: int) -> dict:
    """The figures of one press at one place; ``error`` where it cannot run."""
    length, targets = context.shape[1], fed[0, 1:]
    press, kept = press_of(name, budget, length, least)
    window = getattr(press, "window_size", 0)
    if kept <= window < length:
        return dict(error=f"its window takes {window} tokens, the budget holds {kept}")
    try:
        cache, seconds = prefill(model, context, press)
    except AssertionError as error:
        return dict(error=f"AssertionError: {error}")
    lengths = {cache.get_seq_length(layer) for layer in range(len(cache))}
    require_that(lengths == {kept}, f"{name}: {lengths} tokens kept, not {kept}")
    own = said(model, cache, fed, length)
    steps = range(1, len(targets) + 1)
    return dict(
        kl=kl(truth, own).tolist(),
        best=(own.argmax(-1) == targets).tolist(),
        nll=-own.gather(1, targets[:, None]).mean().item(),
        attended=statistics.fmean((kept + i) / (length + i) for i in steps),
        kept=kept / length,
        prefill=seconds,
    )


@torch.no_grad()
def rows_of(
    model, places: list[dict], presses: list[str], budgets: list[float], least: int = 1
) -> list[dict]:
    """Every press with every budget at every place."""
    rows = []
    for number, place in enumerate(places):
        ids = torch.tensor([place["ids"]], device=model.device)
        context, fed = ids.split([ids.shape[1] - place["n_target"] - 1, place["n_target"] + 1], 1)
        cache, _ = prefill(model, context, None)
        truth = said(model, cache, fed, context.shape[1])
        if number == 0:
            check(model, context, fed, truth, presses)
        for budget in budgets:
            for name in presses:
                about = dict(budget=budget, contestant=name, place=place["name"])
                rows.append(about | compare(model, context, fed, truth, name, budget, least))
    return rows


def main() -> None:
    parser = peer_arguments(__doc__, "the places")
    parser.add_argument("--presses", nargs="+", required=True, help="classes of kvpress")
    parser.add_argument("--budgets", type=float, nargs="+", required=True, help="shares to keep")
    parser.add_argument("--least", type=int, default=1, help="tokens to keep at least")
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.model).get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        # The mask of tokens fed at once is made for caches whose layers are equally long.
        parser.exit(1, f"only models of full attention are compared; this one has {sorted(kinds)}")
    model = model_of(args)
    places = json.loads(args.prompt.read_text())["places"]
    rows = rows_of(model, places, args.presses, args.budgets, args.least)
    write(args, "kvpress", rows=rows)


if __name__ == "__main__":
    main()
