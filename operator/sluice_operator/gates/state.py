"""What a gate holds, and how a batch of observations goes through it.

Invariant: the order of a batch is the order of arrival, and what a batch says does not depend on where it was
cut off: thresholds, slices, buckets and blocks are renewed at points that the requests themselves make.

The way of a batch: answers of an earlier attempt's candidate fall out; pairs go to the comparison of answers,
hard violations to the hard gates; the rest, as columns, gets its thresholds from stable's values before it,
is judged by every test, and then adds its own values, samples and figures for the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..api.guards import GuardMode, Metric
from ..api.rollout import RollbackScope
from ..api.routepolicy import Refusals, Rule
from ..api.rulestatus import RuleStatus
from . import sequential
from .agreement import Agreement
from .agreement import restored as restored_agreement
from .attribution import attribute
from .battery import Kind, battery, hourly_part, num_stages
from .checkpoint import restore
from .columns import Bools, Columns, Floats, bools
from .coverage import counters
from .evidence import Evidence
from .hard import HardGates
from .keys import NO_TRAFFIC, key_of, share_of, stage_of, traffic_of, unix
from .meaning import Batch, flagged
from .observation import ArmName, Observation
from .seen import Answered
from .slices import Slices
from .summary import Summary
from .window import StableValues
from .words import told_of

GAIN_LEVEL = 0.05
"""Chance that a gain is called shown that is not there, over all gains and restarts."""

_NEGATIVE = frozenset(("wrong", "returned", "follow_up"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the evidence says."""

    reason: str = ""
    """HardGateBroken, GuardFired or QueryFired; empty: nothing has fired."""
    message: str = ""
    """The evidence, for people."""
    slice: tuple[str, str] | None = None
    """Task and tenant that it speaks against, "" for any; None: the whole rule."""
    leak: bool = False
    """Whether the broken check tells of a leak."""

    @property
    def hard(self) -> bool:
        """Whether one request was enough."""
        return self.reason == "HardGateBroken"


