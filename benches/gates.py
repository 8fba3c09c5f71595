"""How often sound candidates are rolled back and how fast bad ones are: ``make bench-gates``.

Simulated rollouts (`sluice_operator.simulation`) under the operator's own gates and `decide`, with the full
default set of guards over three tasks and three tenants at 20 requests/s. A/A rollouts are short (`STEPS`),
so that thousands fit; all counts of candidate requests are requests
*sent* to it from the regression's beginning until the rollback, those in flight included. The same traces
then go through models of Flagger and Argo Rollouts. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sluice_operator.api.rollout import CandidateArm, Rollout, Step, Watch
from sluice_operator.api.routepolicy import Rule, Target
from sluice_operator.gates import align, fold
from sluice_operator.plan.rollout import decide
from sluice_operator.simulation.campaign import Pool, Scenario, pool, simulate_one, spread_out
from sluice_operator.simulation.curves import log_normal
from sluice_operator.simulation.drive import WORLD, Pace, settled
from sluice_operator.simulation.evidence import START, Teller
from sluice_operator.simulation.regression import parse_regression
from sluice_operator.simulation.sources import from_evidence
from sluice_operator.simulation.summary import Summary, summarise
from sluice_operator.simulation.traffic import Shape, Traffic, make_trace
from sluice_operator.simulation.versus import Bout, by_tool

STEPS = ((5, 120), (25, 50), (50, 50))
"""Weights and seconds of an A/A rollout."""
WATCH_S = 20
SHORTEST_S = sum(seconds for _, seconds in STEPS) + WATCH_S
ONSET_S = 300.0
"""Regressions begin so long into a step: after 6,000 requests, 600 of them the candidate's at 10 %."""
SIDE_ONSET_S = 150.0
"""The same against the peers, whose ramps are 10 % a minute."""
TASKS = {"chat": 0.5, "nl2sql": 0.3, "summary": 0.2}
TENANTS = {"shop": 0.5, "bank": 0.3, "lab": 0.2}
console = Console(width=118)


RECORDED = "recorded"
"""Times and lengths resampled from what SmolLM2 really took on the demo's cluster (`benches/traces/`)."""
TRACE = Path(__file__).parent / "traces/smollm2.jsonl"


DETECT: tuple[tuple[str, str, int, float], ...] = (
    ("p95_x5", "p95 x5", 10, 120.0),
    ("p95_x1.5", "p95 x1.5", 10, 500.0),
    ("error_5pct", "errors 5%", 10, 240.0),
    ("error_5pct", "errors 5%", 25, 120.0),
    ("slow_3pct_x100", "3% x100", 10, 500.0),
    ("hard", "hard 5%", 10, 120.0),
)
"""Name in the last line, regression, weight in percent, and seconds that it is watched for."""


@dataclass(frozen=True)
class Sizes:
    """How many runs of each kind."""

    aa: int = 2000
    x5: int = 1000
    other: int = 150
    peers: int = 60
    records: int = 10_000
    shapes: tuple[str, ...] = (*(shape.value for shape in Shape), RECORDED)
    detect: tuple[tuple[str, str, int, float], ...] = DETECT
    onset_s: float = ONSET_S


QUICK = Sizes(aa=8, x5=12, other=6, peers=2)


def traffic(shape: Shape = Shape.POISSON) -> Traffic:
    """20 requests/s: 0.3 s to the first token, 30 tokens of 20 ms, in the median. A day has 300 s, so that a
    short rollout meets all of it."""
    return Traffic(shape=shape, tasks=TASKS, tenants=TENANTS, tokens=log_normal(30.0, 0.6), day_s=300.0)


def recorded() -> Traffic:
    """The same rate, tasks and tenants, with the latencies of a real model."""
    with TRACE.open() as lines:
        found = from_evidence(lines)
    return replace(found, rate=traffic().rate, tasks=TASKS, tenants=TENANTS)


def rule(*steps: tuple[int, int], watch: int = 0) -> Rule:
    """A rollout with the default guards; weights and seconds."""
    rollout = Rollout(
        candidate=CandidateArm(backend="candidate"), watch=Watch(seconds=watch),
        steps=[Step(weight=weight, min_seconds=seconds) for weight, seconds in steps],
    )  # fmt: skip
    return Rule(name="all", target=Target(backend="stable"), rollout=rollout)


def of(shape: str) -> Traffic:
    """Traffic by the name of its shape."""
    return recorded() if shape == RECORDED else traffic(Shape(shape))


