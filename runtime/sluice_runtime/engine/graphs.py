"""Decode steps on CUDA, captured once for each size of a batch and replayed: a step of single tokens launches
hundreds of small kernels, which take the CPU longer to start than the device to run.

    chunks ──▶ one packed int32 copy, pinned ──▶ static inputs of the next larger size ──▶ replay ──▶ logits

    [ token … | position … | slot … | context … | table …, table …, … ]      rows × (4 + width)

Invariant: nothing that changes from step to step is a Python number inside a capture, and every value of the
inputs is written anew for each step, so no length or block of an earlier step is ever read (transformers
45323). Rows beyond the requests compute token 0 at position 0 in a spare block, which belongs to nobody.

The buffers and sizes are tested on a CPU, with a capture that calls the function again: that shows the
bookkeeping right and says nothing of CUDA. `CudaCapture` is not yet run on CUDA.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sluice_runtime.engine.plan import ScheduledChunk

_NUM_COLUMNS = 4
_WARM_UPS = 2


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Numbers of rows that are captured: 1, 2, 4, 8, then steps of 8 to 64 and of 32 beyond, and `most`.

    Padding is under half of the rows, and under a quarter from 32 rows on.
    """
    steps = [1, 2, 4, *range(8, 65, 8), *range(96, most, 32)]
    return (*(size for size in steps if size < most), most)


def size_for(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest of `sizes` (ascending) that holds `num_rows`; None if none does."""
    at = bisect.bisect_left(sizes, num_rows)
    return sizes[at] if at < len(sizes) else None


def is_decode(chunks: Sequence[ScheduledChunk]) -> bool:
    """Whether a step computes one token for each of its requests, and samples after each."""
    return bool(chunks) and all(len(c.token_ids) == 1 and c.samples for c in chunks)


@dataclass(frozen=True)
class Layout:
    """Where a step's values lie. `width`: blocks of the longest context; `spare`: the block that padding
    writes to."""

    block_size: int
    width: int
    spare: int

    def num_values(self, num_rows: int) -> int:
        return num_rows * (_NUM_COLUMNS + self.width)

    def write(self, out: np.ndarray[Any, np.dtype[np.int32]], chunks: Sequence[ScheduledChunk]) -> None:
        """Fill all of `out`, int32 of `num_values(rows)`, with `chunks` (at most `rows`) and padding."""
        num_rows = len(out) // (_NUM_COLUMNS + self.width)
        columns = out[: num_rows * _NUM_COLUMNS].reshape(_NUM_COLUMNS, num_rows)
        tables = out[num_rows * _NUM_COLUMNS :].reshape(num_rows, self.width)
        columns[:, len(chunks) :] = np.array([[0], [0], [self.spare * self.block_size], [1]])
        tables.fill(self.spare)
        for row, chunk in enumerate(chunks):
            at, table = chunk.start, chunk.block_table
            slot = table[at // self.block_size] * self.block_size + at % self.block_size
            columns[:, row] = chunk.token_ids[0], at, slot, at + 1
            # What lies behind the context is never read, and may be more than the table's width.
            used = at // self.block_size + 1
            tables[row, :used] = table[:used]


class Inputs:
    """The static inputs of one size. The tensors are views of one: `token_ids`, `positions`, `slots`,
    `context_lens` [rows], `block_tables` [rows, width], and `query_starts` [rows + 1], all int32."""

    def __init__(self, layout: Layout, num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self._layout = layout
        self._packed = torch.zeros(layout.num_values(num_rows), dtype=torch.int32, device=device)
        columns = self._packed[: num_rows * _NUM_COLUMNS].view(_NUM_COLUMNS, num_rows)
        self.token_ids, self.positions, self.slots, self.context_lens = columns.unbind()
        self.block_tables = self._packed[num_rows * _NUM_COLUMNS :].view(num_rows, layout.width)
        self.query_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.write(())

    def write(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Bring a step's values to the device, in the stream's order and without waiting for it."""
        # Pinned memory from torch's own cache, which gives none out again before its copy is done.
        host = torch.empty(
            self._packed.shape, dtype=torch.int32, pin_memory=self._packed.device.type == "cuda"
        )
        self._layout.write(host.numpy(), chunks)
        self._packed.copy_(host, non_blocking=True)


class Capture(Protocol):
    """Runs a function of static inputs once and gives what repeats it, into the same output."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]: ...


class CudaCapture:
    """CUDA graphs that share one pool of memory: only one is replayed at a time, and its output is read
    before the next. Not yet run on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        # Streams are of the current device, and what runs on another would not be captured.
        with torch.cuda.device(self._device):
            return self._capture(compute)

    def _capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        # What libraries set up at first use may not happen during a capture.
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute()
        self._pool = graph.pool()
        return graph.replay, output


class DecodeGraphs:
    """One captured step for each size, all captured at once, when the engine starts."""

    def __init__(
        self,
        compute: Callable[[Inputs], Tensor],
        layout: Layout,
        sizes: Sequence[int],
        device: torch.device,
        capture: Capture,
    ) -> None:
        """`compute` gives logits [rows, vocabulary] and may neither wait for the device nor look at its
        values. `sizes` ascend."""
        self._sizes = tuple(sizes)
        self._steps: dict[int, tuple[Inputs, Callable[[], object], Tensor]] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            inputs = Inputs(layout, size, device)
            replay, logits = capture(lambda inputs=inputs: compute(inputs))  # type: ignore[misc]
            self._steps[size] = inputs, replay, logits

    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor | None:
        """Logits [chunks, vocabulary], good until the next run; None for what was not captured."""
        size = size_for(self._sizes, len(chunks)) if is_decode(chunks) else None
        if size is None:
            return None
        inputs, replay, logits = self._steps[size]
        inputs.write(chunks)
        replay()
        return logits[: len(chunks)]
