"""What pods and gateway would tell of simulated requests, and when it would reach the operator.

A request is told of at its end; once a second while it runs, by its pod's heartbeat (a running request past
a limit is evidence already); and by what a person says of it afterwards. Invariant: a request's arm is
fixed when it arrives, by the weight then in force; evidence of it comes later and keeps that arm.

Heartbeats of requests younger than stable's medians are left out: guards' limits lie above, so hardly any
of them could say anything that the request's end does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gates import ArmName, Observation
from .curves import Array
from .trace import Ints, Outcomes, Trace, Wrong

START = datetime(2026, 1, 1, tzinfo=UTC)
"""The rollout's second 0."""
EPOCH = START.timestamp()

FEEDBACK_S = 20.0
"""Seconds from an answer to what a person says of it."""
BUSY_SHARE = 0.2
"""Part of a request's time in which the replica worked for it alone."""

Bools = NDArray[np.bool_]
_RUNNING, _FEEDBACK = 1, 2
_SILENT = int(Wrong.FAILED | Wrong.INTERRUPTED)
_UNVERIFIED = _SILENT | int(Wrong.HARD)


Row = tuple[float, int, int, bool, bool, bool, float]
"""A line of a schedule: arrival, request, kind, candidate, mirror, ours, age."""

HARD_CHECK = "simulated/violation"
"""A hard check that needs no contract: its name has a "/", as the runtime's own have."""

_FIELDS = [
    (int(bit), name)
    for bit, name in (
        (Wrong.FAILED, "failed"), (Wrong.INTERRUPTED, "interrupted"), (Wrong.TRUNCATED, "truncated"),
        (Wrong.REFUSED, "refused"), (Wrong.SCHEMA, "schema_failed"), (Wrong.TOOL, "tool_failed"),
        (Wrong.RETRIED, "retried"), (Wrong.REPEATED, "repeated"),
    )
]  # fmt: skip
"""Fields of an observation by what is wrong."""


@dataclass(frozen=True)
class Schedule:
    """Evidence in order of arrival."""

    at: Array
    """Seconds at which it reaches the operator."""
    request: Ints
    """Index into the trace."""
    kind: Ints
    candidate: Bools
    mirror: Bools
    ours: Bools
    """Whether it was sent under the attempt: the candidate might have got it."""
    age: Array
    """Seconds since the request began."""

    def __len__(self) -> int:
        return len(self.at)

    def rows(self, first: int = 0, last: int | None = None) -> list[Row]:
        """Line by line."""
        columns = (self.at, self.request, self.kind, self.candidate, self.mirror, self.ours, self.age)
        return list(zip(*(column[first:last].tolist() for column in columns), strict=True))

    def kept(self, mask: Bools) -> Schedule:
        """Only some of it."""
        return Schedule(
            self.at[mask],
            self.request[mask],
            self.kind[mask],
            self.candidate[mask],
            self.mirror[mask],
            self.ours[mask],
            self.age[mask],
        )


EMPTY = Schedule(
    np.zeros(0),
    np.zeros(0, np.int64),
    np.zeros(0, np.int64),
    np.zeros(0, bool),
    np.zeros(0, bool),
    np.zeros(0, bool),
    np.zeros(0),
)


@dataclass(frozen=True)
class _Arm:
    """An arm's outcomes as lists, which are faster to read one by one."""

    ttft: list[float]
    tpot: list[float]
    jitter: list[float]
    wrong: list[int]

    @classmethod
    def of(cls, outcomes: Outcomes) -> _Arm:
        """The same figures."""
        return cls(
            outcomes.ttft.tolist(), outcomes.tpot.tolist(), outcomes.jitter.tolist(), outcomes.wrong.tolist()
        )


