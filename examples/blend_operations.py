"""Multiply-adds of a full prefill and of a blend: how much sooner a first token could come at best.

Counted are the linear maps and the attention scores and sums. A mixture of experts that keeps its
experts in one tensor is not seen as linear maps, so the count is for dense models.
"""

from __future__ import annotations

import dataclasses

import torch
from anchor_cache.patches.partial_forward import decoder_layers
from transformers import DynamicCache

from anchor_cache import BlendReport


class _Events(DynamicCache):
    """Marks in a list of events when a layer hands over its keys and values."""

    events: list

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.events.append(None)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """Multiply-adds of one decoder layer.

    Attributes:
        before: per token, the linear maps up to where keys and values are ready.
        after: per token, those that come after.
        pair: per query token and key that it sees, all heads.
        window: how many keys a token sees at most; None: all before it and itself.
    """

    before: int
    after: int
    pair: int
    window: int | None

    def pairs(self, positions: torch.Tensor) -> int:
        """How many keys the tokens at these positions see together."""
        seen = positions + 1
        return int((seen if self.window is None else seen.clamp(max=self.window)).sum())

    def whole(self, positions: torch.Tensor) -> int:
        """All of the layer, for the tokens at these positions ``[R]``."""
        return (self.before + self.after) * len(positions) + self.pair * self.pairs(positions)


@torch.no_grad()
def layer_work(model) -> list[LayerWork]:
    """The work of every layer, read off one forward of a single token."""
    cache, work = _Events(config=model.config), []
    text = model.config.get_text_config(decoder=True)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache.events, spans, hooks = [], [], []

    def note(module, args, output):
        cache.events.append(module.weight.numel())

    for layer in decoder_layers(model):
        hooks.append(layer.register_forward_pre_hook(lambda *_: spans.append(len(cache.events))))
        linear = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        hooks += [m.register_forward_hook(note) for m in linear]
    try:
        model(torch.tensor([[1]], device=model.device), past_key_values=cache)
    finally:
        for hook in hooks:
            hook.remove()
    sliding = [getattr(layer, "is_sliding", False) for layer in cache.layers]
    for start, end, slides in zip(spans, [*spans[1:], None], sliding, strict=True):
        events = cache.events[start:end]
        ready = events.index(None)
        work.append(
            LayerWork(
                before=sum(events[:ready]),
                after=sum(events[ready + 1 :]),
                pair=2 * text.num_attention_heads * head,
                window=text.sliding_window if slides else None,
            )
        )
    return work


def _vocabulary(model) -> int:
    """Multiply-adds of one token's logits."""
    return model.get_output_embeddings().weight.numel()


def prefill_operations(model, tokens: int) -> int:
    """Full prefill of ``tokens`` tokens and the logits of the last."""
    positions = torch.arange(tokens)
    return sum(work.whole(positions) for work in layer_work(model)) + _vocabulary(model)


def blend_operations(model, report: BlendReport, tokens: int) -> int:
    """A blend, and the logits of the prompt's last token over it.

    The question's run over the reused cache, which some selectors listen to, is counted; what an
    oracle looks up is not. A row that leaves the blend behind layer i needs layer i only up to its
    keys and values. Where layers recompute neither all reused tokens nor just those that are
    recomputed to the end, the rows are taken to lie at the mean position.

    Args:
        model: the model.
        report: of the blend.
        tokens: of the prompt, the last one included.

    Raises:
        ValueError: chunks were missing amid stored ones, so that the report does not say which
            tokens were fresh.
    """
    inexact = torch.arange(report.exact_prefix_tokens, report.segment_starts[-1])
    fresh = torch.arange(report.segment_starts[-1], tokens - 1)
    if report.reused_tokens == report.exact_prefix_tokens:
        inexact, fresh = inexact[:0], torch.arange(report.exact_prefix_tokens, tokens - 1)
    elif report.reused_tokens != report.segment_starts[-1]:
        raise ValueError("some chunks were missing: count a blend whose chunks are all stored")
    selected = torch.tensor(report.selected, dtype=torch.long)
    last, total = torch.tensor([tokens - 1]), _vocabulary(model)
    recomputed = [*report.recomputed_tokens, 0]
    listened = any(what == "listen" for what, *_ in report.trace)
    for i, work in enumerate(layer_work(model)):
        into, on = recomputed[i : i + 2]
        total += work.before * (into + len(fresh))
        if i < len(recomputed) - 2:
            total += work.after * (on + len(fresh)) + work.pair * work.pairs(fresh)
            if on == len(selected):
                total += work.pair * work.pairs(selected)
            elif len(inexact):
                total += work.pair * round(on * work.pairs(inexact) / len(inexact))
        total += work.whole(last)
        if listened:
            total += work.whole(fresh)
    return total
