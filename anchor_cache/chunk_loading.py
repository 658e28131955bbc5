"""Reading a prompt's chunks layer by layer, ahead of the layers that compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .chunk import ChunkReader
from .patches.partial_forward import PartialForward
from .rope import LayerRotation

# A storage over a network answers several layers at once; on a local disk more than one thread only
# takes the processor from the layers that compute.
_REMOTE_THREADS = 4


class LayerLoader:
    """Threads that read the chunks' keys and values of every layer, first layers first, and rotate
    them to their positions. On an accelerator they copy in a stream of their own.

    Args:
        forward: of the prompt; tells the rotary tables.
        chunks: where each begins, and what it is. One that stands there twice is read once.
        rotations: of the model's layers.
        device: where keys and values are wanted.
        is_local: whether the chunks are on a local disk.
    """

    def __init__(
        self,
        forward: PartialForward,
        chunks: Sequence[tuple[int, ChunkReader]],
        rotations: Sequence[LayerRotation],
        device: torch.device,
        is_local: bool,
    ) -> None:
        self.trace: list[tuple[str, int, float, float]] = []
        self._forward, self._chunks, self._rotations = forward, chunks, rotations
        self._stream = _SideStream(device)
        self._pool = ThreadPoolExecutor(
            1 if is_local else _REMOTE_THREADS, thread_name_prefix="anchor-cache-loader"
        )
        layers = range(forward.layers if chunks else 0)
        self._layers = [self._pool.submit(self._load, layer) for layer in layers]

    def take(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the layer ``[1, H_kv, T, D]``, zeros where nothing is reused, as soon
        as they are there; None without chunks.

        Raises:
            DamagedChunk: a chunk cannot be read after all.
        """
        if not self._layers:
            return None
        return self._stream.join(*self._layers[layer].result())

    def seconds_per_layer(self) -> float:
        """How long a layer takes to be read, by the first two."""
        loads = sorted(entry for entry in self.trace if entry[0] == "load")[:2]
        if not loads:
            return 0.0
        spans = [(start, end) for _, _, start, end in loads]
        return (max(e for _, e in spans) - min(s for s, _ in spans)) / len(spans)

    def close(self) -> None:
        """Stop reading. Waits for the reads that are under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @torch.no_grad()
    def _load(self, layer: int):
        started = time.perf_counter()
        states_and_event = self._stream.run(lambda: self._placed(layer))
        self.trace.append(("load", layer, started, time.perf_counter()))
        return states_and_event

    def _placed(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = None
        cos, sin = self._forward.rotary_tables(layer)
        read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for start, chunk in self._chunks:
            if id(chunk) not in read:
                read[id(chunk)] = chunk.layer(layer)
            own = read[id(chunk)]
            if held is None:
                held = self._empty(own[0]), self._empty(own[1])
            self._rotations[layer].place(held, own, cos, sin, start)
        return held

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros((*states.shape[:2], self._forward.tokens, states.shape[3]))


class _SideStream:
    """A stream of the loader's own, on devices that have streams, so that copies to the device go
    on while layers compute."""

    def __init__(self, device: torch.device) -> None:
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device, self._module = device, module if hasattr(module, "Stream") else None
        if self._module is not None:
            self._stream = self._module.Stream(device)
            # The rotary tables were made in the other one.
            self._stream.wait_stream(self._module.current_stream(device))

    def run(self, make: Callable):
        """What ``make`` returns, and the event that marks its end."""
        if self._module is None:
            return make(), None
        with self._module.stream(self._stream):
            return make(), self._stream.record_event()

    def join(self, states: tuple[torch.Tensor, ...], event) -> tuple[torch.Tensor, ...]:
        """The states, for use in the stream that computes."""
        if event is not None:
            stream = self._module.current_stream(self._device)
            stream.wait_event(event)
            for tensor in states:
                tensor.record_stream(stream)
        return states
