"""Both caches on a real model: a long document, then a RAG prompt. Prints figures, writes pictures.

    make demo                                   # sets everything up, then runs this
    python examples/demo.py --model NAME_OR_PATH --tokens 6300 --budget 0.1

Without --model the small model of examples/small_model.py is used. The text is Python's own manual
(pydoc_data), with facts hidden in it.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from small_model import load
from texts import manual
from transformers import DynamicCache, StaticCache

from anchor_cache import AnchorDynamicCache, BlendedCache, ChunkStore, segments_from_chat

QUESTION = "What is the special magic number for Paris?"
CITIES = {"Oslo": 2718281, "Lima": 1414213, "Cairo": 6180339, "Paris": 7463343, "Delhi": 5772156}
CITIES |= {"Quito": 9159655}


def fact(city: str) -> str:
    return f" The special magic number for {city} is {CITIES[city]}. "


def cut_at_space(text: str, characters: int) -> int:
    return text.index(" ", characters)


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    say(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)]
        say(("  " + "  ".join(cells)).rstrip())


def greedy(model, tokenizer, ids, cache, tokens: int) -> str:
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        do_sample=False,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


def long_document(model, tokenizer, tokens: int, depth: float):
    """A chat prompt of about ``tokens`` tokens, and where the fact stands in it."""
    text = manual(skip=30_000)
    per_token = len(text) / len(tokenizer(text, add_special_tokens=False)["input_ids"])
    text = text[: cut_at_space(text, int(tokens * per_token))]
    middle = cut_at_space(text, int(depth * len(text)))
    document = text[:middle] + fact("Paris") + text[middle:]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{document}\n\n{QUESTION} Answer with the number."}],
        add_generation_prompt=True,
        tokenize=False,
    )
    before = chat[: chat.index(fact("Paris"))]
    encode = dict(add_special_tokens=False, return_tensors="pt")
    ids = tokenizer(chat, **encode)["input_ids"].to(model.device)
    return ids, tokenizer(before, **encode)["input_ids"].shape[1]


def same_kv(cache, source: AnchorDynamicCache):
    """Fill another cache with the same prefilled keys and values."""
    for i, layer in enumerate(source.layers):
        cache.update(layer.keys.clone(), layer.values.clone(), i)
    return cache


def decode_seconds(model, token, caches: dict, steps: int) -> dict[str, float]:
    """Median seconds per token; the contestants take turns, so that all see the same machine."""
    seconds = {name: [] for name in caches}
    for _ in range(steps):
        for name, cache in caches.items():
            started = time.perf_counter()
            model(token, past_key_values=cache)
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def long_context(model, tokenizer, args) -> None:
    ids, place = long_document(model, tokenizer, args.tokens, args.depth)
    length = ids.shape[1]
    say(f"\n1. LONG CONTEXT: {length:,} tokens, the fact at token {place:,}", f"   Q: {QUESTION}")
    settings = dict(
        sink_size=16, window_size=128, budget=args.budget, dense_below=0, dense_above=1.0
    )
    prefilled = AnchorDynamicCache(model.config, **settings)
    started = time.perf_counter()
    model(ids[:, :-1], past_key_values=prefilled, logits_to_keep=1)
    say(f"   prefilled once, exactly, in {time.perf_counter() - started:.1f} s")

    dense, sparse = same_kv(DynamicCache(config=model.config), prefilled), copy.deepcopy(prefilled)
    answers = {
        "DynamicCache": greedy(model, tokenizer, ids, dense, args.answer_tokens),
        "AnchorDynamicCache": greedy(model, tokenizer, ids, sparse, args.answer_tokens),
    }
    static = StaticCache(config=model.config, max_cache_len=length + args.steps)
    contestants = {
        "DynamicCache": same_kv(DynamicCache(config=model.config), prefilled),
        "StaticCache": same_kv(static, prefilled),
        "AnchorDynamicCache": copy.deepcopy(prefilled),
    }
    seconds = decode_seconds(model, ids[:, -1:], contestants, args.steps)
    report = sparse.report()
    attended = {name: f"{length:,}" for name in seconds}
    attended["AnchorDynamicCache"] = f"{report.tokens_attended:,.0f}"
    table(
        "Greedy answers",
        ["cache", "tokens attended", "s / token", "answer"],
        [
            [name, attended[name], f"{took:.3f}", answers.get(name, "(dense, only timed)")]
            for name, took in seconds.items()
        ],
    )

    audited = AnchorDynamicCache.from_cache(prefilled, audit_every=1, **settings)
    greedy(model, tokenizer, ids, audited, args.answer_tokens)
    audit = audited.report()
    text = model.config.get_text_config(decoder=True)
    index = sparse.anchor_layers[0].index
    anchors = sum(layer.index.anchors[0].numel() for layer in sparse.anchor_layers.values())
    _, blocks, per_head, heads, dim = index.anchors.shape
    keys = report.kv_bytes // 2 // prefilled.layers[0].keys.element_size()
    say(
        "",
        f"  attention mass held by the blocks that were read (audit): {audit.coverage:.1%}",
        f"  article A: {text.num_hidden_layers} layers x {blocks} blocks x {per_head} anchor x "
        f"{heads} heads x {dim} = {anchors:,} numbers,",
        f"    the keys are {keys / anchors:.0f} times as many",
        f"  index {report.index_bytes / 2**20:.1f} MiB (with offsets and sketches), K/V "
        f"{report.kv_bytes / 2**20:.1f} MiB: {report.index_bytes / report.kv_bytes:.1%}",
        *(f"  not sparse: {reason} (x{count})" for reason, count in report.reasons.items()),
    )
    picture = audit.plot(args.output / "blocks_read.png", {"the fact": place})
    say(f"  picture: {picture}")


def rag_prompt(document_tokens: int) -> tuple[str, list[str]]:
    """A user's message with six excerpts, each with a fact of its own, and those excerpts."""
    prefix = "Answer the question from these notes.\n\n"
    text, documents = manual(skip=120_000), []
    for city in CITIES:
        end = cut_at_space(text, 4 * document_tokens)
        middle = cut_at_space(text, 2 * document_tokens)
        documents.append(text[:middle] + fact(city) + text[middle:end] + "\n\n")
        text = text[end:]
    content = prefix + "".join(documents) + f"{QUESTION} Answer with the number."
    return content, documents


