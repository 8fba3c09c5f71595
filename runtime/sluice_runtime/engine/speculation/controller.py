"""Whether guessing pays, and how far to guess. Pure: the time is an argument, and nothing is random.

Steps are cut into blocks. In most of them guesses are made; in every eighth none are (every other one while a
workload is on trial), for all requests at once: were some requests of a step without guesses, they would
wait for the guesses of the others and make guessing look better than it is. For each request and block the
time per token is taken, end to end: how long it was there, over the tokens that it got in that time. A
workload (tenant, task, and size of the batch by powers of two) keeps the latest of both arms, and

    trial  ──▶ on     when median and 95th percentile are both 5 % below the off-arm's
    trial  ──▶ off    when they are not
    on     ──▶ off    as soon as one of them is no longer below
    off    ──▶ trial  after half a minute, twice as long after each failed trial, at most ten minutes

A trial begins with as many guesses as are allowed, to learn how often they are right and what steps take;
then, as while on, it guesses as far as these say (cost.py), and only that is judged.

Invariant: a workload that is off costs nothing; one that is on has beaten its off-arm of the same minutes.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sluice_runtime.engine.speculation.cost import StepCost

_MEMORY = 4096
"""Guesses after which what was learnt about their chances counts half."""
_MIN_REACHED = 16
"""Guesses at a position that say something of its chance."""


class Phase(StrEnum):
    TRIAL = "trial"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Rules:
    """How the controller decides. `block_steps`: steps of a block; who was there for fewer than `min_steps`
    of them gives no sample. `min_samples` of each arm make a decision; the latest `max_samples` count.
    `margin`: what a trial must win by. `off_share`: blocks without guesses. `num_learnt`: steps with guesses
    from which a trial learns chances and costs; then it begins anew and guesses as far as these say."""

    block_steps: int = 16
    min_steps: int = 4
    min_samples: int = 32
    max_samples: int = 128
    margin: float = 0.05
    num_learnt: int = 32
    off_share: float = 1 / 8
    retry_s: float = 30.0
    max_retry_s: float = 600.0
    max_workloads: int = 256


@dataclass(frozen=True, slots=True)
class Stream:
    """A request that gets one token a step: whose it is, and what for."""

    tenant: str
    task: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for a stream: tokens it got, guesses made for it, and how many of these were right."""

    num_tokens: int
    num_drafted: int = 0
    num_right: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """What is held of a workload: whose it is, what for and its size of a batch (bits of the number of
    streams), and the latest times per token of both arms, in seconds."""

    tenant: str
    task: str
    size: int
    phase: Phase
    on: tuple[float, ...]
    off: tuple[float, ...]


_Key = tuple[str, str, int]


@dataclass(slots=True)
class _Workload:
    on: deque[float]
    off: deque[float]
    reached: list[int]
    right: list[int]
    phase: Phase = Phase.TRIAL
    learnt: bool = False
    retry_at: float = 0.0
    retry_s: float = 0.0

    def chances(self) -> list[float | None]:
        """How often the guess at each position was right, where all before it were; None: hardly measured."""
        return [
            right / reached if reached >= _MIN_REACHED else None
            for right, reached in zip(self.right, self.reached, strict=True)
        ]


@dataclass(slots=True)
class _Seen:
    """A request in a block: from when to when, in how many steps, and what it got."""

    key: _Key
    began: float
    ended: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Block:
    guesses: bool
    size: int
    num_steps: int = 0
    seen: dict[str, _Seen] = field(default_factory=dict)


