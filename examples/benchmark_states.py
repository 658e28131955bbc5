"""Made keys, values and queries of one attention layer, and what attention must give for them.

Tokens come in runs of a topic; a query asks for one topic, another one at every step. So most of
the attention mass lies on a few of the tokens, as it does in trained models, and finding them
means something. Queries of consecutive steps have less in common than real ones, so that what a
step reads is rarely still in a processor's cache from the last one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_TOPICS, _RUN = 64, 32  # topics per key/value head, tokens of a run
_AT_ONCE = 16384


class Shape(NamedTuple):
    """Heads of a layer; by default Llama-3.1-8B's."""

    query_heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_heads * self.dim * dtype.itemsize


LLAMA_8B = Shape()


class Step(NamedTuple):
    """One decoding step: query ``[1, H, 1, D]``, new key and value ``[1, H_kv, 1, D]``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class LayerStates:
    """Keys and values ``[1, H_kv, length, D]``, and the steps that follow.

    Args:
        shape: heads.
        length: tokens that are there before the first step.
        dtype, device: of all of it.
        seed: the same seed gives the same numbers on every device.
    """

    def __init__(self, shape: Shape, length: int, dtype, device="cpu", seed: int = 0) -> None:
        self.shape, self.length, self.seed = shape, length, seed
        self.dtype, self.device = dtype, torch.device(device)
        self._topics = torch.randn((shape.kv_heads, _TOPICS, shape.dim), generator=self._at(0))
        size = (1, shape.kv_heads, length, shape.dim)
        self.keys, self.values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        generator = self._at(1)
        runs = torch.randint(
            _TOPICS, (shape.kv_heads, length // _RUN + 1), generator=generator
        ).repeat_interleave(_RUN, 1)
        for start in range(0, length, _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, length))
            topic = runs[:, part, None].expand(-1, -1, shape.dim)
            about = self._topics.gather(1, topic)
            noise, values = (torch.randn(about.shape, generator=generator) for _ in range(2))
            self.keys[0, :, part] = (0.7 * (about + noise)).to(dtype)
            self.values[0, :, part] = values.to(dtype)

    def _at(self, place: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 100_003 + place)

    def step(self, number: int) -> Step:
        """The step of this number, always the same."""
        heads, kv_heads, dim = self.shape
        generator = self._at(2 + number)
        topic = torch.randint(_TOPICS, (kv_heads,), generator=generator)
        about = self._topics[torch.arange(kv_heads), topic].repeat_interleave(heads // kv_heads, 0)
        query = 0.8 * about + 0.6 * torch.randn((heads, dim), generator=generator)
        new = torch.randn((2, kv_heads, dim), generator=generator)
        query, key, value = (
            x[None, :, None].to(self.device, self.dtype) for x in (query, new[0], new[1])
        )
        return Step(query, key, value)


def true_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token in fp32, written out.

    Args:
        query: ``[1, H, 1, D]``.
        keys, values: ``[1, H_kv, L, D]``.
        positions: the only tokens to read, ``[H_kv, S]``; None for all.

    Returns:
        ``[1, 1, H, D]``, as transformers' attention functions give it.
    """
    outputs = []
    groups = query[0, :, 0].float().chunk(keys.shape[1])
    for head, group in enumerate(groups):
        key, value = keys[0, head], values[0, head]
        if positions is not None:
            key, value = key[positions[head]], value[positions[head]]
        logits = group @ key.float().T * query.shape[-1] ** -0.5
        outputs.append(logits.softmax(-1) @ value.float())
    return torch.cat(outputs)[None, None]
