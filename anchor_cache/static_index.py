"""An index of fixed capacity, whose blocks are written in place."""

from __future__ import annotations

import torch

from .anchor_config import AnchorConfig
from .anchor_index import AnchorIndex
from .block_storage import GrowingStates
from .block_summary import summarise_blocks

# An index is built in so many pieces: what is computed meanwhile is larger than the keys.
_PIECES = 8


class StaticAnchorIndex(AnchorIndex):
    """Anchors, offsets and sketches for every block slot of a cache of fixed capacity.

    Which of them stand for complete blocks is the reader's to know. Queries come with the softmax
    scale applied.

    Args:
        config: block size, builder, number formats.
        keys: the cache's buffer, ``[B, H_kv, capacity, D]``.
    """

    def __init__(self, config: AnchorConfig, keys: torch.Tensor) -> None:
        super().__init__(config, None, (0,), 1.0)
        self.padded = True
        size = config.block_size
        self.blocks = keys.shape[2] // size
        empty = keys.new_zeros((*keys.shape[:2], 1, size, keys.shape[3]))
        one = summarise_blocks(empty, None, config)
        self.per_block = one.anchors.shape[2]
        for states, like in self._stored(one):
            shape = (*like.shape[:2], self.blocks * like.shape[2], like.shape[3])
            states._buffer, states.length = like.new_zeros(shape), shape[2]
        if config.refine == "sketch":
            # Makes the tables that sketches are read by now: what is made while a CUDA graph is
            # recorded lies in that graph's memory.
            query, centres = empty[:, :, 0, 0], one.centres.new_zeros((*keys.shape[:2], 1, 1))
            self.score_sketches(query, slice(0, 1), centres, config.read_tokens)

    def _stored(self, summary) -> list[tuple[GrowingStates, torch.Tensor]]:
        stored = (*self._per_anchor, self._bits, self._sketch_scales)
        return [
            (states, new)
            for states, new in zip(stored, summary[:-1], strict=True)
            if new is not None
        ]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What is written in place, ``[B, H_kv, blocks or anchors, X]`` each."""
        every = (*self._per_anchor, *self._per_block)
        return [states._buffer for states in every if not states.is_empty]

    def build(self, keys: torch.Tensor, shifts: torch.Tensor, visible: torch.Tensor) -> None:
        """Summarise the blocks of all slots.

        Args:
            keys: ``[B, H_kv, capacity, D]``.
            shifts: where slot 0 of each row starts, ``[B]``.
            visible: ``[B, capacity]``, False for padding and for what is not filled yet.
        """
        step = -(-self.blocks // _PIECES)
        for start in range(0, self.blocks, step):
            stop = min(start + step, self.blocks)
            slots = torch.arange(start, stop, device=keys.device)
            summary = self._summary(keys, shifts, visible, slots.expand(len(shifts), -1))
            for states, new in self._stored(summary):
                rows = new.shape[2] // (stop - start)
                states._buffer[:, :, start * rows : stop * rows] = new

    def rebuild(
        self, keys: torch.Tensor, shifts: torch.Tensor, visible: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Summarise the block of one slot per row anew, ``[B]``; otherwise as :meth:`build`."""
        summary = self._summary(keys, shifts, visible, slots.unsqueeze(1))
        for states, new in self._stored(summary):
            rows = new.shape[2]
            place = slots[:, None] * rows + torch.arange(rows, device=slots.device)
            states._buffer.scatter_(2, place[:, None, :, None].expand_as(new), new)

    def _summary(self, keys, shifts, visible, slots):
        size = self.config.block_size
        tokens = shifts[:, None, None] + slots.unsqueeze(-1) * size
        tokens = (tokens + torch.arange(size, device=keys.device)).flatten(1)
        tokens = tokens.clamp(max=keys.shape[2] - 1)
        index = tokens[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        blocks = keys.gather(2, index).unflatten(2, (-1, size))
        valid = visible.gather(1, tokens).unflatten(1, (-1, size)).unsqueeze(1)
        return summarise_blocks(blocks, valid, self.config)
