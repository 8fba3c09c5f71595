"""All evidence of one rule in memory, and what it says.

Invariant: a gate belongs to one (attempt, hash of gates, number of restarts). `align` follows the status:
while those three are unchanged it keeps the gate, else it builds a new one from the checkpoint in the
status, which after a restart of evidence is empty. So there is one path for a new stage, an edit and a
restart of the operator. Only stable's windows outlive it.

A request that began before the evidence did counts for no guard: it was assigned under another weight, or
may have been counted before the operator restarted. Hard violations of the attempt always count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ..api.routepolicy import Metric, Phase, Rule, RuleStatus
from . import sequential
from .guard import VALUES, GuardEvidence, combined, guard_names
from .hard import HardGates
from .observation import ArmName, Observation
from .window import StableWindow

SETTLE_S = 1.0
"""After the candidate's share has been lowered, requests are still assigned under the old one for as
long as the gateway takes; they would look like too many. Seconds."""

_MAX_REMEMBERED = 20_000
_NO_TRAFFIC = (0, 0)


class GateState:
    """Evidence of one rule. Mutable, owned by one caller; only `fold`, `align` and `deafen` change it."""

    __slots__ = (
        "_answered", "fired", "guards", "hard", "key", "num_samples", "num_stable_samples", "share", "since",
        "stable_identity", "threshold", "traffic", "until", "windows",
    )

    def __init__(self, rule: Rule, status: RuleStatus, since: float, windows: dict[Metric, StableWindow],
                 hard: HardGates) -> None:
        self.key = key_of(status)
        self.stable_identity = (status.stable.backend, status.stable.identity)
        self.since = since
        """Unix seconds; requests that began earlier count for no guard."""
        self.until = math.inf
        """Unix seconds; nor do those that began later, after the candidate's traffic was taken away."""
        self.windows = windows
        self.hard = hard
        guards = rule.rollout.guards if rule.rollout is not None else []
        saved = {guard.name: guard for guard in status.guards}
        self.guards = [
            GuardEvidence(name, guard, windows.get(guard.metric), saved.get(name))
            for name, guard in zip(guard_names(guards), guards, strict=True)
        ]
        alpha = float(rule.rollout.alpha) if rule.rollout is not None else 0.0
        self.threshold = sequential.threshold(alpha, status.num_restarts)
        self.traffic = _traffic(status)
        """Weight and shadow percent that the evidence is about."""
        self.share = share_of(status)
        """The candidate's fraction of all requests seen; None: there is nothing to compare with."""
        self.num_samples = status.num_samples
        self.num_stable_samples = status.num_stable_samples
        self.fired: Verdict | None = None
        self._answered: tuple[dict[str, None], dict[str, None]] = ({}, {})
        """Ids of requests that ended, by stable and candidate; the oldest are forgotten."""

    def take(self, seen: Observation) -> None:
        """Takes in one observation."""
        candidate = seen.arm is ArmName.CANDIDATE
        ours = seen.attempt == self.key[0] != ""
        if candidate and not ours:
            return
        if candidate:
            if seen.hard_violations:
                self.hard.take_candidate(seen, seen.request_id in self._answered[False])
        else:
            self.hard.take_stable(seen)
        mirroring = self.traffic[1] > 0
        in_stage = (
            ours and self.since <= seen.time - seen.age_s <= self.until
            and seen.mirror is (candidate and mirroring) and self.traffic != _NO_TRAFFIC
        )
        if in_stage and self.share is not None:
            self._test(seen, candidate, self.share)
        self._sample(seen, candidate, in_stage)

    def _test(self, seen: Observation, candidate: bool, share: float) -> None:
        changed = False
        for guard in self.guards:
            changed |= guard.take(seen, candidate, share)
        if changed and self.fired is None and combined(self.guards) >= self.threshold:
            self.fired = _fired(self.guards, share, seen.time)

    def _sample(self, seen: Observation, candidate: bool, in_stage: bool) -> None:
        """Counts an answered request, and puts stable's values into the windows: after the test, never
        before it."""
        measured = seen.ttft_s is not None or seen.total_s is not None
        if seen.censored or seen.cancelled or seen.failed or not measured:
            return
        answered = self._answered[candidate]
        if seen.request_id in answered:
            return
        answered[seen.request_id] = None
        if len(answered) > _MAX_REMEMBERED:
            del answered[next(iter(answered))]
        if candidate:
            self.num_samples += in_stage and self._judged(seen)
            return
        self.num_stable_samples += in_stage
        for metric, window in self.windows.items():
            value = VALUES[metric](seen)
            if value is not None:
                window.add(seen.time, value)

    def _judged(self, seen: Observation) -> bool:
        """Whether every guard could have said something; with no stable traffic beside it only hard
        gates can."""
        if self.share is None:
            return True
        return all(
            guard.window is None or guard.value(seen) is None or guard.limit(True, seen.time) is not None
            for guard in self.guards
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the evidence says."""

    reason: str = ""
    """HardGateBroken or GuardFired; empty: nothing has fired."""
    message: str = ""
    """The evidence, for people."""


def align(gate: GateState | None, rule: Rule, status: RuleStatus, now: datetime) -> GateState:
    """The gate that belongs to `status`: the same one where it still fits, else one built from the
    checkpoint in it."""
    time = now.timestamp()
    if gate is not None and gate.key == key_of(status):
        _follow_weight(gate, status, time)
        return gate
    same_stable = gate is not None and gate.stable_identity == (status.stable.backend, status.stable.identity)
    same_attempt = gate is not None and gate.key[:2] == key_of(status)[:2]
    windows = gate.windows if gate is not None and same_stable else {}
    # Also without a guard or a rollout: the next one then knows from its first request what slow is.
    windows = {metric: windows.get(metric) or StableWindow() for metric in VALUES}
    hard = gate.hard if gate is not None and same_attempt else HardGates(rule.contract)
    since = max(time, _unix(status.evidence_since))
    return GateState(rule, status, since, windows, hard)


def fold(gate: GateState, observations: Iterable[Observation]) -> GateState:
    """Takes observations in, in order of arrival. Returns the same gate."""
    for seen in observations:
        gate.take(seen)
    return gate


def deafen(gate: GateState, now: datetime) -> None:
    """Stable can't be heard now, so a bad event would look like the candidate's whoever had more of them:
    requests that began before now count for no guard. Hard gates, which compare nothing, stay armed."""
    gate.since = max(gate.since, now.timestamp())


def verdict(gate: GateState, now: datetime) -> Verdict:
    """What the evidence says now. Changes nothing."""
    broken = gate.hard.violation(now.timestamp())
    if broken is not None:
        where = "mirrored request" if broken.mirror else "request"
        told = f"check {broken.check} failed in {where} {broken.request_id} of {broken.tenant}"
        return Verdict("HardGateBroken", told)
    return gate.fired or Verdict()


def checkpoint(gate: GateState, status: RuleStatus) -> RuleStatus:
    """`status` with the gate's evidence in it, if the gate belongs to it; else `status` unchanged."""
    if not belongs(gate, status):
        return status
    return status.model_copy(update={
        "num_samples": gate.num_samples, "num_stable_samples": gate.num_stable_samples,
        "guards": [guard.status() for guard in gate.guards],
    })


def belongs(gate: GateState, status: RuleStatus) -> bool:
    """Whether the gate's evidence is about what `status` says is going on."""
    return gate.key == key_of(status)


def key_of(status: RuleStatus) -> tuple[str, str, int]:
    """What evidence is about."""
    return status.attempt, status.gates, status.num_restarts


def share_of(status: RuleStatus) -> float | None:
    """The candidate's fraction of all requests seen, in (0, 1); None where one arm has no traffic.

    A mirror is a copy: of 100 requests with 25 mirrored, 125 are seen and the candidate's share is 25/125.
    """
    if status.phase is Phase.SHADOWING and status.shadow_percent > 0:
        return status.shadow_percent / (100 + status.shadow_percent)
    if status.phase is Phase.STEP and 0 < status.weight < 100:
        return status.weight / 100
    return None


def _follow_weight(gate: GateState, status: RuleStatus, time: float) -> None:
    traffic = _traffic(status)
    if traffic == _NO_TRAFFIC:
        gate.until = min(gate.until, time)  # what was sent before still tells: a pod may have died of it
        return
    if traffic == gate.traffic and gate.until == math.inf:
        return
    before, gate.share, gate.traffic = gate.share, share_of(status), traffic
    lowered = before is not None and (gate.share is None or gate.share < before)
    gate.since, gate.until = max(gate.since, time + (SETTLE_S if lowered else 0.0)), math.inf


def _traffic(status: RuleStatus) -> tuple[int, int]:
    return status.weight, status.shadow_percent


def _fired(guards: list[GuardEvidence], share: float, time: float) -> Verdict:
    worst = max(guards, key=lambda guard: guard.e_value)
    num = worst.num_bad_candidate + worst.num_bad_stable
    told = f"{worst.name}: {worst.num_bad_candidate} of {num} bad requests were the candidate's"
    told += f", whose share is {share:.0%}"
    limit = worst.limit(True, time)
    if limit is not None:
        told += f"; slow is above {limit:.3g} s, {worst.tolerance:.2f} times stable's p{worst.percentile}"
    return Verdict("GuardFired", told)


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
