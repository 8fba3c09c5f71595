"""Plain `generate` of transformers, batched; prompts of one job are equally long, so nothing is padded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from benches.engine.work import Job, Outcome
from benches.peers.serve import Measure, serve


def start(path: Path, _option: str) -> tuple[Measure, dict[str, object]]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None  # each answer has its whole length

    def measure(job: Job) -> Outcome:
        if not job.at_once:
            raise NotImplementedError("generate takes no requests while it runs")
        began = time.perf_counter()
        prompts = torch.tensor([request.prompt for request in job.requests])
        (num_out,) = {request.num_out for request in job.requests}
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=num_out,
            pad_token_id=0,
        )
        assert output.shape[1] == prompts.shape[1] + num_out
        return Outcome(time.perf_counter() - began)

    return measure, {"version": transformers.__version__, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    serve(start)
