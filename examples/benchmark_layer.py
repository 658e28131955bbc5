"""The contestants of one attention layer's decoding step: our caches, transformers' and torch.

A step is what a layer of a model does with its cache: ``update`` with one token, then the
attention function that transformers would call; projections are left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmark_states import LayerStates, Shape, Step, true_attention
from benchmark_timing import Pace, alternate, require_close, spread
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anchor_cache import AnchorConfig, AnchorDynamicCache

DYNAMIC, STATIC = "DynamicCache", "StaticCache"
_SEEN = 64  # tokens whose queries are seen, for builders that learn from them


class _Attention(torch.nn.Module):
    """What attention functions ask of the module that calls them."""

    layer_idx, is_causal = 0, True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_key_value_groups = shape.query_heads // shape.kv_heads
        self.scaling = shape.dim**-0.5
        self.eval()

    def forward(self, query, keys, values, mask=None) -> torch.Tensor:
        # Looked up every time, as models do: it is routed while one of our caches lives.
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return attend(self, query, keys, values, mask, scaling=self.scaling, dropout=0.0)[0]


def cache_step(cache: Cache, shape: Shape, mask: torch.Tensor | None = None) -> Callable:
    """A layer's whole step with this cache. ``mask``: of a StaticCache, ``[1, 1, 1, room]``."""
    attention = _Attention(shape)

    def step(new: Step) -> torch.Tensor:
        if mask is not None:
            mask[..., cache.get_seq_length()] = True
        keys, values = cache.update(new.key, new.value, 0)
        return attention(new.query, keys, values, mask)

    return step


class DenseStep:
    """Torch's attention over keys and values in preallocated memory, nothing repeated or copied.

    Args:
        states: what is there.
        room: tokens that can be appended.
        packed: the query heads that share a key head become the rows of one head; False leaves
            the sharing to torch (``enable_gqa``).
    """

    def __init__(self, states: LayerStates, room: int, packed: bool) -> None:
        self.length, self.packed = states.length, packed
        batch, heads, length, dim = states.keys.shape
        self.keys, self.values = (
            torch.zeros(
                (batch, heads, length + room, dim), dtype=states.dtype, device=states.device
            )
            for _ in range(2)
        )
        self.keys[:, :, :length], self.values[:, :, :length] = states.keys, states.values

    def __call__(self, new: Step) -> torch.Tensor:
        end, attend = self.length + 1, torch.nn.functional.scaled_dot_product_attention
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = (
            new.key,
            new.value,
        )
        self.length = end
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        if not self.packed:
            return attend(new.query, keys, values, enable_gqa=True).transpose(1, 2)
        query = new.query.view(len(keys), keys.shape[1], -1, keys.shape[3])
        return attend(query, keys, values).reshape(new.query.shape).transpose(1, 2)


def first_truth(states: LayerStates, positions: torch.Tensor | None = None) -> torch.Tensor:
    """What the first step must give, ``[B, 1, H, D]``: attention to all tokens, or to those at
    ``positions`` ``[B, H_kv, S]``."""
    new = states.step(0)
    keys, values = torch.cat((states.keys, new.key), 2), torch.cat((states.values, new.value), 2)
    return true_attention(new.query, keys, values, positions)


def faster_dense(states: LayerStates, room: int, limit: float) -> tuple[DenseStep, dict]:
    """The faster of the two ways to share key heads, and the seconds of both."""
    steps = {"packed": True, "enable_gqa": False}
    steps = {name: DenseStep(states, 8, packed) for name, packed in steps.items()}
    truth = first_truth(states)
    for name, step in steps.items():
        require_close(name, step(states.step(0)), truth, limit)
    timed = alternate(
        {name: lambda turn, step=step: step(states.step(1)) for name, step in steps.items()},
        Pace(rounds=3, warm_up=1),
        states.device,
    )
    seconds = {name: spread(own)["median"] for name, own in timed.items()}
    best = min(seconds, key=seconds.get)
    del steps
    return DenseStep(states, room, best == "packed"), {"fastest": best, "seconds": seconds}


def anchor_cache(states: LayerStates, config: AnchorConfig) -> AnchorDynamicCache:
    """Our cache with these states, the queries of its first tokens seen: later ones would cost
    more than everything that is measured."""
    cache = AnchorDynamicCache(anchor_config=config)
    seen = min(_SEEN, states.length)
    queries = torch.cat([states.step(1_000_000 + i).query for i in range(seen)], 2)
    first = cache.update(states.keys[:, :, :seen], states.values[:, :, :seen], 0)
    causal = torch.ones((1, 1, seen, seen), dtype=torch.bool, device=states.device).tril()
    _Attention(states.shape)(queries, *first, causal)
    if seen < states.length:
        cache.update(states.keys[:, :, seen:], states.values[:, :, seen:], 0)
    return cache


def stock_step(kind: str, states: LayerStates, room: int) -> Callable:
    """The step of one of transformers' own caches."""
    if kind == DYNAMIC:
        cache, mask = DynamicCache(), None
    else:
        length = states.length + room
        config = PreTrainedConfig(
            num_hidden_layers=1,
            num_attention_heads=states.shape.query_heads,
            num_key_value_heads=states.shape.kv_heads,
            head_dim=states.shape.dim,
        )
        cache = StaticCache(config=config, max_cache_len=length)
        mask = torch.arange(length, device=states.device).expand(1, 1, 1, -1) < states.length
    cache.update(states.keys, states.values, 0)
    return cache_step(cache, states.shape, mask)
