"""An anchor builder of one's own, at work on a real model.

python examples/custom_builder.py
"""

import torch
from demo import greedy, long_document
from small_model import load

from anchor_cache import AnchorBuilder, AnchorDynamicCache


class Loudest(AnchorBuilder):
    """The key with the largest norm stands for its block."""

    query_dependent = False

    def weights(self, keys, perspectives, valid):
        norms = keys.float().norm(dim=-1)  # [B, H_kv, N, n]
        if valid is not None:
            norms = norms * valid  # padding weighs nothing
        loudest = (norms == norms.amax(-1, keepdim=True)) & (norms > 0)
        return loudest.unsqueeze(3) / loudest.sum(-1)[..., None, None].clamp(min=1)


if __name__ == "__main__":
    model, tokenizer = load()
    ids, _ = long_document(model, tokenizer, tokens=2500, depth=0.25)
    settings = dict(budget=0.1, sink_size=16, window_size=128, dense_below=0, audit_every=4)
    with torch.no_grad():
        for builder in (Loudest(), "mean"):
            cache = AnchorDynamicCache(model.config, builder=builder, **settings)
            name = builder if isinstance(builder, str) else type(builder).__name__
            print(f"\n{name}: {greedy(model, tokenizer, ids, cache, 16)}\n{cache.report()}")
