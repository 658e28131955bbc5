"""One layer's decoding step on a device: its bare operations, and the whole step of a cache.

The bare operations are what an AnchorLayer does with a query: it scores anchors, chooses pieces and
attends to them. They and torch's attention are captured in CUDA graphs, so that the host does not
count, and timed with the device's cache emptied before each round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from anchor_cache.kernels import ops, reference_attention
from anchor_cache.patches.readings import BlockReading
from benchmark_attention import DENSE, LIMITS, measure_attention
from benchmark_layer import DYNAMIC, STATIC, anchor_cache
from benchmark_machine import copy_bandwidth
from benchmark_states import LayerStates, true_attention
from benchmark_timing import WrongResult, require_close, require_that
from gpu_notes import Incomplete, Notes
from gpu_sizes import Sizes
from gpu_timing import captured, device_seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

from anchor_cache import AnchorConfig
from anchor_cache.block_choice import CachedTokens
from anchor_cache.retrieval_report import LayerRecord
from anchor_cache.selection import plan_step

OURS = "AnchorDynamicCache"
# Select at every length: what is of interest is the kernels, not when they pay.
_ALWAYS = dict(dense_below=0, dense_above=1.0)
# How much of their choice two implementations must share; pieces of next to equal mass may differ.
_SAME_CHOICE = 0.95
_BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class BareStep:
    """The operations of a sparse step of a cache that is filled with ``states``."""

    def __init__(self, states: LayerStates, config: AnchorConfig) -> None:
        self.states, self.query = states, states.step(0).query
        self.layer = anchor_cache(states, config).layers[0]
        self.scaling = self.query.shape[-1] ** -0.5
        self.tokens = CachedTokens(
            self.query[:, :, 0], self.layer._keys, self.layer._values, None, self.scaling, None
        )
        self.plan = plan_step(config, states.length, (0,), self.query.device)
        require_that(self.plan.dense_reason is None, f"a dense step: {self.plan.dense_reason}")

    def choose(self) -> BlockReading:
        reader = self.layer.reader
        return reader.read(self.tokens, self.plan, None, LayerRecord(), is_first_call=True)

    def _blocks(self, reading: BlockReading) -> tuple:
        states = (self.query[:, :, 0], reading.keys, reading.values)
        return *states, reading.blocks, reading.block_size, self.scaling

    def __call__(self) -> torch.Tensor:
        """``[B, 1, H, D]``."""
        return ops.attend_blocks(*self._blocks(self.choose()))[0].unsqueeze(1)

    def check(self) -> dict:
        """Beside the PyTorch specification: which pieces are chosen, and attention over them.

        Raises:
            WrongResult: another choice, or another output, or on a GPU no kernel ran.
        """
        reading, output = self.choose(), self()
        with ops.use_implementation("reference"):
            expected = self.choose().blocks
        same = (reading.blocks[..., :, None] == expected[..., None, :]).any(-1).float().mean()
        require_that(same >= _SAME_CHOICE, f"{same:.1%} of the specification's choice")
        blocks = self._blocks(reading)
        query, keys, values, *rest = blocks
        true = reference_attention.attend_blocks(query.float(), keys, values, *rest)[0]
        off = require_close(OURS, output, true.unsqueeze(1), LIMITS[query.dtype])
        why = ops.attend_blocks.explain(*blocks)
        require_that(query.device.type != "cuda" or why["triton"] is None, f"no kernel: {why}")
        return dict(off=off, same_choice=same.item(), why_not=why)

    def bytes_to_read(self) -> int:
        """The candidates' anchors, the proposals' sketches, and the chosen tokens."""
        index, plan = self.layer.index, self.plan
        candidates = plan.last_block - plan.first_block
        anchors = sum(part.nbytes for part in index._per_anchor) * candidates
        proposals = candidates if plan.proposes_all else plan.proposals
        sketches = (index._bits.nbytes + index._sketch_scales.nbytes) * proposals
        token = self.states.shape.token_bytes(self.states.dtype) * self.states.batch
        return (anchors + sketches) // index.blocks + int(max(plan.attended)) * token


def dense_ways(states: LayerStates) -> dict[str, Callable[[], torch.Tensor]]:
    """Torch's attention over everything, by how key heads are shared and which backend computes."""
    query, keys, values = states.step(0).query, states.keys, states.values
    attend = torch.nn.functional.scaled_dot_product_attention

    def packed() -> torch.Tensor:
        rows = query.reshape(len(keys), keys.shape[1], -1, keys.shape[3])
        return attend(rows, keys, values).reshape(query.shape).transpose(1, 2)

    def grouped() -> torch.Tensor:
        return attend(query, keys, values, enable_gqa=True).transpose(1, 2)

    def by(backend, way):
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return way()

    return {
        f"sdpa, {sharing}, {name}": lambda backend=backend, way=way: by(backend, way)
        for sharing, way in (("packed", packed), ("enable_gqa", grouped))
        for name, backend in _BACKENDS.items()
    }


