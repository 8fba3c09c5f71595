"""Contestants that run the same jobs in turn: A B A B …, each warm, in a process of its own, idle while
another is measured.

A ratio is told by rounds: both times of a ratio are of the same round, so that what disturbs the machine
for longer than a round disturbs both. Above 1 this engine is the faster.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.engine.work import MIX, Outcome

ROOT = Path(__file__).parents[2]
OURS = "sluice"
# A peer that takes so much longer than this engine in the first round is not measured again: it would take
# the time of those that are close.
_FAR_BEHIND = 2.0
_START_S, _JOB_S = 600.0, 180.0


class Failed(Exception):
    """A contestant could not start, or could not do a job. The message is one line."""


class NotOffered(Exception):
    """A contestant can't do a job of this kind, and says so."""


@dataclass
class Contestant:
    """A process that speaks peers/serve.py's protocol. `rows`: those that it takes part in, None for all."""

    name: str
    module: str
    python: Path = Path(sys.executable)
    option: str = ""
    rows: frozenset[str] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def start(self, model: Path, log: Path) -> None:
        """Load the model. Raises `Failed`."""
        if not self.python.exists():
            raise Failed("its environment is not there: run `make peers`")
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [
                    self.python,
                    "-m",
                    f"benches.peers.{self.module}",
                    "--model",
                    model,
                    "--option",
                    self.option,
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # some have children, which are to end with them
            )
        try:
            self.about = self._reply(_START_S)["ready"]
        except Failed as error:
            raise Failed(f"{error}; see {log}") from error

    def run(self, row: str, seed: int) -> Outcome:
        """One job. Raises `Failed`, `NotOffered`."""
        assert self._process
        assert self._process.stdin
        try:
            print(json.dumps({"row": row, "seed": seed}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed("it has ended") from None
        reply = self._reply(_JOB_S)
        if "not_offered" in reply:
            raise NotOffered(reply["not_offered"])
        if "error" in reply:
            raise Failed(reply["error"])
        return Outcome(reply["seconds"], tuple(map(tuple, reply["times"])))

    def _reply(self, timeout: float) -> Any:
        assert self._process
        assert self._process.stdout
        with _alarm(timeout):
            line = self._process.stdout.readline()
        if not line:
            raise Failed(f"it ended with exit code {self._process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise Failed(f"no answer within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Contest:
    """What was measured: for each contestant and row the outcomes by round, and who failed, and why."""

    outcomes: dict[tuple[str, str], dict[int, Outcome]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def run(self, contestants: Sequence[Contestant], rows: Iterable[str], rounds: int, seed: int) -> None:
        """All rows, `rounds` times, ours first in even rounds and last in odd ones. One warm-up each before.
        Streams under arrivals are measured once: what counts there are many tokens, not many runs."""
        live = list(contestants)
        for one in live:
            self._measure(one, "4", -1, seed)
        for number in range(rounds):
            for row in rows:
                for one in live if number % 2 == 0 else reversed(live):
                    if self._takes_part(one, row, number):
                        self._measure(one, row, number, seed)

    def _takes_part(self, one: Contestant, row: str, number: int) -> bool:
        if one.name in self.failures or (one.rows is not None and row not in one.rows):
            return False
        if number == 0 or one.name == OURS:
            return number == 0 or row != MIX.name
        ratio = self.ratios(one.name).get(row)
        return ratio is not None and ratio < _FAR_BEHIND and row != MIX.name

    def _measure(self, one: Contestant, row: str, number: int, seed: int) -> None:
        if one.name in self.failures:
            return
        began = time.perf_counter()
        try:
            outcome = one.run(row, seed + number)
        except NotOffered as error:
            print(f"  {one.name}, {row}: {error}", flush=True)
            return
        except Failed as error:
            self.failures[one.name] = f"row {row}: {error}"
            print(f"  {one.name}, {row}: {error}", flush=True)
            one.stop()  # it may still be computing, beside the others
            return
        if number >= 0:
            self.outcomes.setdefault((one.name, row), {})[number] = outcome
            print(f"  round {number + 1}  {row:>8}  {one.name:<20} {outcome.seconds:7.2f} s", flush=True)
        else:
            print(f"  warm      {one.name:<20} {time.perf_counter() - began:7.2f} s", flush=True)

    def seconds(self, name: str, row: str) -> float | None:
        """Median over rounds."""
        outcomes = self.outcomes.get((name, row))
        return statistics.median(o.seconds for o in outcomes.values()) if outcomes else None

    def ratios(self, name: str, base: str = OURS) -> dict[str, float]:
        """For each row how many times longer `name` took than `base`: the median over rounds that both have.
        Rows with arrivals are not among them: how long they take is the arrivals' doing."""
        found: dict[str, float] = {}
        for (who, row), theirs in self.outcomes.items():
            both = theirs.keys() & self.outcomes.get((base, row), {}).keys()
            if who == name and row != MIX.name and both:
                own = self.outcomes[base, row]
                found[row] = statistics.median(theirs[i].seconds / own[i].seconds for i in both)
        return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 by the nearest rank, in milliseconds of values in seconds."""
    ordered = sorted(values)
    return {
        f"p{p}": round(ordered[min(len(ordered) - 1, -(-len(ordered) * p // 100) - 1)] * 1e3, 2)
        for p in (50, 95, 99)
    }
