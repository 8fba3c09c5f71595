"""Many runs of one scenario, over processes; each is fixed by seed and index, whoever runs it.

This is the one place of the simulation that knows of processes; all else is pure.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ..api.routepolicy import Rule
from .drive import NORMAL, Pace, run
from .peers import Argo, Flagger, run_argo, run_flagger
from .regression import Regression, regress
from .result import Result
from .trace import Trace
from .traffic import Traffic, make_trace

CHUNK = 4
Tool = Rule | Flagger | Argo
"""Who judges: a rule's rollout by the operator's own gates, or a peer."""
T = TypeVar("T")


@dataclass(frozen=True)
class Scenario:
    """What is run again and again."""

    traffic: Traffic
    seconds: float
    """Longest time of a run."""
    judge: Tool
    regression: Regression = field(default_factory=Regression)
    pace: Pace = NORMAL


def simulate_one(scenario: Scenario, seed: int, index: int) -> Result:
    """One run."""
    trace = make_trace(scenario.traffic, scenario.seconds, seed, index)
    return judge(scenario, regress(trace, scenario.regression, seed, index))


def judge(scenario: Scenario, trace: Trace) -> Result:
    """The scenario's tool on a trace."""
    onset = scenario.regression.start
    if isinstance(scenario.judge, Flagger):
        return run_flagger(scenario.judge, trace, onset)
    if isinstance(scenario.judge, Argo):
        return run_argo(scenario.judge, trace, onset)
    return run(scenario.judge, trace, onset, scenario.pace)


Pool = ProcessPoolExecutor | None


@contextmanager
def pool(processes: int) -> Iterator[Pool]:
    """Processes to run in; None for one, which is this one."""
    if processes <= 1:
        yield None
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def simulate(
    scenario: Scenario,
    runs: int,
    seed: int,
    workers: Pool = None,
    done: Callable[[int], None] = lambda _: None,
) -> list[Result]:
    """`runs` results, by index. `done` is called with how many more have ended."""
    return spread_out(partial(simulate_one, scenario, seed), runs, workers, done)


def spread_out(
    one: Callable[[int], T], runs: int, workers: Pool = None, done: Callable[[int], None] = lambda _: None
) -> list[T]:
    """``one(0)`` to ``one(runs - 1)``, over the workers; `one` must be picklable for that."""
    chunks = [range(first, min(first + CHUNK, runs)) for first in range(0, runs, CHUNK)]
    if workers is None:
        results = []
        for chunk in chunks:
            results += _chunk(one, chunk)
            done(len(chunk))
        return results
    futures = {workers.submit(_chunk, one, chunk): chunk for chunk in chunks}
    found: dict[int, T] = {}
    for future in as_completed(futures):
        chunk = futures[future]
        found |= dict(zip(chunk, future.result(), strict=True))
        done(len(chunk))
    return [found[index] for index in range(runs)]


def _chunk(one: Callable[[int], T], indices: Sequence[int]) -> list[T]:
    return [one(index) for index in indices]