class GateState:
    """Evidence of one rule. Mutable, owned by one caller; only `fold`, `align`, `deafen` and `take_query`
    change it."""

    def __init__(self, rule: Rule, status: RuleStatus, since: float, before: GateState | None) -> None:
        self.key, self.stage = key_of(status), stage_of(status)
        self.stable_identity = (status.stable.backend, status.stable.identity)
        self.since = since
        """Unix seconds; requests that began earlier count for no guard."""
        self.until = math.inf
        """Unix seconds; nor do those that began later, after the candidate's traffic was taken away."""
        self.aligned = 0.0
        """When it was last aligned, Unix seconds: one that is asked at an earlier time has a clock that was
        set back."""
        self.traffic = traffic_of(status)
        """Weight and shadow percent that the evidence is about."""
        self.share = share_of(status)
        """The candidate's fraction of all requests seen; None: there is nothing to compare with."""
        self.rule = rule
        self.num_samples, self.num_stable_samples = status.num_samples, status.num_stable_samples
        self.fired: Verdict | None = None
        self.fired_time: float | None = None
        """Arrival of the observation at which it fired, Unix seconds: a batch may hold later ones."""
        self.lacking: tuple[str, ...] = ()
        """Metrics of which nothing of stable's is known, so that the candidate's newest answer could not be
        judged."""
        self.queries = {one.name: one for one in status.queries}
        self.coverage = counters(rule, status)
        rollout = rule.rollout
        alpha = float(rollout.alpha) if rollout is not None else 0.0
        self._needless = rule.contract.refusals is Refusals.NEEDLESS
        self._inherit(rule, status, before)
        self._revive(status, alpha)

    def _inherit(self, rule: Rule, status: RuleStatus, before: GateState | None) -> None:
        """What outlives a gate."""
        same_stable = before is not None and before.stable_identity == self.stable_identity
        same_attempt = before is not None and before.key[:1] == self.key[:1]
        same_gates = before is not None and before.key[:2] == self.key[:2]
        self.stable: StableValues = before.stable if before is not None and same_stable else StableValues()
        self.hard: HardGates = before.hard if before is not None and same_gates else HardGates(rule.contract)
        kept = before if same_attempt else None
        self.answered: Answered = kept.answered if kept is not None else Answered()
        self.agreement: Agreement = kept.agreement if kept is not None else restored_agreement(status)
        self.summary: Summary = kept.summary if kept is not None else Summary()
        self.shown = frozenset(one.name for one in status.gains if one.shown)
        if kept is not None and same_gates:
            self.shown |= kept.shown

    def _revive(self, status: RuleStatus, alpha: float) -> None:
        """Evidence out of the checkpoint, and what people said from the gate before."""
        tests = battery(self.rule)
        self.threshold = sequential.threshold(
            hourly_part(tests.tests) * alpha, status.num_restarts, num_stages(self.rule)
        )
        self._armed = frozenset(test.metric for test in tests.tests if test.weight > 0.0)
        slices = Slices([(one.task, one.tenant) for one in status.slices])
        began = unix(status.evidence_since) or self.since
        self.evidence = Evidence(tests, slices, alpha, min(began, self.since))
        elapsed = max(0.0, self.since - began) if status.evidence_since else sequential.JOINED_S
        restore(self.evidence, status, elapsed)
        self.complained_since = unix(status.stage_since) or self.since

    def keep_late(self, before: GateState) -> None:
        """What outlives a restart of evidence: clusters for as long as the attempt, since each has its own
        part of alpha, and within a stage feedback, which comes late."""
        if before.key[:2] == self.key[:2]:
            self.evidence.jumps = before.evidence.jumps
            if before.traffic != self.traffic or before.share != self.share:
                for jump in self.evidence.jumps.values():
                    jump.rest()
        if before.stage == self.stage and before.key[:2] == self.key[:2]:
            self.complained_since = before.complained_since
            self.evidence.keep(before.evidence, Metric.NEGATIVE_FEEDBACK_RATE)

    def take(self, seen: Observation) -> None:
        """Takes in one observation."""
        self.take_all([seen])

    def take_all(self, observations: Iterable[Observation]) -> None:
        """Takes observations in, in order of arrival."""
        attempt, candidate = self.key[0], ArmName.CANDIDATE
        rows = [
            one
            for one in observations
            if one.arm is not candidate or (one.attempt == attempt and attempt != "")
        ]
        if not rows:
            return
        columns = Columns(rows)
        pairs = self._pairs(rows, np.flatnonzero(columns.flags["pair"]).tolist())
        if self.hard.waiting or any(columns.hard_violations):
            self._hard(rows)
        ours = bools([one == attempt for one in columns.attempt]) & (attempt != "")
        heard = bools([one != "" for one in columns.feedback])
        plain = ~(columns.flags["pair"] | heard)
        counted = plain & ours & self._in_stage(columns)
        new = self._answered(columns, plain)
        ended = new | (plain & columns.flags["failed"])
        above = columns.above_all(self._needless)
        limits = self.stable.take(columns, ended & ~columns.candidate, above, self.evidence.battery)
        said = ours & bools([one in _NEGATIVE for one in columns.feedback])
        complained = said & (columns.begin >= self.complained_since)
        ended &= counted
        self._judge(Batch(columns, counted, ended, complained, pairs, limits, self._needless), new)
        self._hard_guards(rows, columns, plain & ours, said)
        if ours.any():
            self.summary.take(columns, ours & plain, new, said, self._needless)

    def _in_stage(self, columns: Columns) -> Bools:
        if self.traffic == NO_TRAFFIC:
            return np.zeros(columns.size, bool)
        mirrored = columns.candidate if self.traffic[1] > 0 else np.zeros(columns.size, bool)
        begin = columns.begin
        found: Bools = (self.since <= begin) & (begin <= self.until) & (columns.flags["mirror"] == mirrored)
        return found

    def _answered(self, columns: Columns, plain: Bools) -> Bools:
        """Requests that ended well enough to be samples, each once."""
        numbers, flags = columns.numbers, columns.flags
        measured = ~np.isnan(numbers["ttft_s"]) | ~np.isnan(numbers["total_s"])
        ended = plain & measured & ~columns.running & ~flags["failed"]
        found = np.zeros(columns.size, bool)
        found[self.answered.new(np.flatnonzero(ended), columns.candidate, columns.request)] = True
        return found

    def _judge(self, batch: Batch, new: Bools) -> None:
        columns, counted, evidence = batch.columns, batch.counted, self.evidence
        task = evidence.slices.tasks(columns.task)
        places = evidence.slices.places(columns, task, counted)
        series = evidence.take(batch, places, task, self.share)
        answered = counted & new
        samples = answered & (~columns.candidate | self._judged(batch, answered & columns.candidate))
        evidence.samples += places.count(samples, columns.candidate)
        evidence.ended += places.count(batch.ended, columns.candidate)
        candidate = samples & columns.candidate
        self.num_samples += int(candidate.sum())
        self.num_stable_samples += int(samples.sum() - candidate.sum())
        self.coverage.take(columns, candidate)
        self._look(series, columns.time)

    def _judged(self, batch: Batch, asked: Bools) -> Bools:
        """Whether every guard that can fire could have said something; with no stable traffic beside it only
        ceilings and hard gates can. `asked`: rows that it matters of."""
        found = np.ones(batch.columns.size, bool)
        newest, lacking = np.flatnonzero(asked)[-1:], []
        for metric, limits in batch.limits.items():
            if self.share is None or metric not in self._armed:
                continue
            unknown = batch.columns.value(metric)[1] & np.isnan(limits.column(0))
            found &= ~unknown
            if unknown[newest].any():
                lacking.append(metric.value)
        if len(newest):
            self.lacking = tuple(lacking)
        return found

    def _look(self, series: Floats | None, time: Floats) -> None:
        """Whether the evidence has reached its threshold anywhere in the batch."""
        if series is None:
            return
        self._gains()
        if self.fired is not None:
            return
        rows = [int((series >= self.threshold).argmax())] if series.max() >= self.threshold else []
        jumped = self.evidence.jumped
        if jumped is not None:
            rows.append(jumped[0])
        if not rows:
            return
        first = min(rows)
        self.fired_time = float(time[first])
        bank = self.evidence.bank
        by_cluster = jumped is not None and jumped[0] == first
        test = jumped[1] if jumped is not None and by_cluster else bank.hottest(first) % bank.num_tests
        narrow = self.rule.rollout is not None and self.rule.rollout.rollback_scope is RollbackScope.NARROWEST
        blamed = attribute(self.evidence, test) if narrow else None
        self.fired = Verdict("GuardFired", told_of(self.evidence, test, self.share, blamed), blamed)

    def _gains(self) -> None:
        gains = [at for at, test in enumerate(self.evidence.battery.tests) if test.kind is Kind.GAIN]
        if not gains:
            return
        level = sequential.threshold(GAIN_LEVEL / len(gains), self.key[2], num_stages(self.rule))
        e_values = self.evidence.bank.e_values()
        self.shown |= {self.evidence.battery.tests[at].name for at in gains if e_values[at] >= level}

    def _pairs(self, rows: Sequence[Observation], pairs: Sequence[int]) -> list[tuple[int, bool]]:
        """Greedy answers compared; which rows completed a triple of which exactly one answer is odd."""
        found = []
        for row in pairs:
            seen = rows[row]
            if seen.attempt == self.key[0] != "":
                odd = self.agreement.take(seen)
                if odd is not None and seen.time - seen.age_s >= self.since:
                    found.append((row, odd))
        return found

    def _hard(self, rows: Sequence[Observation]) -> None:
        """Hard violations, one by one and in order."""
        ended: set[str] = set()
        for seen in rows:
            if seen.arm is ArmName.CANDIDATE:
                known = seen.request_id in ended or (False, seen.request_id) in self.answered
                if seen.hard_violations:
                    self.hard.take_candidate(seen, known)
                continue
            self.hard.take_stable(seen)
            ended_well = not (seen.pair or seen.censored or seen.cancelled or seen.failed)
            if ended_well and (seen.ttft_s is not None or seen.total_s is not None):
                ended.add(seen.request_id)

    def _hard_guards(self, rows: Sequence[Observation], columns: Columns, mine: Bools, said: Bools) -> None:
        """Rates of which a guard in mode Hard allows the candidate none."""
        rollout = self.rule.rollout
        for guard in rollout.guards if rollout is not None else ():
            if guard.mode is not GuardMode.HARD:
                continue
            bad = (
                said
                if guard.metric is Metric.NEGATIVE_FEEDBACK_RATE
                else (flagged(guard.metric, columns, self._needless) & mine)
            )
            for row in np.flatnonzero(bad & columns.candidate).tolist():
                if not guard.tasks or rows[row].task in guard.tasks:
                    self.hard.take_hard_guard(guard.metric.value, rows[row])
                    break
