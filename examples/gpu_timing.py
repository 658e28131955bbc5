"""Seconds that a device takes for work, without what the host takes to ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from benchmark_timing import spread, synchronize

_EMPTIED = 1 << 28  # more bytes than any last-level cache has
_GAP = 8  # replays between two waits


def captured(work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A CUDA graph of ``work``, which is run before so that its kernels are compiled, and the
    tensor that the graph writes."""
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(other)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return graph, output


def device_seconds(work: Callable[[], object], device: str, rounds: int) -> dict:
    """How long ``work`` takes by the device's clock, as :func:`spread` gives it.

    Before each round the device's cache is emptied: in a model, other layers come between two
    steps of one. On a CPU, by the host's clock.
    """
    if torch.device(device).type != "cuda":
        seconds = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return spread(seconds[1:])
    other = torch.empty(_EMPTIED, dtype=torch.uint8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds + 3)]
    for turn, (begin, end) in enumerate(pairs):
        other.zero_()
        begin.record()
        work()
        end.record()
        if turn % _GAP == 0:  # the host must be ahead, but not for seconds
            synchronize(device)
    synchronize(device)
    return spread([begin.elapsed_time(end) / 1e3 for begin, end in pairs[3:]])