def _timed(work: Callable[[], torch.Tensor], check, sizes: Sizes) -> dict:
    """Seconds of ``work``, captured if there is a GPU; ``check`` sees what was captured, too."""
    check(work())
    if sizes.device != "cuda":
        return device_seconds(work, sizes.device, sizes.rounds)
    eager = device_seconds(work, sizes.device, sizes.rounds)
    try:
        graph, output = captured(work)
    except RuntimeError as error:
        return dict(eager, not_captured=str(error)[:1000])
    output.zero_()
    graph.replay()
    check(output)
    return dict(
        device_seconds(graph.replay, sizes.device, sizes.rounds), not_replayed=eager["median"]
    )


@torch.no_grad()
def measure_bare(batch: int, length: int, sizes: Sizes, bandwidth: float) -> dict:
    """Seconds of the bare operations beside torch's attention, and of the copied bandwidth that
    each reaches with the bytes that it has to read.

    Raises:
        WrongResult: ours is wrong.
        Incomplete: another is, or ours cannot be captured.
    """
    there = sizes.device == "cuda"
    states = LayerStates(
        sizes.shape, length, sizes.dtype, sizes.device, batch=batch, made_there=there
    )
    config = AnchorConfig(budget=sizes.budget, **_ALWAYS)
    limit, step = LIMITS[sizes.dtype], BareStep(states, config)
    about = step.check()
    expected, whole = step(), states.keys.nbytes + states.values.nbytes
    rows, absent, wrong = {}, {}, []

    def same(output: torch.Tensor) -> None:
        require_close(OURS, output, expected, limit)

    rows[OURS] = dict(_timed(step, same, sizes), bytes=step.bytes_to_read(), **about)
    truth = true_attention(states.step(0).query, states.keys, states.values)
    for name, work in dense_ways(states).items():

        def right(output: torch.Tensor, name: str = name) -> None:
            require_close(name, output, truth, limit)

        try:
            rows[name] = dict(_timed(work, right, sizes), bytes=whole)
        except WrongResult as error:
            wrong.append(str(error))
        except RuntimeError as error:  # a backend that does not take this call
            absent[name] = str(error).split("\n")[0][:200]
    others = [(row["median"], name) for name, row in rows.items() if name != OURS]
    seconds, dense = min(others, default=(float("nan"), None))
    for row in rows.values():
        row["bytes_per_second"] = row["bytes"] / row["median"]
        row["of_copy"] = row["bytes_per_second"] / bandwidth
    result = dict(batch=batch, tokens=length, dense=dense, absent=absent, wrong=wrong)
    result |= dict(speed=seconds / rows[OURS]["median"], contestants=rows)
    if "not_captured" in rows[OURS]:
        wrong.append(f"not captured: {rows[OURS]['not_captured']}")
    if wrong or dense is None:
        raise Incomplete("; ".join(wrong) or f"no dense attention: {absent}", result)
    return result


def measure_step(batch: int, length: int, sizes: Sizes, bandwidth: float) -> dict:
    """The whole step, update and attention function included, by the host's clock."""
    return measure_attention(
        length,
        sizes.dtype,
        sizes.device,
        sizes.budget,
        sizes.shape,
        sizes.step,
        bandwidth,
        {OURS: _ALWAYS},
        (DENSE, DYNAMIC, STATIC),
        batch=batch,
        made_there=sizes.device == "cuda",
    )


def run(notes: Notes, sizes: Sizes) -> None:
    """Both, at every size."""
    bandwidth = copy_bandwidth(sizes.device, sizes.copied_bytes)
    for measure, name in ((measure_bare, "operations"), (measure_step, "whole step")):
        for batch, length in sizes.attention:

            def work(measure=measure, batch=batch, length=length) -> dict:
                return measure(batch, length, sizes, bandwidth)

            notes.attempt(f"{name}, {batch} x {length}", work, sizes.measuring)
