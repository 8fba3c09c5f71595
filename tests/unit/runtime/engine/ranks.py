"""Rank 0 of a tensor-parallel engine as a process of its own, for test_parallel.py: a process belongs to one
process group, and pytest's own must belong to none."""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from sluice_runtime.engine import parallel, support
from sluice_runtime.engine.host_tier import KvMoves
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.team import Team
from sluice_runtime.engine.types import EngineRequest, SamplingParams
from sluice_runtime.models import ModelSource, UnsupportedModel, load
from unit.runtime.engine import test_oracle_mix as mix

PRELOADED = ["sluice_runtime.engine.parallel", "sluice_runtime.models.pretrained", __name__]
EXIT_LOST = 4
BLOCK_SIZE = 4


class Lead(NamedTuple):
    """What a test's part runs on: the team and rank 0's runner, its KV allocated."""

    team: Team
    runner: parallel.LeadingRunner
    tell: Connection


def lead(part: Callable[[Lead], Any], directory: Path, num_ranks: int, dtype: str, tell: Connection) -> None:
    """Load, run `part`, send what it returns; then end the other ranks. Sends (reason, message) where that
    can't be done."""

    def lost(reason: str, message: str) -> None:
        tell.send((reason, message))
        os._exit(EXIT_LOST)

    source: Any = ModelSource(path=directory, dtype=dtype, device="cpu", num_ranks=num_ranks)  # type: ignore[arg-type]
    try:
        team = parallel.start(source, BLOCK_SIZE, 1, lost, method="fork")
        try:
            runner = parallel.LeadingRunner(team, load(source).model, BLOCK_SIZE)
            runner.allocate_kv(64)
            support.check_answers(runner, 64)  # type: ignore[arg-type]
            tell.send(part(Lead(team, runner, tell)))
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
