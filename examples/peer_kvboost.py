"""Time to the first token of a prompt of stored chunks with KVBoost; run by `benchmark_peers.py`.

    .venv-kvboost/bin/python examples/peer_kvboost.py --model FOLDER --prompt prompt.json ...

Timed from outside, from the call up to the callback with the first token: KVBoost's own figure
leaves out the time in which it joins and recomputes chunks. Nothing of anchor_cache is imported.
"""

from __future__ import annotations

import json
import time

from benchmark_timing import spread
from kvboost import KVBoost
from kvboost.engine import GenerationMode
from peer_script import model_of, peer_arguments, write
from transformers import AutoTokenizer

CHUNK = 128  # tokens of its chunks; those of the prompt are whole multiples
# Chunks that were stored elsewhere than where they stand are always recomputed by its CacheBlend,
# 15 % of them, whichever of its strategies is asked for.
MODES = {
    "KVBoost, full prefill": GenerationMode.BASELINE,
    "KVBoost, chunk reuse (15%)": GenerationMode.CHUNK_KV_REUSE,
}


class OfIds(KVBoost):
    """Takes prompts as JSON lists of ids: the same tokens for all, whatever text they stand for."""

    def _encode(self, text: str) -> list[int]:
        return json.loads(text)


def measure(engine: OfIds, segments: list[list[int]], mode: GenerationMode, rounds: int) -> dict:
    """Seconds to the first token, with all segments but the last stored before, each alone."""
    ids, seconds = [token for segment in segments for token in segment], []
    for turn in range(rounds + 1):
        engine.reset_cache()  # it would otherwise have stored the whole prompt
        if mode != GenerationMode.BASELINE:
            for segment in segments[:-1]:
                engine.warm(json.dumps(segment))
        tokens: list[tuple[int, float]] = []
        started = time.perf_counter()
        result = engine.generate(
            json.dumps(ids),
            max_new_tokens=1,
            mode=mode,
            on_token=lambda token, seen=tokens: seen.append((token, time.perf_counter())),
        )
        if turn:
            seconds.append(tokens[0][1] - started)
    row = dict(first_token=tokens[0][0], reused_share=result.kv_reuse_ratio)
    return {**row, **spread(seconds)}


def main() -> None:
    parser = peer_arguments(__doc__, "the segments")
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    segments = json.loads(args.prompt.read_text())["segments"]
    model = model_of(args)
    engine = OfIds(
        model,
        AutoTokenizer.from_pretrained(args.model),
        max_cache_bytes=1 << 34,
        chunk_size=CHUNK,
        max_chunks=1 << 16,
        recompute_strategy="cacheblend",
        device=args.device,
    )
    rows = {}
    for name, mode in MODES.items():
        rows[name] = measure(engine, segments, mode, args.rounds)
    write(args, "kvboost", contestants=rows)


if __name__ == "__main__":
    main()
