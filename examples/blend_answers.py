"""What a model says over the filled cache of a prompt, beside full prefill; of anchor_cache nothing
is needed for that, so that other libraries' caches are judged by the same code."""

from __future__ import annotations

import copy

import torch
from blend_tasks import BlendPrompt
from evaluation_metrics import kl
from transformers import DynamicCache


def prefilled(model, prompt: BlendPrompt) -> DynamicCache:
    """Full prefill of all tokens but the last."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompt.ids[:-1]], device=model.device)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def distributions(model, cache, prompt: BlendPrompt) -> torch.Tensor:
    """Log-probabilities before each gold token and after the last ``[G + 1, vocabulary]``."""
    ids = torch.tensor([[prompt.ids[-1], *prompt.gold]], device=model.device)
    return model(ids, past_key_values=cache).logits[0].float().log_softmax(-1)


def greedy_line(model, tokenizer, cache, prompt: BlendPrompt, tokens: int) -> str:
    """Greedy decoding up to the end of the line, ``tokens`` at most."""
    last, said = prompt.ids[-1], []
    for _ in range(tokens):
        ids = torch.tensor([[last]], device=model.device)
        last = model(ids, past_key_values=cache).logits[0, -1].argmax().item()
        if last == tokenizer.eos_token_id or "\n" in tokenizer.decode([last]):
            break
        said.append(last)
    return tokenizer.decode(said, skip_special_tokens=True).strip()


def compare(model, tokenizer, cache, prompt: BlendPrompt, truth, answer_tokens: int):
    """What the model says over this cache, and how far that is from ``truth``.

    Args:
        truth: :func:`distributions` over full prefill's cache; None if ``cache`` is that cache.
        answer_tokens: how long a decoded answer may be; only prompts with answers decode one.

    Returns:
        The figures, and the distributions.
    """
    decoding = copy.deepcopy(cache) if prompt.answers else None
    own = distributions(model, cache, prompt)
    gold = torch.tensor(prompt.gold, device=own.device)
    follows = tokenizer.decode(own[-1].argmax().item())
    figures = dict(
        kl=kl(own if truth is None else truth, own)[:-1].tolist(),
        nll=-own[:-1].gather(1, gold[:, None]).mean().item(),
        # Greedy decoding gives these tokens exactly if each is the most likely one. A digit that
        # follows would make another number of them.
        right=bool((own[:-1].argmax(-1) == gold).all()) and not follows[:1].isdigit(),
    )
    if decoding is not None:
        figures["answer"] = greedy_line(model, tokenizer, decoding, prompt, answer_tokens)
    return figures, own