def first_token(model, ids, cache):
    """Time to the first token, and the distribution it is drawn from."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.logits[0][0].float().log_softmax(-1)


def rag(model, tokenizer, args, folder: str) -> None:
    content, documents = rag_prompt(args.document_tokens)
    segments = segments_from_chat(tokenizer, [{"role": "user", "content": content}], documents)
    # Without chunks in memory: what is timed below reads them from the disk.
    store = ChunkStore(folder, model, tokenizer, prefix=segments[0], memory_bytes=0)
    say(f"\n2. RAG: {len(documents)} documents, prefilled once into a ChunkStore on disk")
    store.add(documents)

    def blend(**settings):
        return lambda: BlendedCache.blend(model, store, segments, **settings)

    ways = {
        "full prefill": lambda: DynamicCache(config=model.config),
        "full reuse (ratio 0)": blend(recompute_ratio=0.0),
        f"CacheBlend (hkvd, {args.ratio:.0%})": blend(recompute_ratio=args.ratio, selector="hkvd"),
        f"BlendedCache ({args.ratio:.0%})": blend(recompute_ratio=args.ratio),
    }
    ids = BlendedCache.blend(model, store, segments, recompute_ratio=0.0).input_ids
    say(f"   {ids.shape[1]:,} tokens in the prompt", f"   Q: {QUESTION}")
    seconds, logits, caches = {name: [] for name in ways}, {}, {}
    for _ in range(args.repeats):
        for name, make in ways.items():
            started = time.perf_counter()
            caches[name] = make()
            logits[name] = first_token(model, ids, caches[name])
            seconds[name].append(time.perf_counter() - started)
    truth = logits["full prefill"]
    rows = []
    for name, cache in caches.items():
        cache.crop(ids.shape[1] - 1 - cache.get_seq_length())
        kl = (truth.exp() * (truth - logits[name])).sum().item()
        answer = greedy(model, tokenizer, ids, cache, args.answer_tokens)
        took = statistics.median(seconds[name])
        ratio = statistics.median(seconds["full prefill"]) / took
        rows.append([name, f"{took:.2f} s", f"{ratio:.1f} x", f"{kl:.4f}", answer])
    table(
        "Time to first token (reading the store included)",
        ["way", "first token", "speed", "KL to full", "answer"],
        rows,
    )
    say("", *(f"  {line}" for line in str(caches[rows[-1][0]].report()).splitlines()))
    selected = caches[rows[-1][0]].report().selected
    everything = BlendedCache.blend(model, store, segments, recompute_ratio=1.0)
    picture = everything.report().plot(args.output / "kv_deviation.png", selected)
    say(f"  picture: {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: the small model")
    parser.add_argument("--tokens", type=int, default=6300, help="length of the long document")
    parser.add_argument("--depth", type=float, default=0.5, help="where the fact stands, 0 to 1")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the context to read")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of reused tokens to redo")
    parser.add_argument("--document-tokens", type=int, default=350, help="length of a document")
    parser.add_argument("--answer-tokens", type=int, default=20)
    parser.add_argument("--steps", type=int, default=16, help="decoding steps to time")
    parser.add_argument("--repeats", type=int, default=3, help="prefills and blends to time")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="for pictures")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    model, tokenizer = load(args.model)
    say(f"{type(model).__name__}, {model.dtype}, {model.device}, {torch.get_num_threads()} threads")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        long_context(model, tokenizer, args)
        rag(model, tokenizer, args, folder)


if __name__ == "__main__":
    main()
