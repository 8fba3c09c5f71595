"""vLLM's CPU build, in an environment of its own; its option is `eager` (nothing compiled) or empty.

Threads: all cores, named, since by itself it leaves one to its scheduler. OpenMP: Intel's, as it asks for.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benches.engine.work import MAX_SEQS, MAX_TOKENS, Job, Outcome
from benches.peers.serve import Measure, serve, warmed

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "compiled"),
    "HF_HUB_OFFLINE": "1",
    "LD_PRELOAD": str(Path(sys.prefix) / "lib/libiomp5.so"),
}


def start(path: Path, mode: str) -> tuple[Measure, dict[str, object]]:
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(path),
        dtype="bfloat16",
        max_model_len=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        enforce_eager=mode == "eager",
        seed=0,
    ).llm_engine
    num_jobs = 0

    def run(job: Job) -> Outcome:
        nonlocal num_jobs
        num_jobs += 1
        began, todo = time.perf_counter(), list(job.requests)
        times: dict[str, list[float]] = {}
        while todo or engine.has_unfinished_requests():
            while todo and todo[0].at <= time.perf_counter() - began:
                request, name = todo.pop(0), f"{num_jobs}-{len(times)}"
                times[name] = []
                engine.add_request(
                    name,
                    {"prompt_token_ids": list(request.prompt)},
                    SamplingParams(max_tokens=request.num_out, temperature=0.0, ignore_eos=True),
                )
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, began + todo[0].at - time.perf_counter()))
                continue
            for output in engine.step():
                come = times[output.request_id]
                num_new = len(output.outputs[0].token_ids) - len(come)
                come += [time.perf_counter() - began] * num_new
        assert [len(t) for t in times.values()] == [r.num_out for r in job.requests]
        return Outcome(time.perf_counter() - began, tuple(tuple(t) for t in times.values()))

    return warmed(run), {"version": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    if os.environ.get("LD_PRELOAD") != SETTINGS["LD_PRELOAD"]:  # read by the loader: once more, with it
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | SETTINGS)
    serve(start)
