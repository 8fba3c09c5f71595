"""One simulated rollout: a virtual clock, requests assigned by weight, and the real gates and `decide`.

The loop is the operator's: evidence is folded as it arrives, then decided upon; what is decided holds for
the requests that come after. Invariant: a decision at time t never changes the arm of a request that came
before t. Example: rolled back at 312.4 s; requests in flight at the candidate end there, and none begins.

Between two events that could matter (evidence that fires, a stage whose time is up) `decide` would change
nothing but its checkpoint; so it is asked once in `IDLE_S` there, and at every turn elsewhere.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np

from ..api.routepolicy import Rule
from ..api.rulestatus import ArmStatus, Phase, RuleStatus
from ..gates import Observation, align, fold, verdict
from ..plan.rollout import decide
from ..plan.scope import eligibility
from ..plan.situation import Arms, World
from .evidence import EMPTY, EPOCH, START, Bools, Row, Schedule, Teller, merged
from .result import Result
from .trace import Ints, Trace
from .traffic import WARM_UP_S

IDLE_S = 5.0
OVERDUE_S = 2.0
"""Longest turn while a stage's time is up and something else holds it."""
AHEAD_S = 120.0
"""Requests are assigned for so long ahead."""
_POLICY = "simulation/policy"
_SERVING = (Phase.SHADOWING, Phase.STEP, Phase.WATCHING)
_OUTCOMES = {Phase.PROMOTED: "promoted", Phase.ROLLED_BACK: "rolled-back"}
_OVER = (Phase.PROMOTED, Phase.ROLLED_BACK, Phase.ABORTED)


def _arm(name: str) -> ArmStatus:
    return ArmStatus(backend=name, identity=f"sha256:{name}", config=name)


WORLD = World(
    Arms(_arm("stable"), _arm("candidate")), stable_ready=True, candidate_ready=True, evidence_live=True
)
"""Everything is there and can be heard."""


def settled(rule: Rule) -> RuleStatus:
    """The rule's status with its first stage in force, at the start."""
    status = RuleStatus(name=rule.name)
    for _ in range(8):
        decision = decide(_POLICY, rule, status, align(None, rule, status, START), WORLD, START)
        if decision.status == status:
            break
        status = decision.status
    return status


@dataclass(frozen=True)
class Pace:
    """How finely time is cut."""

    turn_s: float = 1.0
    """Evidence is folded and judged so often, seconds. The gates say the same however it is cut; only the
    moment at which it is noticed differs."""
    exact: bool = False
    """From the onset on, decide after the very record that the gates fire at, not at the turn's end."""
    narrowed_ends: bool = True
    """Stop where a task or tenant goes back alone."""


NORMAL = Pace()


def run(rule: Rule, trace: Trace, onset: float = 0.0, pace: Pace = NORMAL) -> Result:
    """Puts the trace through the rule's rollout until it ends or the trace does. `onset`: seconds at which a
    regression begins, for counting."""
    simulated = _Rollout(rule, trace, onset, pace)
    simulated.warm_up()
    while not simulated.over:
        simulated.turn()
    return simulated.result()


