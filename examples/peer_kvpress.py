"""Prefill and decoding with caches that kvpress has compressed; run by `benchmark_peers.py`.

    .venv-kvpress/bin/python examples/peer_kvpress.py --model FOLDER --prompt prompt.json ...

Nothing of anchor_cache is imported: kvpress needs an older transformers.
"""

from __future__ import annotations

import contextlib
import json
import time

import kvpress
import torch
from benchmark_timing import WrongResult, require_that, spread, synchronize
from peer_script import model_of, peer_arguments, write
from transformers import DynamicCache

PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "KnormPress")


@torch.no_grad()
def measure(model, ids: torch.Tensor, press, kept: int, steps: int, warm_up: int) -> dict:
    """Seconds of the prefill, which compresses, and of greedy decoding steps after it.

    Args:
        model: the model.
        ids: the prompt, ``[1, T]``.
        press: None for none.
        kept: tokens that the press should leave in every layer.
        steps: decoding steps that are timed, after ``warm_up`` that are not.
    """
    cache, device = DynamicCache(), model.device
    synchronize(device)
    started = time.perf_counter()
    with contextlib.nullcontext() if press is None else press(model):
        output = model(ids, past_key_values=cache, logits_to_keep=1)
    first = output.logits[0, -1].argmax()
    synchronize(device)
    prefill = time.perf_counter() - started
    lengths = {cache.get_seq_length(layer) for layer in range(len(cache))}
    require_that(lengths == {kept}, f"{lengths} tokens kept, not {kept}")
    seconds, token = [], first
    for step in range(warm_up + steps):
        synchronize(device)
        started = time.perf_counter()
        # The keys keep the positions that they had; the cache no longer knows how many there were.
        place = torch.tensor([[ids.shape[1] + step]], device=device)
        logits = model(token.view(1, 1), past_key_values=cache, position_ids=place).logits
        token = logits[0, -1].argmax()
        token.item()
        if step >= warm_up:
            seconds.append(time.perf_counter() - started)
    size = sum(x.numel() * x.element_size() for y in cache.layers for x in (y.keys, y.values))
    row = dict(prefill=prefill, first_token=first.item(), attended=max(lengths), kv_bytes=size)
    return {**row, **spread(seconds)}


def main() -> None:
    parser = peer_arguments(__doc__, "the ids")
    parser.add_argument("--budget", type=int, required=True, help="tokens to keep")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    args = parser.parse_args()
    model = model_of(args)
    ids = torch.tensor([json.loads(args.prompt.read_text())["ids"]], device=args.device)
    length, rows = ids.shape[1], {}
    timing = dict(steps=args.steps, warm_up=args.warm_up)
    for name in PRESSES:
        # What kvpress keeps is rounded down: half a token more makes it the budget.
        press = getattr(kvpress, name)(compression_ratio=1 - (args.budget + 0.5) / length)
        try:
            rows[name] = measure(model, ids, press, args.budget, **timing)
        except WrongResult as error:
            rows[name] = dict(error=str(error))
    write(args, "kvpress", contestants=rows)


if __name__ == "__main__":
    main()
