"""Rank 0 of a tensor-parallel engine as a process of its own, for test_parallel.py: a process belongs to one
process group, and pytest's own must belong to none."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice_runtime.engine import parallel, support
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.host_tier import KvMoves
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.team import Team
from sluice_runtime.engine.types import EngineConfig, EngineLoad, EngineRequest, KvCacheDtype, SamplingParams
from sluice_runtime.models import LoadedModel, ModelSource, UnsupportedModel, load
from unit.runtime.engine import test_oracle_mix as mix

PRELOADED = ["sluice_runtime.engine.parallel", "sluice_runtime.models.pretrained", __name__]
EXIT_LOST = 4
BLOCK_SIZE = 4


class Lead(NamedTuple):
    """What a test's part runs on: the team, what was loaded, and rank 0's runner, its KV allocated."""

    team: Team
    loaded: LoadedModel
    runner: parallel.LeadingRunner
    tell: Connection


def lead(
    part: Callable[[Lead], Any],
    directory: Path,
    num_ranks: int,
    dtype: str,
    tell: Connection,
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO,
) -> None:
    """Load, run `part`, send what it returns; then end the other ranks. Sends (reason, message) where that
    can't be done."""

    def lost(reason: str, message: str) -> None:
        tell.send((reason, message))
        os._exit(EXIT_LOST)

    source: Any = ModelSource(path=directory, dtype=dtype, device="cpu", num_ranks=num_ranks)  # type: ignore[arg-type]
    try:
        team = parallel.start(source, BLOCK_SIZE, 1, lost, kv_cache_dtype=kv_cache_dtype, method="fork")
        try:
            loaded = load(source)
            runner = parallel.LeadingRunner(team, loaded.model, BLOCK_SIZE, kv_cache_dtype)
            runner.allocate_kv(64)
            support.check_answers(runner, 64)  # type: ignore[arg-type]
            tell.send(part(Lead(team, loaded, runner, tell)))
        finally:
            team.stop()
    except UnsupportedModel as error:
        tell.send((error.reason, str(error)))
    except Exception:
        tell.send(traceback.format_exc())
        raise


def mixes(led: Lead) -> list[tuple[list[tuple[int, ...]], dict[str, list[int]], Counter[str]]]:
    """Greedy output of mixes of arrivals, chunked prompts, prefix hits, cancels and preemptions."""
    mix.ModelRunner = lambda *_: led.runner  # type: ignore[misc, assignment]
    results = []
    for seed in range(4):
        rng = random.Random(seed)
        prompts = mix._prompts(rng, 8)
        requests = [
            EngineRequest(
                str(i), p, SamplingParams(max_tokens=mix.NUM_OUTPUT, temperature=0.0), "s", tenant=t
            )
            for i, (p, t) in enumerate(zip(prompts, "abababab", strict=True))
        ]
        cancelled = {"3"} if seed % 2 else set()
        output, seen = mix._serve(
            led.runner.model,
            requests,
            rng,
            cancelled,
            block_size=BLOCK_SIZE,
            max_num_seqs=5,
            max_batch_tokens=20,
            num_blocks=22,
        )
        results.append((prompts, output, seen))
    return results


def shapes(led: Lead) -> tuple[list[tuple[int, int, int]], int, int]:
    """What rank 0 holds: its layers' KV, a token's bytes, and heads as the budget counts them."""
    sizes = led.runner.sizes()
    return led.runner.layer_shapes, sizes.bytes_per_token, sizes.heads


def last_logits(led: Lead) -> list[float]:
    """Logits after [1, 300, 3]."""
    logits, _ = led.runner.execute([ScheduledChunk("a", [1, 300, 3], 0, [0], True)])
    return [float(value) for value in logits[0]]


def offloaded_and_back(led: Lead) -> list[float]:
    """Logits after [1 … 9], of which the first two blocks were in host memory and others in their place."""
    runner = led.runner
    runner.allocate_host(3)
    runner.execute([ScheduledChunk("a", [1, 2, 3, 4, 5, 6, 7, 8], 0, [0, 1], True)])
    runner.move_kv(KvMoves(out=((0, 2), (1, 0))))
    runner.execute([ScheduledChunk("b", [9] * 8, 0, [0, 1], True)])
    runner.move_kv(KvMoves(back=((5, 2), (1, 0))))
    logits, _ = runner.execute([ScheduledChunk("a", [9], 8, [5, 1, 6], True)])
    return [float(value) for value in logits[0]]