class _Rollout:
    def __init__(self, rule: Rule, trace: Trace, onset: float, pace: Pace) -> None:
        self._rule, self._trace, self._onset, self._pace = rule, trace, onset, pace
        self._teller = Teller(trace, verifies=rule.contract.can_fail)
        self._now = -WARM_UP_S
        self._asked = -WARM_UP_S
        self._status = RuleStatus(name=rule.name)
        self._quiet = rule.model_copy(update={"rollout": None})
        self._gate = align(None, self._quiet, self._status, _at(self._now))
        self._due: Schedule = EMPTY
        self._assigned = -WARM_UP_S
        self._next = 0
        self._candidates: Ints = np.zeros(0, np.int64)
        self._stages: list[tuple[float, str]] = []
        self._held: dict[str, float] = defaultdict(float)
        self._told: set[int] = set()
        self._violations: set[int] = set()
        self._num_candidate = 0
        self._num_exposed = 0
        self._narrowed = ""
        self.over = False

    def warm_up(self) -> None:
        """Stable alone, before the rollout is there."""
        self._decide(self._quiet)
        self._assign()
        self._hear(self._quiet, 0.0)
        self._now = 0.0
        self._decide(self._rule)

    def turn(self) -> None:
        """The next seconds of it, up to what may come next by time alone."""
        if self._now >= self._assigned:
            self._assign()
        ends = self._stage_ends()
        turn = self._pace.turn_s if self._now < ends else min(self._pace.turn_s, OVERDUE_S)
        until = min(self._now + turn, self._assigned, self._trace.seconds)
        if self._now < ends < until:
            until = ends
        if not self._hear(self._rule, until):
            self._held[self._status.held] += until - self._now
            self._now = until
            if self._worth_asking():
                self._decide(self._rule)
        if self._now >= self._trace.seconds:
            self.over = True

    def result(self) -> Result:
        """How it ended."""
        status = self._status
        outcome = _OUTCOMES.get(status.phase, "unfinished")
        if self._narrowed and outcome != "rolled-back":
            outcome = "narrowed"
        last = status.history[-1] if status.history else None
        self._count(self._now)
        return Result(
            outcome=outcome,
            seconds=self._now,
            reason=last.reason if last else "",
            message=self._narrowed or (last.message if last else ""),
            num_exposed=self._num_exposed,
            num_told=len(self._told),
            num_violations=len(self._violations),
            num_candidate=self._num_candidate,
            stages=tuple(self._stages),
            held={name: round(seconds, 3) for name, seconds in self._held.items() if name},
        )

    def _hear(self, rule: Rule, until: float) -> bool:
        """Folds what arrives until then. True: it was decided upon on the way, and time stands there."""
        last = int(np.searchsorted(self._due.at, until, side="right"))
        rows = self._due.rows(self._next, last)
        seen = [self._teller.observation(row, self._status.attempt) for row in rows]
        num, fired = self._fold(rows, seen, until)
        for row, one in zip(rows[:num], seen, strict=False):
            if row[3] and row[0] - row[6] >= self._onset:
                self._told.add(row[1])
                if one.hard_violations:
                    self._violations.add(row[1])
        self._next += num
        if not fired:
            return False
        self._now = rows[num - 1][0]
        self._decide(rule)
        return True

    def _fold(self, rows: list[Row], seen: list[Observation], until: float) -> tuple[int, bool]:
        """Folds all, or where it is to be exact as many as it takes until something fires; how many, and
        whether it did."""
        if not self._pace.exact or until <= self._onset or not rows:
            self._gate = fold(self._gate, seen)
            return len(rows), False
        before = pickle.dumps(self._gate)
        self._gate = fold(self._gate, seen)
        if not verdict(self._gate, _at(rows[-1][0])).reason:
            return len(rows), False
        silent, fires = 0, len(rows)
        while fires - silent > 1:
            middle = (silent + fires) // 2
            tried = fold(pickle.loads(before), seen[:middle])  # noqa: S301 (bytes of our own making)
            if verdict(tried, _at(rows[middle - 1][0])).reason:
                self._gate, fires = tried, middle
            else:
                silent = middle
        return fires, True

    def _worth_asking(self) -> bool:
        if verdict(self._gate, _at(self._now)).reason or self._status.phase not in _SERVING:
            return True
        return self._now >= self._asked + IDLE_S or self._now >= self._stage_ends()

    def _stage_ends(self) -> float:
        """Seconds at which the stage's time is up; the past where it is not known."""
        status, rollout = self._status, self._rule.rollout
        if not status.stage_since or rollout is None:
            return self._now
        began = datetime.fromisoformat(status.stage_since).timestamp() - EPOCH
        if status.phase is Phase.STEP and status.step < len(rollout.steps):
            return began + rollout.steps[status.step].min_seconds
        if status.phase is Phase.SHADOWING and rollout.shadow is not None:
            return began + rollout.shadow.min_seconds
        return self._now

    def _decide(self, rule: Rule) -> None:
        """Asks until nothing more changes, and lets the gateway know."""
        for _ in range(8):
            before = self._status
            now = _at(self._now)
            self._gate = align(self._gate, rule, before, now)
            decision = decide(_POLICY, rule, before, self._gate, WORLD, now)
            self._status = decision.status
            self._gate = align(self._gate, rule, self._status, now)
            self._note(before)
            if not decision.material or self.over:
                break
        self._asked = self._now

    def _note(self, before: RuleStatus) -> None:
        after = self._status
        if (after.phase, after.step) != (before.phase, before.step) and after.phase is not Phase.STABLE:
            name = f"Step {after.step + 1}" if after.phase is Phase.STEP else after.phase.value
            self._stages.append((round(self._now, 3), name))
        if len(after.excluded) > len(before.excluded) and not self._narrowed:
            newest = after.excluded[-1]
            self._narrowed = f"{newest.task or newest.tenant}: {newest.message}"
            self.over = self._pace.narrowed_ends
        if after.phase in _OVER:
            self.over = True
        if _traffic(after) != _traffic(before):
            self._assign()

    def _assign(self) -> None:
        """Chooses the arms of the requests of the next while, unless something else is decided before."""
        trace, status = self._trace, self._status
        self._count(self._now)
        first = int(np.searchsorted(trace.times, self._now, side="left"))
        self._assigned = self._now + AHEAD_S
        requests = np.arange(first, int(np.searchsorted(trace.times, self._assigned, side="left")))
        may = eligible(self._rule, status, trace)[trace.task[requests], trace.tenant[requests]]
        candidate = may & (trace.bucket[requests] < status.weight / 100.0)
        ours = may & (status.attempt != "")
        none = np.zeros(len(requests), bool)
        parts = [self._teller.schedule(requests, candidate, none, ours)]
        mirrored = may & (trace.mirror_bucket[requests] < status.shadow_percent / 100.0)
        if mirrored.any():
            copies = requests[mirrored]
            yes = np.ones(len(copies), bool)
            parts.append(self._teller.schedule(copies, yes, yes, ours[mirrored]))
        rest = self._due.kept(np.arange(len(self._due)) >= self._next)
        rest = rest.kept(trace.times[rest.request] < self._now)
        self._due, self._next = merged([rest, *parts]), 0
        self._candidates = requests[candidate]

    def _count(self, until: float) -> None:
        """Counts what has been sent under the assignment that ends now."""
        times = self._trace.times[self._candidates]
        sent = times < until
        self._num_candidate += int(sent.sum())
        self._num_exposed += int((sent & (times >= self._onset)).sum())
        self._candidates = self._candidates[~sent]


def eligible(rule: Rule, status: RuleStatus, trace: Trace) -> Bools:
    """Which requests the candidate may get now, by task (rows) and tenant (columns)."""
    who = eligibility(rule, status)
    return np.array([[who.allows(task, tenant) for tenant in trace.tenants] for task in trace.tasks], bool)


def _traffic(status: RuleStatus) -> tuple[object, ...]:
    """What the gateway is told; a difference reassigns."""
    where = status.phase, status.step, len(status.excluded), status.attempt
    return status.weight, status.shadow_percent, *where


def _at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)
