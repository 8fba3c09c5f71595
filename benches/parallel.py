"""Scaling efficiency of tensor parallelism: tokens a second of one process and of N, the same model and load.

    .venv/bin/python benches/parallel.py                # a random Llama, two ranks, on this machine's CPUs
    .venv/bin/python benches/parallel.py --ranks 4 --layers 32 --hidden 4096 --dtype bfloat16    # on GPUs

Each runs in processes of its own, with the machine's threads divided among them; runs are interleaved and the
best of each counts. Efficiency is speed-up over N; `apart` is the relative difference of their logits. One
process uses all threads of a CPU anyway, so there it is the cost of dividing that is measured, and efficiency
is below 1/N.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sluice_runtime.engine import machine, parallel
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.varlen import PAGE_TOKENS, VarlenRunner
from sluice_runtime.models import ModelSource, load

_NUM_STEPS = 24


def make_model(directory: Path, layers: int, hidden: int, dtype: str) -> None:
    """A random Llama with 8 heads, 4 KV heads and the tokenizer of a byte a token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(directory)


def decode(runner: ModelRunner, num_seqs: int, context: int) -> float:
    """Tokens a second of `num_seqs` sequences of `context` tokens."""
    width = -(-(context + _NUM_STEPS + 1) // runner.block_size)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(num_seqs)]
    for i, table in enumerate(tables):
        runner.execute([ScheduledChunk(str(i), [i] * context, 0, table, True)])
    began = time.perf_counter()
    for step in range(_NUM_STEPS):
        at = context + step
        chunks = [ScheduledChunk(str(i), [7], at, table, True) for i, table in enumerate(tables)]
        logits, _ = runner.execute(chunks)
        logits.argmax(-1).tolist()
    return num_seqs * _NUM_STEPS / (time.perf_counter() - began)


def prefill(runner: ModelRunner, length: int) -> float:
    """Prompt tokens a second."""
    blocks = list(range(-(-length // runner.block_size)))
    began = time.perf_counter()
    logits, _ = runner.execute([ScheduledChunk("p", list(range(length)), 0, blocks, True)])
    logits.argmax(-1).tolist()
    return length / (time.perf_counter() - began)


def serve(directory: Path, num_ranks: int, dtype: str, pipe: Connection) -> None:
    """A process that measures when told, until told to end."""
    import torch

    on_cuda = torch.cuda.is_available()
    source: Any = ModelSource(path=directory, dtype=dtype, device="auto", num_ranks=num_ranks)  # type: ignore[arg-type]
    block_size = PAGE_TOKENS if on_cuda else 16
    make: Any = VarlenRunner
    if num_ranks > 1:
        team = parallel.start(source, block_size, None, lambda reason, message: os.abort())
        make = partial(parallel.LeadingRunner, team)
    else:
        torch.set_num_threads(machine.num_threads())
    runner = make(load(source).model, block_size)
    runner.allocate_kv(2048 // block_size * 16)
    runner.prepare(16, 2048)
    logits, _ = runner.execute(
        [ScheduledChunk("a", list(range(200)), 0, list(range(200 // block_size + 1)), True)]
    )
    pipe.send(logits[0].float().tolist())
    while pipe.recv():
        pipe.send(
            {
                "decode_1": decode(runner, 1, 128),
                "decode_16": decode(runner, 16, 128),
                "prefill_512": prefill(runner, 512),
            }
        )
    runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), options.layers, options.hidden, options.dtype)
        best: dict[int, dict[str, float]] = {1: {}, options.ranks: {}}
        pipes: dict[int, Any] = {}
        logits: list[list[float]] = []
        for num_ranks in best:
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(Path(directory), num_ranks, options.dtype, theirs)).start()
            theirs.close()
            pipes[num_ranks] = ours
            logits.append(ours.recv())
        for _ in range(options.rounds):
            for num_ranks, pipe in pipes.items():
                pipe.send(True)
                for name, value in pipe.recv().items():
                    best[num_ranks][name] = max(value, best[num_ranks].get(name, 0.0))
        for pipe in pipes.values():
            pipe.send(False)
    one, several = best[1], best[options.ranks]
    print(
        json.dumps(
            {
                "ranks": options.ranks,
                "apart": math.dist(*logits) / math.hypot(*logits[0]),
                "tokens_per_s": {"1": one, str(options.ranks): several},
                "efficiency": {name: several[name] / one[name] / options.ranks for name in one},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
