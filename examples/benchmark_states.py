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
    """One decoding step: query ``[B, H, 1, D]``, new key and value ``[B, H_kv, 1, D]``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class LayerStates:
    """Keys and values ``[B, H_kv, length, D]``, and the steps that follow.

    Args:
        shape: heads.
        length: tokens that are there before the first step.
        dtype, device: of all of it.
        seed: the same seed gives the same numbers on every device that they are not made on.
        batch: rows.
        made_there: make the numbers on the device, which saves a GPU minutes of waiting.
    """

    def __init__(
        self,
        shape: Shape,
        length: int,
        dtype,
        device="cpu",
        seed: int = 0,
        batch: int = 1,
        made_there: bool = False,
    ) -> None:
        self.shape, self.length, self.seed, self.batch = shape, length, seed, batch
        self.dtype, self.device = dtype, torch.device(device)
        self._maker = self.device if made_there else torch.device("cpu")
        self._topics = self._normal(self._at(0), shape.kv_heads, _TOPICS, shape.dim)
        size = (batch, shape.kv_heads, length, shape.dim)
        self.keys, self.values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        generator = self._at(1)
        runs = self._any_topic(generator, batch, shape.kv_heads, length // _RUN + 1)
        runs = runs.repeat_interleave(_RUN, 2)
        for start in range(0, length, _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, length))
            topic = runs[:, :, part, None].expand(-1, -1, -1, shape.dim)
            about = self._topics.expand(batch, -1, -1, -1).gather(2, topic)
            noise, values = (self._normal(generator, *about.shape) for _ in range(2))
            self.keys[:, :, part] = (0.7 * (about + noise)).to(dtype)
            self.values[:, :, part] = values.to(dtype)

    def _at(self, place: int) -> torch.Generator:
        return torch.Generator(self._maker).manual_seed(self.seed * 100_003 + place)

    def _normal(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=self._maker)

    def _any_topic(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randint(_TOPICS, shape, generator=generator, device=self._maker)

    def step(self, number: int) -> Step:
        """The step of this number, always the same."""
        heads, kv_heads, dim = self.shape
        generator = self._at(2 + number)
        topic = self._any_topic(generator, self.batch, kv_heads)
        head = torch.arange(kv_heads, device=self._maker)
        about = self._topics[head, topic].repeat_interleave(heads // kv_heads, 1)
        query = 0.8 * about + 0.6 * self._normal(generator, self.batch, heads, dim)
        new = self._normal(generator, 2, self.batch, kv_heads, dim)
        query, key, value = (
            x[:, :, None].to(self.device, self.dtype) for x in (query, new[0], new[1])
        )
        return Step(query, key, value)


def true_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token per row in fp32, written out.

    Args:
        query: ``[B, H, 1, D]``.
        keys, values: ``[B, H_kv, L, D]``.
        positions: the only tokens to read, ``[B, H_kv, S]``; None for all.

    Returns:
        ``[B, 1, H, D]``, as transformers' attention functions give it.
    """
    rows = []
    for row in range(len(query)):
        outputs = []
        for head, group in enumerate(query[row, :, 0].float().chunk(keys.shape[1])):
            key, value = keys[row, head], values[row, head]
            if positions is not None:
                key, value = key[positions[row, head]], value[positions[row, head]]
            logits = group @ key.float().T * query.shape[-1] ** -0.5
            outputs.append(logits.softmax(-1) @ value.float())
        rows.append(torch.cat(outputs))
    return torch.stack(rows)[:, None]
