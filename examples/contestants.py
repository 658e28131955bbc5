"""The contestants of evaluate_selection.py: settings of AnchorConfig by name, two anchor builders
of one's own among them. ``evict`` instead means StreamingLLM: all but the ends is thrown away."""

from __future__ import annotations

import torch

from anchor_cache import AnchorBuilder
from anchor_cache.anchors import MinMax, Representative, Tangent


class Bracket(AnchorBuilder):
    """A point between the tangents' lower bound and Quest's upper bound of the log mass.

    Args:
        lower: share of the lower bound.
    """

    bounds_from_below = False

    def __init__(self, lower: float) -> None:
        self.lower, self.tangent, self.box = lower, Tangent(), MinMax()

    def weights(self, keys, perspectives, valid):
        raise NotImplementedError("a bracket is not a weighting of the block's tokens")

    def summarise(self, keys, perspectives, valid):
        lower, lower_offset = self.tangent.summarise(keys, perspectives, valid)
        upper, upper_offset = self.box.summarise(keys, perspectives, valid)
        upper = upper.expand(*lower.shape[:4], -1)
        offsets = self.lower * lower_offset + (1 - self.lower) * upper_offset
        return torch.cat((lower, upper), -1), offsets

    def lift(self, query):
        return torch.cat((self.lower * query, (1 - self.lower) * self.box.lift(query)), -1)


class Random(AnchorBuilder):
    """Blocks drawn by chance, once for all steps: what any choice must beat."""

    query_dependent = False
    bounds_from_below = False

    def weights(self, keys, perspectives, valid):
        raise NotImplementedError("a drawn block has no anchor")

    def summarise(self, keys, perspectives, valid):
        shape = (*keys.shape[:3], 1)
        generator = torch.Generator().manual_seed(int(keys.float().abs().sum()))
        offsets = torch.rand(shape, generator=generator).to(keys.device)
        return torch.zeros(*shape, keys.shape[-1], device=keys.device), offsets


_EVERY = 10**6  # blocks proposed per block read: more than there are
_ALONE = dict(refine=None, anchor_dtype=None)

QUEST = dict(builder="minmax", **_ALONE)
# The true mass of the pieces that are read, 2 tokens each: no index can choose better.
ORACLE = dict(refine="exact", refine_factor=_EVERY)
_BLOCK_ORACLE = dict(refine="exact", refine_factor=_EVERY, read_size=16)
_KTRANSFORMERS = dict(builder="representative", **_ALONE)

CONTESTANTS = {
    "main": {
        "everything (control)": dict(budget=1.0),
        "default": dict(),
        "default, 1 bit per channel": dict(sketch_bits=1),
        "minmax (Quest)": QUEST,
        "minmax, blocks of 8": dict(QUEST, block_size=8),
        "representative (KTransformers)": _KTRANSFORMERS,
        "sinks and newest (StreamingLLM)": dict(evict=True),
        "random blocks": dict(builder=Random(), **_ALONE),
        "true mass of blocks (oracle)": _BLOCK_ORACLE,
    },
    "builders": {
        "everything (control)": dict(budget=1.0),
        "true mass of blocks (oracle)": _BLOCK_ORACLE,
        "minmax (Quest)": QUEST,
        "mean": dict(builder="mean", **_ALONE),
        "mean n=8": dict(builder="mean", block_size=8, **_ALONE),
        "representative (KTransformers)": _KTRANSFORMERS,
        "representative of 4 (InfLLM)": dict(builder=Representative(tokens=4), **_ALONE),
        "tangent, 1 per query head": dict(builder="tangent", **_ALONE),
        "tangent, 1 per query head, n=64": dict(builder="tangent", block_size=64, **_ALONE),
        "tangent, 1 per kv head": dict(builder="tangent", anchor_heads="key_value", **_ALONE),
        "tangent, 4 per kv head": dict(
            builder="tangent", anchor_heads="key_value", anchors_per_head=4, **_ALONE
        ),
        "bracket .5": dict(builder=Bracket(0.5), anchor_heads="key_value", **_ALONE),
        "bracket .8": dict(builder=Bracket(0.8), anchor_heads="key_value", **_ALONE),
    },
    "index sizes": {
        "default": dict(),
        "true mass of blocks (oracle)": _BLOCK_ORACLE,
        # An index 5, 21 and 128 times as small as the keys, with three query heads to a key head.
        "tangent, 1 per query head": dict(builder="tangent", **_ALONE),
        "tangent, 1 per query head, n=64": dict(builder="tangent", block_size=64, **_ALONE),
        "tangent, 1 per query head, n=384": dict(
            builder="tangent", block_size=384, window_size=384, **_ALONE
        ),
    },
    "refinement": {
        "default": dict(),
        "whole blocks": dict(read_size=16),
        "whole blocks, 1 bit": dict(read_size=16, sketch_bits=1),
        "whole blocks of 32": dict(block_size=32, read_size=32),
        "whole blocks, minmax": dict(builder="minmax", read_size=16, anchor_dtype=None),
        "pieces of 8": dict(read_size=8),
        "pieces of 4": dict(read_size=4),
        "pieces of 1": dict(read_size=1),
        "anchors not in int8": dict(anchor_dtype=None),
        "1 bit": dict(sketch_bits=1),
        "blocks of 32": dict(block_size=32),
        "blocks of 64": dict(block_size=64),
        "true mass of pieces of 2": ORACLE,
    },
    "selection": {
        "one per query head": dict(selection_heads="query"),
        "one per layer": dict(selection_heads="layer"),
        "skipped means": dict(skipped="mean"),
        "first two layers dense": dict(per_layer={i: {"budget": 1.0} for i in (0, 1)}),
        "every 2nd step": dict(reselect_every=2),
        "every 4th step": dict(reselect_every=4),
        "coverage .99": dict(coverage=0.99),
        "coverage .95": dict(coverage=0.95),
        "coverage .9": dict(coverage=0.9),
        "tolerance .2": dict(tolerance=0.2),
    },
}
