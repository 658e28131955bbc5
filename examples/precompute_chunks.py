"""Prefill a data set into a ChunkStore, on as many processes as there are.

    python examples/precompute_chunks.py --model NAME --dataset notes.jsonl --store chunks/ --sink
    accelerate launch --num_processes 2 examples/precompute_chunks.py --model NAME \\
        --dataset NAME_OR_FILE --column text --store chunks/ --prefix "Answer from these notes."

(accelerate launch --multi_gpu --num_processes 2 starts two processes on CPUs, too.)

Documents are cut into chunks of --chunk-tokens tokens; a blend later names a chunk by its ids.
What is stored already is not encoded again: after an interruption, run the same command.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, load_dataset
from small_model import load

from anchor_cache import SINK, ChunkStore

FILES = {
    **{".json": ("json", {}), ".jsonl": ("json", {}), ".csv": ("csv", {})},
    **{".parquet": ("parquet", {}), ".txt": ("text", dict(sample_by="document"))},
}


def load_documents(name: str, split: str) -> Dataset:
    """A data set of the Hub by its name, or files by their suffix; a text file is one document."""
    if Path(name).suffix in FILES:
        kind, options = FILES[Path(name).suffix]
        return load_dataset(kind, data_files=name, split="train", **options)
    return load_dataset(name, split=split)


def chunks_of(store: ChunkStore, texts: Iterable[str], tokens: int) -> Iterator[tuple[int, ...]]:
    """Token ids of all texts, cut every ``tokens``; empty texts are left out."""
    for i, text in enumerate(texts):
        ids = store.token_ids(text, f"document {i}") if text else ()
        yield from (ids[start : start + tokens] for start in range(0, len(ids), tokens))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="name or path; the small model of small_model.py if left out"
    )
    parser.add_argument(
        "--dataset", required=True, help=f"a name on the Hub, or a file ({', '.join(FILES)})"
    )
    parser.add_argument("--split", default="train", help="of a data set of the Hub")
    parser.add_argument("--column", default="text", help="where the texts are")
    parser.add_argument("--store", required=True, help="the store: a folder or an fsspec URL")
    prefix = parser.add_mutually_exclusive_group()
    prefix.add_argument("--prefix", help="the text that prompts begin with; nothing if left out")
    prefix.add_argument(
        "--sink",
        action="store_true",
        help="if that is not known: the token that prompts begin with",
    )
    parser.add_argument(
        "--chunk-tokens", type=int, default=512, help="the longest chunk (%(default)s)"
    )
    parser.add_argument("--batch-tokens", type=int, help="the most tokens in one pass")
    parser.add_argument("--dtype", default="auto", help="of the model, such as bfloat16")
    arguments = parser.parse_args()
    if arguments.chunk_tokens < 1:
        parser.error("--chunk-tokens must be at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    state = PartialState(cpu=not torch.accelerator.is_available())
    with state.main_process_first():  # which prepares the data set's cache for all
        documents = load_documents(arguments.dataset, arguments.split)
    if arguments.column not in documents.column_names:
        raise SystemExit(
            f"--column {arguments.column}: the data set has {', '.join(documents.column_names)}"
        )
    model, tokenizer = load(arguments.model, dtype=arguments.dtype)
    prefix = SINK if arguments.sink else arguments.prefix
    store = ChunkStore(arguments.store, model.to(state.device), tokenizer, prefix=prefix)
    before = len(store)
    state.wait_for_everyone()
    started = time.perf_counter()
    with state.main_process_first():
        store.add([], progress=False)  # the prefix, once
    with state.split_between_processes(documents) as own:
        chunks = chunks_of(store, own[arguments.column], arguments.chunk_tokens)
        keys = store.add(
            chunks, progress=state.is_main_process, batch_tokens=arguments.batch_tokens
        )
    digests = gather_object([(key.digest, len(key.ids)) for key in keys])
    seconds = time.perf_counter() - started
    if state.is_main_process:
        tokens, new = sum(dict(digests).values()), len(store) - before
        print(
            f"{len(documents):,} documents, {len(dict(digests)):,} chunks, {tokens:,} tokens, "
            f"after a prefix of {len(store.prefix):,} tokens\n"
            f"{new:,} chunks newly stored in {seconds:.1f} s by {state.num_processes} process(es)\n"
            f"{arguments.store}: {len(store):,} chunks, {store.nbytes:,} bytes"
        )
    state.destroy_process_group()


if __name__ == "__main__":
    with torch.no_grad():
        main()
