"""transformers' own continuous batching, with the settings it chooses itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from benches.engine.work import MAX_SEQS, MAX_TOKENS, Job, Outcome
from benches.peers.serve import Measure, serve, warmed

_PAGE = 256


def start(path: Path, _option: str) -> tuple[Measure, dict[str, object]]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    settings = model.generation_config
    settings.do_sample, settings.eos_token_id, settings.pad_token_id = False, -1, 0
    manager = model.init_continuous_batching(
        generation_config=settings,
        # It sizes its cache by the memory that is free, which here is not its own alone.
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=_PAGE, num_blocks=MAX_SEQS * MAX_TOKENS // _PAGE // 2, max_batch_tokens=512
        ),
    )
    with torch.inference_mode():
        manager.start()
    state = {"jobs": 0}

    def results(times: dict[str, list[float]], began: float, num_left: int, timeout: float) -> int:
        """Take what has come; returns how many requests still run."""
        result = manager.get_result(timeout=timeout)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its loop has ended")
            return num_left
        num_new = len(result.generated_tokens) - len(times[result.request_id])
        times[result.request_id] += [time.perf_counter() - began] * num_new
        if result.error:
            raise RuntimeError(result.error)
        return num_left - int(result.is_finished())

    def run(job: Job) -> Outcome:
        state["jobs"] += 1
        began, todo, num_left = time.perf_counter(), list(job.requests), len(job.requests)
        times: dict[str, list[float]] = {}
        while num_left:
            while todo and todo[0].at <= time.perf_counter() - began:
                request, name = todo.pop(0), f"{state['jobs']}-{len(times)}"
                times[name] = []
                manager.add_request(
                    list(request.prompt), name, max_new_tokens=request.num_out, streaming=True
                )
            wait = 0.5 if not todo else max(0.001, began + todo[0].at - time.perf_counter())
            num_left = results(times, began, num_left, wait)
        assert [len(t) for t in times.values()] == [r.num_out for r in job.requests]
        return Outcome(time.perf_counter() - began, tuple(tuple(t) for t in times.values()))

    return warmed(run), {"version": transformers.__version__, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    serve(start)
