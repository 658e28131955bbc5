"""What a prompt of stored chunks still says after KVBoost has joined them; run by
`evaluation_peers.py`.

    .venv-kvboost/bin/python examples/peer_kvboost_quality.py --model FOLDER --prompt prompts.json \
        --output result.json

The file has ``{"prompts": [...], "answer_tokens": N}``, prompts as the fields of BlendPrompt. All
segments but the last are stored as whole chunks, each alone and as if it began a prompt; KVBoost
then fills a cache of all tokens but the prompt's last one by reusing them, and recomputes up to
15 % of the tokens. It is judged as every other contestant is (blend_answers.py); the truth is this
environment's own full prefill, and before any figure is taken KVBoost with nothing stored must
agree with it. Nothing of anchor_cache is imported.
"""

from __future__ import annotations

import json
import time

import torch
from benchmark_timing import require_that
from blend_answers import compare, prefilled
from blend_tasks import BlendPrompt
from kvboost import KVBoost
from kvboost.engine import GenerationMode
from peer_script import model_of, peer_arguments, write
from transformers import AutoTokenizer, DynamicCache

_ROUNDING = 1e-2  # KL in nats, between caches filled at once and in two steps


class OfSegments(KVBoost):
    """Takes prompts as JSON lists of segments, and splits them there: where a caller's documents
    end, as other contestants do, not at multiples of its own chunk size."""

    def _encode(self, text: str) -> list[int]:
        self.segments = json.loads(text)
        return [token for segment in self.segments for token in segment]

    def _split_tokens(self, token_ids, text=""):
        splits, start = [], 0
        for segment in self.segments:
            splits.append((start, start + len(segment), segment))
            start += len(segment)
        return splits


def filled(engine: OfSegments, segments: list[list[int]]) -> tuple[DynamicCache, float, float]:
    """The cache of these tokens, the share that was reused, and the seconds it took."""
    tokens, caches = sum(map(len, segments)), []

    def keep(module, args, kwargs, output) -> None:
        if output.past_key_values.get_seq_length() == tokens:
            caches.append((output.past_key_values, time.perf_counter()))

    hook = engine.model.register_forward_hook(keep, with_kwargs=True)
    started = time.perf_counter()
    done = engine.generate(
        json.dumps(segments), max_new_tokens=1, mode=GenerationMode.CHUNK_KV_REUSE
    )
    hook.remove()
    cache, ended = caches[0]
    return cache, done.kv_reuse_ratio, ended - started


@torch.no_grad()
def figures_of(engine: OfSegments, tokenizer, prompt: BlendPrompt, answer_tokens: int) -> dict:
    """What full prefill's figures are compared with; ``error`` where nothing was reused."""
    model = engine.model
    _, truth = compare(model, tokenizer, prefilled(model, prompt), prompt, None, answer_tokens)
    *stored, question = map(list, prompt.segments)
    if len(question) < 2:
        return dict(error="its last token is fed again where all others are reused")
    segments = [*stored, question[:-1]]
    engine.reset_cache()
    cache, share, _ = filled(engine, segments)
    require_that(share == 0, "KVBoost reuses what was not stored")
    own, _ = compare(model, tokenizer, cache, prompt, truth, answer_tokens)
    require_that(max(own["kl"]) <= _ROUNDING, f"KVBoost's prefill is off: KL {max(own['kl']):.2g}")
    engine.reset_cache()
    for segment in stored:
        engine.warm(json.dumps([segment]))
    cache, share, seconds = filled(engine, segments)
    if share * sum(map(len, segments)) < sum(map(len, stored)) - 0.5:
        return dict(error=f"it reused {share:.0%} of the tokens, not all chunks")
    own, _ = compare(model, tokenizer, cache, prompt, truth, answer_tokens)
    ratio = engine.cacheblend_recompute.recompute_ratio
    return dict(own, seconds=seconds, recomputed=ratio, reused=share)


def main() -> None:
    args = peer_arguments(__doc__, "the prompts").parse_args()
    given = json.loads(args.prompt.read_text())
    model = model_of(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    engine = OfSegments(
        model,
        tokenizer,
        max_cache_bytes=1 << 34,
        max_chunks=1 << 16,
        recompute_strategy="cacheblend",
        device=args.device,
    )
    prompts = [BlendPrompt(**fields) for fields in given["prompts"]]
    rows = [figures_of(engine, tokenizer, one, given["answer_tokens"]) for one in prompts]
    write(args, "kvboost", rows=rows)


if __name__ == "__main__":
    main()
