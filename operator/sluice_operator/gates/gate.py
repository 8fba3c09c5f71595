"""All evidence of one rule in memory, and what it says.

Invariant: a gate belongs to one (attempt, hash of gates, number of restarts). `align` follows the status:
while those three are unchanged it keeps the gate, else it builds a new one from the checkpoint in the
status, which after a restart of evidence is empty. So there is one path for a new stage, an edit and a
restart of the operator. Only stable's values outlive it; within an attempt also hard violations, pairs, the
ledger's figures and gains that were shown, and within a stage what people say of its answers.

A request that began before the evidence did counts for no guard: it was assigned under another weight, or
may have been counted before the operator restarted. Hard violations of the attempt always count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime

from ..api.routepolicy import Rule
from ..api.rulestatus import QueryStatus, RuleStatus
from .checkpoint import gains_of, guards_of, slices_of
from .coverage import wanted_of
from .keys import NO_TRAFFIC, key_of, share_of, traffic_of, unix
from .observation import Observation
from .queries import fires, judged, told
from .state import GateState, Verdict

SETTLE_S = 1.0
"""After the candidate's share has been lowered, requests are still assigned under the old one for as
long as the gateway takes; they would look like too many. Seconds."""

CLOCK_SLACK_S = 2.0
"""By so much a clock may be behind an earlier reading, or another operator's, before it counts as set back:
requests began before the evidence then, and would count for no guard until it has caught up."""


def align(gate: GateState | None, rule: Rule, status: RuleStatus, now: datetime) -> GateState:
    """The gate that belongs to `status`: the same one where it still fits, else one built from the
    checkpoint in it. After the clock was set back nothing fits that was timed by it: it is then as after a
    restart of the operator."""
    time = now.timestamp()
    set_back = gate is not None and gate.fired is None and time < gate.aligned - CLOCK_SLACK_S
    if gate is not None and gate.key == key_of(status) and not set_back:
        _follow_weight(gate, status, time)
        if gate.rule is not rule:
            gate.coverage.follow(wanted_of(rule, status))
        gate.rule, gate.aligned = rule, time
        return gate
    fresh = GateState(rule, status, max(time, unix(status.evidence_since)), gate)
    fresh.aligned = time
    if gate is not None and not set_back:
        fresh.keep_late(gate)
    return fresh


def fold(gate: GateState, observations: Iterable[Observation]) -> GateState:
    """Takes observations in, in order of arrival. Returns the same gate."""
    gate.take_all(observations)
    return gate


def deafen(gate: GateState, now: datetime) -> None:
    """Stable can't be heard now, so a bad event would look like the candidate's whoever had more of them:
    requests that began before now count for no guard. Hard gates, which compare nothing, stay armed."""
    gate.since = max(gate.since, now.timestamp())


def take_query(
    gate: GateState, name: str, candidate: float | None, stable: float | None, now: datetime, error: str = ""
) -> QueryStatus:
    """Takes in a value of a PromQL guard, or `error`: why there is none. Returns its status, which is in the
    next checkpoint too. Raises KeyError for a query that the rollout does not have."""
    rollout = gate.rule.rollout
    query = next((one for one in rollout.queries if one.name == name), None) if rollout is not None else None
    if query is None:
        raise KeyError(f"the rollout has no query {name!r}: take its name from rollout.queries")
    status = gate.queries[name] = judged(query, gate.queries.get(name), candidate, stable, now, error)
    return status


def verdict(gate: GateState, now: datetime) -> Verdict:
    """What the evidence says now. Changes nothing. A hard violation always speaks against the whole rule:
    what breaks its form for one may break it for all."""
    leaks = frozenset(check.name for check in gate.rule.contract.checks if check.leak)
    broken = gate.hard.violation(now.timestamp(), leaks)
    if broken is not None:
        where = "mirrored request" if broken.mirror else "request"
        said = f"check {broken.check} failed in {where} {broken.request_id} of {broken.tenant}"
        return Verdict("HardGateBroken", said, leak=broken.check in leaks)
    if gate.fired is not None:
        return gate.fired
    for query in gate.rule.rollout.queries if gate.rule.rollout is not None else ():
        status = gate.queries.get(query.name)
        if status is not None and fires(query, status):
            return Verdict("QueryFired", told(query, status))
    return Verdict()


def checkpoint(gate: GateState, status: RuleStatus) -> RuleStatus:
    """`status` with the gate's evidence in it, if the gate belongs to it; else `status` unchanged."""
    if not belongs(gate, status):
        return status
    names = [query.name for query in gate.rule.rollout.queries] if gate.rule.rollout is not None else []
    return status.model_copy(
        update={
            "num_samples": gate.num_samples,
            "num_stable_samples": gate.num_stable_samples,
            "guards": guards_of(gate.evidence),
            "slices": slices_of(gate.evidence),
            "gains": gains_of(gate.evidence, gate.shown),
            "coverage": gate.coverage.status(),
            "agreement": gate.agreement.status(),
            "differing": gate.agreement.differing,
            "queries": [gate.queries[name] for name in names if name in gate.queries],
        }
    )


def belongs(gate: GateState, status: RuleStatus) -> bool:
    """Whether the gate's evidence is about what `status` says is going on."""
    return gate.key == key_of(status)


def _follow_weight(gate: GateState, status: RuleStatus, time: float) -> None:
    traffic = traffic_of(status)
    if traffic == NO_TRAFFIC:
        gate.until = min(gate.until, time)  # what was sent before still tells: a pod may have died of it
        return
    if traffic == gate.traffic and gate.until == math.inf:
        return
    before, gate.share, gate.traffic = gate.share, share_of(status), traffic
    lowered = before is not None and (gate.share is None or gate.share < before)
    gate.since, gate.until = max(gate.since, time + (SETTLE_S if lowered else 0.0)), math.inf
    gate.complained_since = gate.since
