"""What the operator makes of a rule: where its rollout stands, with the evidence that led there.

Invariant: the status alone suffices to go on after a restart of the operator.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from .common import Percent, Spec
from .declare import keyed_by


class Phase(StrEnum):
    """Where a rule's rollout stands. For people and printing; conditions carry the meaning."""

    STABLE = "Stable"
    EVALUATING = "Evaluating"
    SHADOWING = "Shadowing"
    STEP = "Step"
    WATCHING = "Watching"
    PROMOTED = "Promoted"
    ROLLED_BACK = "RolledBack"
    ABORTED = "Aborted"


class ArmStatus(Spec):
    """An arm as it was when the attempt began."""

    backend: str = ""
    """InferenceBackend."""
    identity: str = ""
    """Digest of what its pods loaded, where known."""
    config: str = ""
    """Configuration version that its pods hold for this rule."""


class GuardStatus(Spec):
    """Evidence of one guard, checkpointed so that a restart goes on where it was."""

    name: str
    """Metric and percentile, such as TTFT/p95."""
    log_wealth: list[str] = Field(default_factory=list)
    """Natural logarithms of the wealth of each alternative, decimal strings; empty: no bad event yet."""
    num_bad_stable: int = 0
    """Bad events of stable since evidence last restarted."""
    num_bad_candidate: int = 0
    """Bad events of the candidate since evidence last restarted."""


class SliceStatus(Spec):
    """Evidence of the requests of one task, of one tenant, or of both together."""

    task: str = ""
    """Task; empty: any."""
    tenant: str = ""
    """Tenant; empty: any."""
    num_samples: int = 0
    """Candidate requests of it judged in this stage."""
    guards: list[GuardStatus] = Field(default_factory=list)
    """Guards that have seen a bad event."""


class ExclusionStatus(Spec):
    """A task or tenant that was rolled back alone."""

    task: str = ""
    """Task; empty: any."""
    tenant: str = ""
    """Tenant; empty: any."""
    reason: str
    """GuardFired, HardGateBroken or EvaluationFailed; Excluded: by a person's edit."""
    message: str
    """With the evidence that caused it, for people."""
    time: str
    """RFC 3339."""
    attempt: str = ""
    """Attempt that it is of; empty: the one under way."""


class TaskRate(Spec):
    """How many samples of one task passed."""

    task: str
    """Task."""
    num_samples: int
    """Samples that ran."""
    num_passed: int
    """Samples that met every expectation."""


class EvaluationStatus(Spec):
    """The newest run of the suites in this attempt."""

    stage: str = ""
    """What it was for: Start, Step/2, OnDemand …"""
    attempt: str = ""
    """Attempt that it judges; of another one it says nothing. Empty: the one under way."""
    suites: list[str] = Field(default_factory=list)
    """Suites that ran, each as name@digest."""
    without: list[str] = Field(default_factory=list)
    """Tasks of theirs that were not asked about, since the candidate does not get them."""
    started: str = ""
    """RFC 3339."""
    ended: str = ""
    """RFC 3339; empty: running."""
    candidate: list[TaskRate] = Field(default_factory=list)
    """By task."""
    stable: list[TaskRate] = Field(default_factory=list)
    """The same samples answered by stable, by task."""
    failed_hard: list[str] = Field(default_factory=list)
    """Hard samples that the candidate failed, as suite/sample."""
    failed: list[str] = Field(default_factory=list)
    """Other samples that the candidate failed, as suite/sample, at most 50."""
    error: str = ""
    """Why the run could not be finished; empty: it was."""


class TaskAgreement(Spec):
    """How often two greedy answers to the same request were the same."""

    task: str
    """Task."""
    num_pairs: int = 0
    """Requests that both arms answered."""
    num_equal: int = 0
    """Of these, where candidate and stable agree."""
    num_baseline_pairs: int = 0
    """Requests that stable answered twice."""
    num_baseline_equal: int = 0
    """Of these, where stable agrees with itself."""


class QueryStatus(Spec):
    """The newest values of a PromQL guard."""

    name: str
    """Name of the query."""
    candidate: str = ""
    """Its value, a decimal string; empty: none."""
    stable: str = ""
    """Stable's value, where the query compares."""
    num_failures: int = 0
    """Values in a row over the limit."""
    time: str = ""
    """RFC 3339 time of the newest value."""
    error: str = ""
    """Why there is no value."""