def a_call_that_fails_everywhere(led: Lead) -> tuple[str, list[float]]:
    """Blocks that do not exist, then the same chunk as it should be."""
    wrong = ScheduledChunk("a", [1, 2, 3], 0, [9999], True)
    try:
        led.runner.execute([wrong])
    except IndexError as error:
        failed = type(error).__name__
    logits, _ = led.runner.execute([ScheduledChunk("a", [1, 2, 3], 0, [0], True)])
    return failed, logits[0].tolist()


def a_move_that_fails_everywhere(led: Lead) -> tuple[str, list[float]]:
    """To a slot that does not exist, then there and back as it should be."""
    led.runner.allocate_host(2)
    led.runner.execute([ScheduledChunk("a", [1, 2, 3, 4], 0, [0], True)])
    try:
        led.runner.move_kv(KvMoves(out=((0, 99),)))
    except IndexError as error:
        failed = type(error).__name__
    led.runner.move_kv(KvMoves(out=((0, 1),)))
    led.runner.move_kv(KvMoves(back=((7, 1),)))
    logits, _ = led.runner.execute([ScheduledChunk("a", [5], 4, [7, 8], True)])
    return failed, logits[0].tolist()


def a_call_that_fails_elsewhere(led: Lead) -> None:
    """Out of step: only the other rank is told to do what it can't."""
    led.team._agree_s = 0.2
    led.team.call("no_such_call")
    multiprocessing.Event().wait()


def a_call_that_fails_here(led: Lead) -> None:
    led.team._agree_s = 0.2
    led.team.call("close")
    led.team.agree_on_failure()


def told_who_they_are(led: Lead) -> None:
    """Never ends by itself: its process ids go out, and somebody kills one."""
    led.tell.send([process.pid for process, _ in led.team._members])
    while True:
        led.runner.execute([ScheduledChunk("a", [1, 2, 3], 0, [0], True)])


# -- a whole engine ------------------------------------------------------------------------------------------

ANSWER = 20
CANCELLED = "cancelled"


def waves() -> list[dict[str, tuple[int, ...]]]:
    """Prompts that are sent together, wave after wave: half of them begin alike, each repeats itself, and the
    last wave goes on from the first, whose KV the second has driven out. 24 blocks of 4 tokens are too few
    for a wave."""
    shared = tuple(range(40, 52))
    first = {f"a{i}": (shared if i % 2 else ()) + (i, i + 1, i + 2, i + 3) * 4 for i in range(6)}
    second = {f"b{i}": (100 + i, 110 + i, 120 + i) * 8 for i in range(4)}
    third = {f"c{i}": (*prompt, 200, 201) for i, prompt in enumerate(first.values())}
    return [{**first, CANCELLED: (*shared, 250, 251, 250)}, second, third]


class Served(NamedTuple):
    """Greedy tokens of each prompt of `waves`, and what the engine counted."""

    tokens: dict[str, list[int]]
    load: EngineLoad


async def serve_waves(engine: Engine) -> Served:
    """All waves through a started engine; one of the first wave is cancelled after its first token."""
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0)

    async def answer(name: str, prompt: tuple[int, ...]) -> list[int]:
        tokens: list[int] = []
        async for chunk in engine.submit(EngineRequest(name, prompt, sampling, "s")):
            tokens += chunk.token_ids
            if name == CANCELLED:
                engine.cancel(name)
        return tokens

    tokens: dict[str, list[int]] = {}
    for wave in waves():
        answers = await asyncio.gather(*(answer(name, prompt) for name, prompt in wave.items()))
        tokens |= zip(wave, answers, strict=True)
    return Served(tokens, engine.load())


def pages(runner: ModelRunner) -> list[list[Tensor]]:
    """Keys and values of a prompt of 32 tokens as they come out of rank 0's pages: each [its KV heads, 32,
    dim], by layer."""
    runner.execute([ScheduledChunk("p", [(17 * i + 5) % 300 for i in range(32)], 0, list(range(8)), True)])
    cache = runner._cache
    assert cache is not None
    return [list(cache.read(i, torch.arange(8), torch.float32)) for i in range(len(cache.keys))]


def served(led: Lead, **config: Any) -> tuple[Served, list[list[list[float]]]]:
    """`serve_waves` through an engine on all ranks, then `pages` (flat: tensors would be sent by handle)."""
    engine = Engine(led.loaded, EngineConfig(num_ranks=2, **config), lambda *_: led.runner)
    engine.start()
    found = asyncio.run(serve_waves(engine))
    engine._scheduler.check_integrity()
    assert engine.load().kv_blocks_used == 0
    own = [[part.flatten().tolist() for part in layer] for layer in pages(led.runner)]
    engine.stop()
    return found, own