class Teller:
    """Turns assigned requests of one trace into evidence."""

    def __init__(self, trace: Trace, heartbeats: bool = True, verifies: bool = False) -> None:
        """`verifies`: the rule has a hard check, which an answer can have passed at its end."""
        self._trace, self._verifies = trace, verifies
        self._heartbeats = heartbeats
        self._arms = (_Arm.of(trace.stable), _Arm.of(trace.candidate))
        self._unit, self._prompt = trace.unit.tolist(), trace.prompt_tokens.tolist()
        self._cached, self._tokens = trace.cached_tokens.tolist(), trace.output_tokens.tolist()
        self._task = [trace.tasks[index] for index in trace.task.tolist()]
        self._tenant = [trace.tenants[index] for index in trace.tenant.tolist()]
        self._floor_ttft = float(np.median(trace.stable.ttft)) if trace.num_requests else 0.0
        self._floor_total = float(np.median(trace.stable.total)) if trace.num_requests else 0.0

    def schedule(self, requests: Ints, candidate: Bools, mirror: Bools, ours: Bools) -> Schedule:
        """All evidence of these requests, in order of arrival."""
        parts = [
            self._told(requests[chosen], arm, mirror[chosen], ours[chosen])
            for arm in (False, True)
            if (chosen := candidate == arm).any()
        ]
        return merged(parts)

    def _told(self, requests: Ints, candidate: bool, mirror: Bools, ours: Bools) -> Schedule:
        outcomes = self._trace.candidate if candidate else self._trace.stable
        begin, total = self._trace.times[requests], outcomes.total[requests]
        arm = np.full(len(requests), candidate)
        ended = np.zeros(len(requests), np.int64)
        parts = [Schedule(begin + total, requests, ended, arm, mirror, ours, total)]
        said = (outcomes.wrong[requests] & Wrong.COMPLAINT) > 0
        if said.any():
            age = total[said] + FEEDBACK_S
            parts.append(
                Schedule(
                    begin[said] + age,
                    requests[said],
                    ended[said] + _FEEDBACK,
                    arm[said],
                    mirror[said],
                    ours[said],
                    age,
                )
            )
        if self._heartbeats:
            parts.append(self._beats(requests, candidate, mirror, ours, outcomes))
        return merged(parts)

    def _beats(
        self, requests: Ints, candidate: bool, mirror: Bools, ours: Bools, outcomes: Outcomes
    ) -> Schedule:
        total, ttft = outcomes.total[requests], outcomes.ttft[requests]
        first = self._trace.beat[requests]
        counts = np.ceil(np.maximum(total - first, 0.0)).astype(np.int64)
        which = np.repeat(np.arange(len(requests)), counts)
        if not len(which):
            return EMPTY
        nth = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        age = first[which] + nth
        telling = (age > self._floor_total) | ((age < ttft[which]) & (age > self._floor_ttft))
        which, age = which[telling], age[telling]
        at = self._trace.times[requests[which]] + age
        return Schedule(
            at,
            requests[which],
            np.full(len(which), _RUNNING),
            np.full(len(which), candidate),
            mirror[which],
            ours[which],
            age,
        )

    def observation(self, row: Row, attempt: str) -> Observation:
        """One line of evidence."""
        at, request, kind, candidate, mirror, ours, age = row
        arm = self._arms[candidate]
        common: dict[str, Any] = {
            "time": EPOCH + at, "request_id": f"r{request}", "age_s": age,
            "arm": ArmName.CANDIDATE if candidate else ArmName.STABLE,
            "attempt": attempt if ours else "", "unit": f"u{self._unit[request]}",
            "tenant": self._tenant[request], "task": self._task[request], "mirror": mirror,
        }  # fmt: skip
        if kind == _RUNNING:
            first = age >= arm.ttft[request]
            return Observation(
                **common, censored=True, first_token=first, prompt_tokens=self._prompt[request]
            )
        if kind == _FEEDBACK:
            return Observation(**common, feedback="wrong")
        return Observation(**common, **self._answer(arm, request, age))

    def _answer(self, arm: _Arm, request: int, total: float) -> dict[str, Any]:
        """What the record of an ended request says."""
        wrong, tokens, busy = arm.wrong[request], self._tokens[request], BUSY_SHARE * total
        silent = wrong & _SILENT == int(Wrong.FAILED)
        told: dict[str, Any] = {
            "total_s": total, "busy_s": busy, "cost": busy / 3600.0, "first_token": not silent,
            "prompt_tokens": self._prompt[request], "cached_tokens": self._cached[request],
            "output_tokens": 0 if silent else tokens,
        }  # fmt: skip
        if not silent:
            told["ttft_s"] = arm.ttft[request]
            if tokens >= 2:
                told["tpot_s"] = arm.tpot[request]
            if tokens >= 8:
                told["jitter_s"] = arm.jitter[request]
        if self._verifies and not wrong & _UNVERIFIED:
            told["verified_s"] = total
        if wrong:
            told |= {name: True for bit, name in _FIELDS if wrong & bit}
            if wrong & int(Wrong.HARD):
                told["hard_violations"] = (HARD_CHECK,)
        return told


def merged(parts: list[Schedule]) -> Schedule:
    """One schedule, in order of arrival."""
    if not parts:
        return EMPTY
    columns = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("at", "request", "kind", "candidate", "mirror", "ours", "age")
    ]
    order = np.argsort(columns[0], kind="stable")
    return Schedule(*(column[order] for column in columns))
