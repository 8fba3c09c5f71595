"""Scaling efficiency of tensor parallelism: tokens a second of N ranks beside one process, in turn.

    .venv/bin/python benches/parallel.py                # a random Llama, two ranks, on this machine's CPUs
    .venv/bin/python benches/parallel.py --ranks 4 --layers 32 --hidden 4096 --dtype bfloat16    # on GPUs

    one        a process on one thread, or one device
    threads    a process on N threads; on CPUs only
    ranks      N processes on a thread, or a device, each

`efficiency` is what `ranks` does over N times what `one` does: the share of N machines that is left.
`over_threads` is `ranks` over `threads`: on a CPU the same cores, divided by processes or by threads. `apart`
is the relative difference of logits of `one` and `ranks`. All arms are loaded at once, each measures while
the others wait; figures are medians over rounds, ratios those of one round each. In float32 all run the same
code; in half precision on a CPU a single process has kernels that ranks have not.
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
from statistics import median
from typing import Any

from sluice_runtime.engine import parallel
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.varlen import PAGE_TOKENS, VarlenRunner
from sluice_runtime.models import ModelSource, load

_NUM_STEPS = 16
_CONTEXT = 512
_HEAD_DIM = 64

Rates = dict[str, float]


def make_model(directory: Path, layers: int, hidden: int, dtype: str) -> None:
    """A random Llama with heads of 64, two to a KV head, and the tokenizer of a byte a token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // _HEAD_DIM,
        num_key_value_heads=hidden // _HEAD_DIM // 2,
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


def decode(runner: ModelRunner, num_seqs: int) -> float:
    """Tokens a second of `num_seqs` sequences amid their answers; their KV is whatever is there."""
    width = -(-(_CONTEXT + _NUM_STEPS) // runner.block_size)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(num_seqs)]
    began = time.perf_counter()
    for step in range(_NUM_STEPS):
        at = _CONTEXT + step
        chunks = [ScheduledChunk(str(i), [7], at, table, True) for i, table in enumerate(tables)]
        logits, _ = runner.execute(chunks)
        logits.argmax(-1).tolist()
    return num_seqs * _NUM_STEPS / (time.perf_counter() - began)


def prefill(runner: ModelRunner) -> float:
    """Prompt tokens a second."""
    blocks = list(range(-(-_CONTEXT // runner.block_size)))
    began = time.perf_counter()
    logits, _ = runner.execute([ScheduledChunk("p", list(range(_CONTEXT)), 0, blocks, True)])
    logits.argmax(-1).tolist()
    return _CONTEXT / (time.perf_counter() - began)


def serve(directory: Path, num_ranks: int, num_threads: int, dtype: str, pipe: Connection) -> None:
    """A process that measures when told, until told to end."""
    import torch

    on_cuda = torch.cuda.is_available()
    source: Any = ModelSource(path=directory, dtype=dtype, device="auto", num_ranks=num_ranks)  # type: ignore[arg-type]
    block_size = PAGE_TOKENS if on_cuda else 16
    make: Any = VarlenRunner
    if num_ranks > 1:
        team = parallel.start(source, block_size, num_threads, lambda reason, message: os.abort())
        make = partial(parallel.LeadingRunner, team)
    else:
        torch.set_num_threads(num_threads)
    runner = make(load(source).model, block_size)
    runner.allocate_kv(16 * -(-(_CONTEXT + _NUM_STEPS) // block_size))
    runner.prepare(16, 2 * _CONTEXT)
    logits, _ = runner.execute(
        [ScheduledChunk("a", list(range(200)), 0, list(range(200 // block_size + 1)), True)]
    )
    pipe.send(logits[0].float().tolist())
    while pipe.recv():
        pipe.send(
            {"decode_1": decode(runner, 1), "decode_16": decode(runner, 16), "prefill": prefill(runner)}
        )
    runner.close()


def measure(pipes: dict[str, Any], rounds: int, seconds: float) -> dict[str, list[Rates]]:
    """Tokens a second of each arm, by round; none is begun after `seconds`."""
    told: dict[str, list[Rates]] = {arm: [] for arm in pipes}
    began = time.monotonic()
    for number in range(rounds):
        if number and time.monotonic() - began >= seconds:
            break
        for arm, pipe in pipes.items():
            pipe.send(True)
            told[arm].append(pipe.recv())
    return told


def main() -> None:
    """Load all arms, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 128 for each rank")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=12, help="at most so many")
    parser.add_argument("--seconds", type=float, default=120, help="no round begins later than that")
    options = parser.parse_args()
    if options.ranks < 2 or options.hidden % (128 * options.ranks):
        parser.error("--ranks must be at least 2, and --hidden a multiple of 128 for each rank")
    context = multiprocessing.get_context("spawn")
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), options.layers, options.hidden, options.dtype)
        arms = {"one": (1, 1), "threads": (1, options.ranks), "ranks": (options.ranks, options.ranks)}
        if _has_devices():
            del arms["threads"]
        pipes: dict[str, Any] = {}
        logits: dict[str, list[float]] = {}
        for arm, (num_ranks, num_threads) in arms.items():
            ours, theirs = context.Pipe()
            arguments = (Path(directory), num_ranks, num_threads, options.dtype, theirs)
            context.Process(target=serve, args=arguments).start()
            theirs.close()
            pipes[arm] = ours
            logits[arm] = ours.recv()
        told = measure(pipes, options.rounds, options.seconds)
        for pipe in pipes.values():
            pipe.send(False)
    found: dict[str, Any] = {
        "ranks": options.ranks,
        "model": {"layers": options.layers, "hidden": options.hidden, "dtype": options.dtype},
        "rounds": len(told["one"]),
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "apart": math.dist(logits["one"], logits["ranks"]) / math.hypot(*logits["one"]),
        "tokens_per_s": {arm: _medians(own, 1) for arm, own in told.items()},
        "efficiency": _ratio(told["ranks"], told["one"], options.ranks),
    }
    if "threads" in told:
        found["over_threads"] = _ratio(told["ranks"], told["threads"], 1)
    for arm, own in found["tokens_per_s"].items():
        print(f"{arm:8}", *(f"{name} {value:>9}" for name, value in own.items()))
    print(json.dumps(found))


def _ratio(over: list[Rates], under: list[Rates], times: int) -> Rates:
    ratios = [
        {name: value / below[name] / times for name, value in above.items()}
        for above, below in zip(over, under, strict=True)
    ]
    return _medians(ratios, 3)


def _medians(rounds: list[Rates], digits: int) -> Rates:
    return {name: round(median(one[name] for one in rounds), digits) for name in rounds[0]}


def _has_devices() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