class Controller:
    """One for an engine; the engine's thread owns it. `num_tokens`: the most guesses for a step of a
    request."""

    def __init__(self, num_tokens: int, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.cost = StepCost()
        self._num_tokens = num_tokens
        self._workloads: OrderedDict[_Key, _Workload] = OrderedDict()
        self._block: _Block | None = None
        self._off_due = 0.0

    def plan(self, now: float, streams: Mapping[str, Stream]) -> dict[str, int]:
        """How many guesses each stream may have in the step that begins; streams with none are left out."""
        block = self._block
        if block is not None and (not streams or block.num_steps >= self.rules.block_steps):
            self._end(block, now)
            self._block = block = None
        if not streams:
            return {}
        if block is None:
            block = self._block = self._begin(now, streams)
        wanted: dict[str, int] = {}
        by_key: dict[_Key, int] = {}
        for request_id, stream in streams.items():
            key = (stream.tenant, stream.task, block.size)
            block.seen.setdefault(request_id, _Seen(key, now))
            if block.guesses and key not in by_key:
                by_key[key] = self._num_guesses(self._workload(key, now), len(streams))
            if by_key.get(key):
                wanted[request_id] = by_key[key]
        return wanted

    def _begin(self, now: float, streams: Mapping[str, Stream]) -> _Block:
        size = len(streams).bit_length()
        keys = {(s.tenant, s.task, size) for s in streams.values()}
        phases = [self._workload(key, now).phase for key in keys]
        guesses = any(phase is not Phase.OFF for phase in phases)
        if guesses:
            self._off_due += 0.5 if Phase.TRIAL in phases else self.rules.off_share
            if self._off_due >= 1:
                self._off_due -= 1
                guesses = False
        return _Block(guesses, size)

    def _num_guesses(self, workload: _Workload, num_streams: int) -> int:
        if workload.phase is Phase.OFF:
            return 0
        if not workload.learnt:
            # Whatever was measured before: steps may have been slow for other reasons then.
            return self._num_tokens
        return self.cost.best_num_guesses(num_streams, workload.chances())

    def saw(self, now: float, seconds: float, progress: Mapping[str, Progress], *, prompts: bool) -> None:
        """The step that was planned last has ended, after `seconds` of computing. `prompts`: it computed
        prompts too."""
        block = self._block
        if block is None:
            return
        if progress and not prompts:
            self.cost.saw(sum(1 + p.num_drafted for p in progress.values()), seconds)
        block.num_steps += 1
        for request_id, step in progress.items():
            seen = block.seen.get(request_id)
            if seen is None:
                continue
            seen.ended = now
            seen.num_steps += 1
            seen.num_tokens += step.num_tokens
            if step.num_drafted:
                self._learn(self._workload(seen.key, now), step)

    def _learn(self, workload: _Workload, step: Progress) -> None:
        for i in range(min(step.num_drafted, step.num_right + 1)):
            workload.reached[i] += 1
            workload.right[i] += i < step.num_right
        if workload.reached[0] >= _MEMORY:
            workload.reached = [n // 2 for n in workload.reached]
            workload.right = [n // 2 for n in workload.right]

    def _end(self, block: _Block, now: float) -> None:
        """Take the times per token, and judge the workloads that gave some."""
        met: dict[_Key, _Workload] = {}
        for seen in block.seen.values():
            workload = self._workload(seen.key, now)
            if seen.num_steps >= self.rules.min_steps and workload.phase is not Phase.OFF:
                arm = workload.on if block.guesses else workload.off
                arm.append((seen.ended - seen.began) / seen.num_tokens)
                met[seen.key] = workload
        for workload in met.values():
            if not workload.learnt and workload.reached[0] >= self.rules.num_learnt:
                # What follows is as it would be when on.
                workload.learnt = True
                workload.on.clear()
            self._judge(workload, now)

    def _judge(self, workload: _Workload, now: float) -> None:
        if min(len(workload.on), len(workload.off)) < self.rules.min_samples:
            return
        ratio = max(percentile(workload.on, p) / percentile(workload.off, p) for p in (0.5, 0.95))
        if workload.phase is Phase.TRIAL and ratio <= 1 - self.rules.margin:
            workload.phase, workload.retry_s = Phase.ON, 0.0
        elif workload.phase is Phase.TRIAL or ratio >= 1:
            workload.phase = Phase.OFF
            workload.retry_s = min(self.rules.max_retry_s, 2 * workload.retry_s or self.rules.retry_s)
            workload.retry_at = now + workload.retry_s

    def _workload(self, key: _Key, now: float) -> _Workload:
        """What is known of a workload; a new one, and one that has been off for long enough, is on trial."""
        workload = self._workloads.get(key)
        if workload is None:
            workload = self._workloads[key] = self._unknown()
            if len(self._workloads) > self.rules.max_workloads:
                self._workloads.popitem(last=False)
        elif workload.phase is Phase.OFF and now >= workload.retry_at:
            again = self._unknown()
            again.retry_s = workload.retry_s
            workload = self._workloads[key] = again
        self._workloads.move_to_end(key)
        return workload

    def _unknown(self) -> _Workload:
        latest = self.rules.max_samples
        num = self._num_tokens
        return _Workload(deque(maxlen=latest), deque(maxlen=latest), [0] * num, [0] * num)

    def num_workloads(self, phase: Phase) -> int:
        """For reports, by any thread."""
        return sum(workload.phase is phase for workload in list(self._workloads.values()))

    def judged(self) -> list[Judged]:
        """For measurements, while no step runs."""
        return [Judged(*key, w.phase, tuple(w.on), tuple(w.off)) for key, w in self._workloads.items()]


class Always:
    """Guesses whatever comes of it; for tests and measurements."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def plan(self, now: float, streams: Mapping[str, Stream]) -> dict[str, int]:
        del now
        return dict.fromkeys(streams, self._num_tokens)

    def saw(self, now: float, seconds: float, progress: Mapping[str, Progress], *, prompts: bool) -> None:
        """Nothing to learn."""

    def num_workloads(self, phase: Phase) -> int:
        del phase
        return 0

    def judged(self) -> list[Judged]:
        return []


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]
