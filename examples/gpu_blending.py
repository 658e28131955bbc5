"""Time to the first token of a blended prompt of random tokens, on a slice of a large model."""

from __future__ import annotations

import functools
import tempfile

import torch
from benchmark_blend import measure_blend
from benchmark_timing import require_close
from blend_answers import prefilled
from blend_runs import Stores
from blend_tasks import BlendPrompt
from gpu_decoding import model_of
from gpu_notes import Notes
from gpu_sizes import Sizes

from anchor_cache import BlendedCache

RATIOS = (0.0, 0.15, 1.0)
_PREFIX, _QUESTION, _GOLD = 32, 24, 8
# By how much of its norm a key or value may be off where everything was recomputed. In bfloat16
# rounding differs between orders of summation, and layers add theirs.
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


def random_prompt(length: int, chunk: int, vocabulary: int) -> BlendPrompt:
    """A prefix, chunks of ``chunk`` tokens, ``length`` together, and a question."""
    generator = torch.Generator().manual_seed(length)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, vocabulary, (count,), generator=generator).tolist())

    chunks = (tokens(chunk) for _ in range(length // chunk))
    segments = (tokens(_PREFIX), *chunks, tokens(_QUESTION))
    return BlendPrompt(f"random {length}", "random", segments, tokens(_GOLD))


@torch.no_grad()
def check_states(model, prompt: BlendPrompt) -> dict:
    """With everything recomputed, keys and values are those of full prefill.

    Raises:
        WrongResult: they are not.
    """
    truth, limit, off = prefilled(model, prompt), _LIMITS[model.dtype], 0.0
    with tempfile.TemporaryDirectory() as folder:
        store, segments = Stores(folder, model).fill("prefix", prompt)
        blended = BlendedCache.blend(model, store, segments, recompute_ratio=1.0)
    for i, (layer, true) in enumerate(zip(blended.layers, truth.layers, strict=True)):
        for name in ("keys", "values"):
            own, expected = (getattr(x, name)[:, :, : len(prompt.ids) - 1] for x in (layer, true))
            off = max(off, require_close(f"layer {i}, {name}", own, expected, limit))
    return {"off": off}


def run(notes: Notes, sizes: Sizes) -> None:
    """The check in fp32 and in the model's dtype, and the times."""
    model = model_of(sizes)
    vocabulary = model.config.vocab_size
    small = random_prompt(4 * sizes.chunk, sizes.chunk, vocabulary)
    exact = model_of(sizes._replace(dtype=torch.float32), layers=2)
    notes.attempt("ratio 1 in fp32, 2 layers", functools.partial(check_states, exact, small))
    notes.attempt("ratio 1", lambda: check_states(model, small))
    for length in sizes.blending:
        prompt = random_prompt(length, sizes.chunk, vocabulary)

        def work(prompt=prompt) -> dict:
            return measure_blend(model, prompt, sizes.prompt, RATIOS, ("memory",), False)

        notes.attempt(f"first token, {length}", work)