def sound(shape: str) -> Scenario:
    """An A/A rollout."""
    return Scenario(of(shape), 2.0 * SHORTEST_S, rule(*STEPS, watch=WATCH_S), pace=Pace(turn_s=60.0))


def bad(text: str, weight: int, onset: float, watched: float) -> Scenario:
    """A regression in the middle of a step."""
    seconds = onset + watched
    return Scenario(
        traffic(),
        seconds,
        rule((weight, int(seconds) + 60)),
        parse_regression(text, onset),
        pace=Pace(turn_s=30.0, exact=True),
    )


# ── speed ─────────────────────────────────────────────────────────────────────────────────────────────────


def speed(num: int, seed: int) -> tuple[float, float]:
    """Milliseconds of one decide() with that much evidence behind it, and of folding the evidence in."""
    one = rule((10, 3600))
    trace = make_trace(traffic(), num / 20.0 + 120.0, seed)
    status, world = settled(one), WORLD
    requests = np.flatnonzero(trace.times >= 0.0)[:num]
    teller = Teller(trace, heartbeats=False)
    mine = np.ones(len(requests), bool)
    rows = teller.schedule(requests, trace.bucket[requests] < 0.1, ~mine, mine).rows()
    seen = [teller.observation(row, status.attempt) for row in rows][:num]
    folds, decides = [], []
    for _ in range(5):
        gate = align(None, one, status, START)
        begin = time.perf_counter()
        gate = fold(gate, seen)
        folds.append(time.perf_counter() - begin)
        now = START + timedelta(seconds=rows[-1][0])
        for _ in range(20):
            begin = time.perf_counter()
            decide("simulation/policy", one, status, gate, world, now)
            decides.append(time.perf_counter() - begin)
    return statistics.median(decides) * 1e3, min(folds) * 1e3


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────


def bench(sizes: Sizes, seed: int, workers: Pool = None) -> dict[str, Any]:
    """Runs everything and prints the tables; the figures for the last line."""
    decide_ms, fold_ms = speed(sizes.records, seed)
    console.print(f"decide() {decide_ms:.2f} ms, {sizes.records} records folded in {fold_ms:.0f} ms")
    aa = measure_sound(sizes, seed, workers)
    detect = measure_bad(sizes, seed, workers)
    peers = measure_peers(sizes, seed, workers)
    return {"aa": aa, "detect": detect, "peers": peers, "decide_ms": round(decide_ms, 3),
            "fold_10k_ms": round(fold_ms * 10_000 / sizes.records, 1)}  # fmt: skip


def measure_sound(sizes: Sizes, seed: int, workers: Pool) -> dict[str, Any]:
    """A/A rollouts of each shape."""
    steps = ", ".join(f"{weight} % for {seconds} s" for weight, seconds in STEPS)
    table = _table(
        f"A/A: {sizes.aa} rollouts a shape, {steps}, {WATCH_S} s watched; all default guards",
        ("shape", "rolled back", "95 % interval", "slice alone", "promoted", "time/minimum", "its p95", "by"),
    )
    shares: dict[str, float] = {}
    ratios: list[float] = []
    for shape in sizes.shapes:
        begin = time.monotonic()
        one = summarise(spread_out(partial(simulate_one, sound(shape), seed), sizes.aa, workers), None)
        ratio = one.seconds_to_promote.median / SHORTEST_S
        shares[shape] = one.false_stops.value
        ratios.append(ratio)
        low, high = one.false_stops.low, one.false_stops.high
        reasons = ", ".join(f"{name} {num}" for name, num in list(one.reasons.items())[:3])
        table.add_row(
            shape, f"{one.false_stops.value:.2%}", f"{low:.2%} to {high:.2%}", str(one.narrowed),
            f"{one.promoted.value:.1%}", f"×{ratio:.2f}",
            f"×{one.seconds_to_promote.p95 / SHORTEST_S:.2f}", reasons,
        )  # fmt: skip
        _say(f"{shape}: {time.monotonic() - begin:.0f} s")
    console.print(table)
    return {"false_rollback": shares, "time_to_promote_ratio": round(max(ratios), 3)}


