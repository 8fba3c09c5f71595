"""llama.cpp through `llama-cpp-python`'s low-level binding: many sequences in a batch, as its own batched
benchmark does it. Flash attention and threads as it chooses them, but for the number of the latter.

The binding has no scheduler, so requests that arrive over time are not for it. Its option is the GGUF file,
made by to_gguf.py from what the other contestants' model was made from.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as c
from benches.engine.work import MAX_SEQS, MAX_TOKENS, Job, Outcome
from benches.peers.serve import Measure, serve

_BATCH = 2048
_WARM = MAX_SEQS  # the sequence that holds a shared prefix
# The library calls it for as long as it runs.
_QUIET = c.llama_log_callback(lambda *_: None)


class _Llama:
    """A model, and KV for `MAX_SEQS` sequences and a prefix."""

    def __init__(self, path: Path) -> None:
        c.llama_backend_init()
        self._model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{path} can't be loaded")
        params = c.llama_context_default_params()
        params.n_seq_max = MAX_SEQS + 1
        params.n_ctx = params.n_seq_max * MAX_TOKENS
        params.n_batch = _BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = c.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("no context can be made")
        self._memory = c.llama_get_memory(self._context)
        self._batch = c.llama_batch_init(_BATCH, 0, 1)
        self._greedy = c.llama_sampler_init_greedy()

    def clear(self) -> None:
        c.llama_memory_clear(self._memory, True)

    def share(self, seq: int) -> None:
        """Give a sequence the prefix's KV."""
        c.llama_memory_seq_cp(self._memory, _WARM, seq, -1, -1)

    def compute(self, tokens: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Each (token, position, sequence, whether to sample after it); the new tokens by sequence."""
        sampled: dict[int, int] = {}
        for first in range(0, len(tokens), _BATCH):
            part = tokens[first : first + _BATCH]
            self._fill(part)
            code = c.llama_decode(self._context, self._batch)
            if code:
                raise RuntimeError(f"llama_decode: {code}")
            for row, (_, _, seq, samples) in enumerate(part):
                if samples:
                    sampled[seq] = c.llama_sampler_sample(self._greedy, self._context, row)
        return sampled

    def _fill(self, part: Sequence[tuple[int, int, int, bool]]) -> None:
        batch: Any = self._batch
        batch.n_tokens = len(part)
        for row, (token, position, seq, samples) in enumerate(part):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, samples
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, seq


def start(_path: Path, gguf: str) -> tuple[Measure, dict[str, object]]:
    c.llama_log_set(_QUIET, ctypes.c_void_p(0))
    llama = _Llama(Path(gguf))

    def measure(job: Job) -> Outcome:
        if not job.at_once:
            raise NotImplementedError("llama-cpp-python takes no requests while it runs")
        llama.clear()
        shared, requests = len(job.warm), job.requests
        llama.compute([(token, i, _WARM, False) for i, token in enumerate(job.warm)])
        began = time.perf_counter()
        for seq in range(len(requests) if shared else 0):
            llama.share(seq)
        last = llama.compute(
            [
                (token, i, seq, i == len(request.prompt) - 1)
                for seq, request in enumerate(requests)
                for i, token in enumerate(request.prompt)
                if i >= shared
            ]
        )
        times = [[time.perf_counter() - began] for _ in requests]
        lens = [len(request.prompt) for request in requests]
        for step in range(1, max(request.num_out for request in requests)):
            going = [seq for seq, request in enumerate(requests) if step < request.num_out]
            last |= llama.compute([(last[seq], lens[seq] + step - 1, seq, True) for seq in going])
            now = time.perf_counter() - began
            for seq in going:
                times[seq].append(now)
        return Outcome(time.perf_counter() - began, tuple(map(tuple, times)))

    version = importlib.metadata.version("llama-cpp-python")
    return measure, {"version": version, "threads": len(os.sched_getaffinity(0))}


if __name__ == "__main__":
    serve(start)