class CoverageStatus(Spec):
    """How much of a kind of traffic this step has seen."""

    name: str
    """Name in the step."""
    num_samples: int = 0
    """Candidate requests of this kind judged."""


class GainStatus(Spec):
    """Evidence for an expected gain, checkpointed."""

    name: str
    """Metric and percentile, such as TTFT/p50."""
    log_wealth: list[str] = Field(default_factory=list)
    """As of a guard, for the claim that the candidate is not better by as much."""
    num_bad_stable: int = 0
    """Bad events of stable since evidence last restarted."""
    num_bad_candidate: int = 0
    """Bad events of the candidate since evidence last restarted."""
    shown: bool = False
    """Whether the gain has been shown in this attempt."""


class Transition(Spec):
    """One line of history."""

    time: str
    """RFC 3339."""
    phase: Phase
    """Phase entered."""
    step: int | None = None
    """Index of the step entered."""
    reason: str
    """Machine-readable cause."""
    message: str
    """With the evidence that caused it, for people."""


class RuleStatus(Spec):
    """Observed state of one rule."""

    name: str
    """Name of the rule."""
    phase: Phase = Phase.STABLE
    """Where its rollout stands."""
    step: int = 0
    """Index of the current step, from 0."""
    weight: Percent = 0
    """Percent of requests that go to the candidate now."""
    shadow_percent: Percent = 0
    """Percent of requests that are mirrored to the candidate now."""
    attempt: str = ""
    """Hash of policy, rule, stable identity, candidate identity and rollout.attempt."""
    gates: str = ""
    """Hash of guards and contract; a change restarts the evidence."""
    stable: ArmStatus = Field(default_factory=ArmStatus)
    """The arm that serves."""
    candidate: ArmStatus = Field(default_factory=ArmStatus)
    """The arm under test."""
    held: str = ""
    """Why it is not advancing: NoEvidence, Paused, AwaitingApproval …; empty: advancing."""
    held_message: str = ""
    """What would let it go on, for people."""
    stage_since: str = ""
    """RFC 3339 time at which this stage's traffic began; empty: not begun."""
    evidence_since: str = ""
    """RFC 3339 time at which evidence last restarted; requests older than that count for no guard."""
    num_samples: int = 0
    """Candidate requests answered and judged in this stage; failures are evidence, but no samples."""
    num_stable_samples: int = 0
    """Stable requests judged in this stage."""
    min_samples: int = 0
    """Samples that this stage asks for, given or from the guards' power."""
    detects: str = ""
    """What such a stage would notice, for people: p95 × 2.1 in 9 of 10 cases."""
    guards: list[GuardStatus] = Field(default_factory=list)
    """Evidence of the guards over all requests of the rule."""
    slices: list[SliceStatus] = Field(default_factory=list)
    """Evidence by task and tenant."""
    gains: list[GainStatus] = Field(default_factory=list)
    """Evidence for the expected gains."""
    coverage: list[CoverageStatus] = Field(default_factory=list)
    """Kinds of traffic that this step must have seen."""
    queries: list[QueryStatus] = Field(default_factory=list, json_schema_extra=keyed_by("name"))
    """Newest values of the PromQL guards."""
    excluded: list[ExclusionStatus] = Field(default_factory=list)
    """Tasks and tenants that were rolled back alone; they stay so for the attempt."""
    excluded_before: list[ExclusionStatus] = Field(default_factory=list)
    """Those of earlier attempts, newest last, at most 64: they hold again should their attempt come back."""
    evaluation: EvaluationStatus | None = None
    """The newest run of the suites."""
    agreement: list[TaskAgreement] = Field(default_factory=list)
    """Greedy answers compared in the shadow stage, by task."""
    differing: list[str] = Field(default_factory=list)
    """Ids of requests whose greedy answers differed, newest last, at most 20; never their text."""
    rollback_cost: str = ""
    """What a rollback would cost now, for people: load that the target gets, caches that are cold there."""
    watch_until: str = ""
    """RFC 3339 time at which the watch ends."""
    num_restarts: int = 0
    """How often evidence has restarted; each restart has its own share of alpha."""
    rejected: list[str] = Field(default_factory=list)
    """Attempts that were rolled back or aborted, newest last, at most 100; none of them starts again."""
    leaked: bool = False
    """Whether a check that tells of a leak has ended the attempt: pods cut those of its candidate's requests
    that still run."""
    history: list[Transition] = Field(default_factory=list)
    """Newest last, at most 20."""