def measure_bad(sizes: Sizes, seed: int, workers: Pool) -> dict[str, Any]:
    """Regressions in the middle of a step, decided upon after every record."""
    table = _table(
        f"Regressions from {sizes.onset_s:.0f} s on: candidate requests sent until the rollback",
        ("regression", "weight", "runs", "found", "median", "p95", "max", "heard of", "seconds", "before"),
    )  # fmt: skip
    found: dict[str, list[Summary]] = defaultdict(list)
    for name, text, weight, watched in sizes.detect:
        runs = sizes.x5 if name == "p95_x5" else sizes.other
        results = spread_out(
            partial(simulate_one, bad(text, weight, sizes.onset_s, watched), seed), runs, workers
        )
        one = summarise(results, sizes.onset_s)
        found[name].append(one)
        table.add_row(
            text, f"{weight} %", str(runs), f"{one.detected.value:.1%}", f"{one.exposed.median:.0f}",
            f"{one.exposed.p95:.0f}", f"{one.exposed.max:.0f}", f"{one.told.median:.0f}",
            f"{one.seconds_to_stop.median:.1f}", str(one.false_stops.num),
        )  # fmt: skip
        _say(f"{text} at {weight} %")
    console.print(table)
    console.print("where it was never stopped, all that it got counts; the last line has the medians")
    medians = {name: max(one.exposed.median for one in several) for name, several in found.items()}
    (x5,), (hard,) = found["p95_x5"], found["hard"]
    medians["hard"] = hard.violations.max
    return {**medians, "p95_x5": {"median": x5.exposed.median, "max": x5.exposed.max}}


def measure_peers(sizes: Sizes, seed: int, workers: Pool) -> dict[str, Any]:
    """The same traces through every tool."""
    false = {shape: _bout(shape, "none", sizes, seed, workers) for shape in sizes.shapes}
    texts = {"p95_x5": "p95 x5", "p95_x1.5": "p95 x1.5", "error_5pct": "errors 5%"}
    found = {name: _bout(Shape.POISSON.value, text, sizes, seed, workers) for name, text in texts.items()}
    names = list(next(iter(false.values())))
    _print_false(false, names, sizes.peers)
    _print_bad(found, names, sizes.peers)
    return {
        name: {
            "false_rollback": {shape: false[shape][name].false_stops.value for shape in false},
            **{kind: _figures(summaries[name]) for kind, summaries in found.items()},
        }
        for name in names
    }


def _bout(shape: str, text: str, sizes: Sizes, seed: int, workers: Pool) -> dict[str, Summary]:
    """Ramps of 10 % a minute; Argo as documented takes 40 minutes."""
    ours = rule(*((weight, 60) for weight in (10, 20, 30, 40, 50)))
    regression = parse_regression(text, SIDE_ONSET_S)
    bout = Bout(of(shape), 2_700.0, ours, 600.0, regression, seed)
    rounds = spread_out(bout.round, sizes.peers, workers)
    _say(f"side by side: {text}, {shape}")
    return by_tool(rounds, SIDE_ONSET_S if regression.changes else None)


def _figures(one: Summary) -> dict[str, float | None]:
    """What was found of those not rolled back before; None where nothing was."""
    return {
        "found": one.detected.value if one.detected.total else None,
        "seconds": round(one.seconds_to_stop.median, 1) if one.detected.num else None,
        "exposed": one.exposed.median if one.detected.total else None,
    }


def _print_false(false: dict[str, dict[str, Summary]], names: list[str], runs: int) -> None:
    table = _table(
        f"Side by side, sound candidates rolled back, {runs} traces a shape (×: p99 limit over stable's)",
        ("tool", *false),
    )
    for name in names:
        table.add_row(name, *(f"{false[shape][name].false_stops.value:.0%}" for shape in false))
    console.print(table)


def _print_bad(found: dict[str, dict[str, Summary]], names: list[str], runs: int) -> None:
    table = _table(
        f"Side by side, bad from {SIDE_ONSET_S:.0f} s on, {runs} traces: found; seconds; users exposed",
        ("tool", *found),
    )
    for name in names:
        cells = []
        for summaries in found.values():
            one = summaries[name]
            seconds = f"{one.seconds_to_stop.median:.0f} s" if one.detected.num else "never"
            told = f"{one.detected.value:.0%}; {seconds}; {one.exposed.median:.0f}"
            cells.append(told if one.detected.total else "all rolled back before")
        table.add_row(name, *cells)
    console.print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _say(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores of {model or platform.processor()}, Python {platform.python_version()}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a small run, under a minute")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--shapes", default="", help="only A/A, of these shapes: poisson,recorded")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    begin = time.monotonic()
    console.print(f"seed {options.seed}, {_machine()}, {options.processes} processes")
    with pool(options.processes) as workers:
        if options.shapes:
            sizes = replace(sizes, shapes=tuple(options.shapes.split(",")))
            figures = {"aa": measure_sound(sizes, options.seed, workers)}
        else:
            figures = bench(sizes, options.seed, workers)
    console.print(f"{time.monotonic() - begin:.0f} s")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
