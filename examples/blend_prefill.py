"""Time to the first token of a blended prompt, against full prefill and the bound of operations."""

from __future__ import annotations

import functools
import inspect
import os
import statistics
import time
from pathlib import Path

import torch
from blend_answers import distributions, prefilled
from blend_contestants import FULL, SELECTORS
from blend_operations import blend_operations, prefill_operations
from blend_runs import Stores
from blend_tasks import BlendPrompt, continuation
from evaluation_metrics import kl, markdown
from tqdm import tqdm
from transformers import DynamicCache

from anchor_cache import BlendedCache, ChunkStore

CHUNK, PREFIX, QUESTION, GOLD = 512, 32, 24, 32


def text_prompt(
    tokenizer, half: str, tokens: int, data, chunk: int = CHUNK, prefix: int = PREFIX
) -> BlendPrompt:
    """Ordinary text of about ``tokens`` tokens in chunks of ``chunk`` after a prefix of ``prefix``.
    The first chunk, encoded after just what precedes it, is exact, as the first document of a
    prompt is."""
    chunks = max(tokens // chunk, 1)
    (plain,) = continuation(
        tokenizer,
        half,
        1,
        data,
        chunks=1,
        chunk_tokens=prefix + chunks * chunk,
        question_tokens=QUESTION,
        gold_tokens=GOLD,
    )
    text, question = plain.segments
    start = len(text) - chunks * chunk
    cut = [text[:start], *(text[i:][:chunk] for i in range(start, len(text), chunk)), question]
    return BlendPrompt(plain.name, plain.kind, tuple(cut), plain.gold)


def forget(folder: Path) -> None:
    """Ask the system to drop the files from its page cache, so that they are read from the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def first_token(model, cache, ids: list[int]) -> None:
    """Run what the cache lacks and wait for the first token."""
    rest = torch.tensor([ids[cache.get_seq_length() :]], device=model.device)
    model(rest, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax().item()


def contestants(args) -> dict[str, dict]:
    """Full reuse, and the selectors at every ratio."""
    named = {"full reuse": dict(recompute_ratio=0.0)}
    for name in args.prefill_selectors:
        for ratio in args.prefill_ratios:
            named[f"{name}, {ratio:g}"] = dict(SELECTORS[name], recompute_ratio=ratio)
    return named


def store_options(source: str) -> dict:
    """Options of a ChunkStore that reads its chunks from there.

    Raises:
        ValueError: "memory", of a store that keeps none in memory.
    """
    if "memory_bytes" in inspect.signature(ChunkStore).parameters:
        return {"memory_bytes": {"disk": 0, "memory": 1 << 36}[source]}
    if source != "disk":
        raise ValueError(f"source={source!r}: this ChunkStore keeps no chunks in memory; use disk")
    return {}


@torch.no_grad()
def time_blends(model, tokenizer, tokens: int, args, folder: str) -> list[dict]:
    """Seconds to the first token of full prefill and of every contestant, which take turns.

    Returns:
        Per contestant its seconds (one per repetition), its KL to full prefill over the next
        tokens of the text, and its multiply-adds as a share of full prefill's.
    """
    prompt = text_prompt(tokenizer, args.half, tokens, args.data)
    stores = Stores(folder, model, **store_options(args.source))
    store, segments = stores.fill("prefix", prompt)
    truth = distributions(model, prefilled(model, prompt), prompt)
    whole = prefill_operations(model, len(prompt.ids))
    rows = {FULL: dict(kl=0.0, operations=1.0, loading=[])}
    ways = {FULL: lambda: DynamicCache(config=model.config)}
    for name, settings in contestants(args).items():
        ways[name] = functools.partial(BlendedCache.blend, model, store, segments, **settings)
        cache = ways[name]()
        counted = blend_operations(model, cache.report(), len(prompt.ids))
        difference = kl(truth, distributions(model, cache, prompt))[:-1].mean().item()
        rows[name] = dict(kl=difference, operations=counted / whole, loading=[])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in tqdm(range(args.repeats + 1), desc=f"{len(prompt.ids)} tokens", unit="turn"):
        for name, make in ways.items():
            if args.cold:
                forget(Path(folder))
            started = time.perf_counter()
            cache = make()
            first_token(model, cache, prompt.ids)
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - started)
                if name != FULL:
                    rows[name]["loading"].append(cache.report().load_seconds)
    about = dict(tokens=len(prompt.ids), prompt=prompt.name, source=args.source, cold=args.cold)
    return [dict(about, contestant=n, seconds=seconds[n], **row) for n, row in rows.items()]


def summary(results: list[dict]) -> str:
    """A Markdown table; the bound is full prefill's time x the share of its operations."""
    full, rows = {}, []
    for one in results:
        median = statistics.median(one["seconds"])
        if one["contestant"] == FULL:
            full[one["tokens"]] = median
        whole = full[one["tokens"]]
        bound = whole * one["operations"]
        loading = statistics.median(one["loading"]) if one["loading"] else 0.0
        rows.append(
            [
                f"{one['tokens']:,}",
                one["contestant"],
                f"{median:.3f} s",
                f"{min(one['seconds']):.3f} to {max(one['seconds']):.3f}",
                f"{loading:.3f} s",
                f"{whole / median:.2f} x",
                f"{bound:.3f} s ({1 / one['operations']:.2f} x)",
                f"{median / bound:.2f}",
                f"{one['kl']:.4f}",
            ]
        )
    header = ["tokens", "contestant", "first token", "range", "of it loading", "speed", "bound"]
    return markdown([*header, "measured / bound", "KL"], rows)
