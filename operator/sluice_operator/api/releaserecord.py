"""ReleaseRecord: what was tried, with what evidence, and how it ended. The operator alone writes it.

It has no owner reference, so that it outlives the policy, and holds enough to rebuild a lost status from.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field

from .common import Metadata, Spec
from .declare import AGE, FREE_FORM, Column, Kind
from .rollout import Waiver
from .rulestatus import EvaluationStatus, ExclusionStatus, TaskAgreement, Transition


class Outcome(StrEnum):
    """How an attempt ended, if it has."""

    RUNNING = "Running"
    PROMOTED = "Promoted"
    ROLLED_BACK = "RolledBack"
    ABORTED = "Aborted"
    SUPERSEDED = "Superseded"


class ReviewOutcome(StrEnum):
    """What a repeated comparison says."""

    KEEP = "Keep"
    LIMIT = "Limit"
    GO_BACK = "GoBack"
    LOOK_LONGER = "LookLonger"


class Quantiles(Spec):
    """Of one value over the attempt, seconds or money as decimal strings; empty: nothing measured."""

    p50: str = ""
    """Median."""
    p95: str = ""
    """95th percentile."""
    p99: str = ""
    """99th percentile."""


class ArmEvidence(Spec):
    """What one arm did in the attempt, mirrored requests included."""

    num_requests: int = 0
    """Requests that ended."""
    num_mirrored: int = 0
    """Of these, mirrored ones."""
    ttft_seconds: Quantiles = Field(default_factory=Quantiles)
    """Arrival to first token."""
    time_to_verified_seconds: Quantiles = Field(default_factory=Quantiles)
    """Arrival to the first of an answer that had passed its contract."""
    time_per_token_seconds: Quantiles = Field(default_factory=Quantiles)
    """Mean time per output token after the first."""
    total_seconds: Quantiles = Field(default_factory=Quantiles)
    """Whole request."""
    counts: dict[str, int] = Field(default_factory=dict)
    """Requests that went wrong, by metric: ErrorRate, TruncationRate …"""
    prompt_tokens: int = 0
    """Tokens read."""
    cached_tokens: int = 0
    """Of these, found in the prefix cache."""
    output_tokens: int = 0
    """Tokens written."""
    guessed_tokens: int = 0
    """Tokens guessed by speculative decoding."""
    accepted_tokens: int = 0
    """Of these, written."""
    busy_seconds: str = ""
    """Seconds of service summed over requests, a decimal string."""
    replica_hours: str = ""
    """Hours of replicas, idle included, a decimal string; GPU hours where each holds GPUs."""
    peak_kv_percent: int = 0
    """Fullest KV cache of a pod that was seen."""
    cost: str = ""
    """Price of those hours, a decimal string; empty: the backend names none."""
    cost_per_success: str = ""
    """Price divided by requests that went right."""
    currency: str = ""
    """ISO 4217 code."""


class ArmRecord(Spec):
    """One arm: what it was, and what it did."""

    backend: str = ""
    """InferenceBackend."""
    identity: str = ""
    """Digest of what its pods loaded."""
    config: str = ""
    """Configuration version that its pods held."""
    parameters: dict[str, Any] = Field(default_factory=dict, json_schema_extra=FREE_FORM)
    """Model, engine settings, resources, hardware, features, cache scope, sampling, time-outs."""
    evidence: ArmEvidence = Field(default_factory=ArmEvidence)
    """What it did."""


class Gates(Spec):
    """What it was judged by."""

    alpha: str = ""
    """Chance of a false rollback."""
    guards: list[str] = Field(default_factory=list)
    """Guards, each in words."""
    checks: list[str] = Field(default_factory=list)
    """Checks of the contract, each in words."""
    suites: list[str] = Field(default_factory=list)
    """Suites that ran, each as name@digest."""
    gains: list[str] = Field(default_factory=list)
    """Expected gains, each in words, with whether they were shown."""


class Review(Spec):
    """A repeated comparison."""

    time: str
    """RFC 3339."""
    outcome: ReviewOutcome
    """What it says."""
    message: str
    """With its evidence."""


class ReleaseRecordSpec(Spec):
    """The record of one attempt."""

    policy: str
    """RoutePolicy, of the same namespace."""
    policy_uid: str = ""
    """Its uid: another policy of the same name starts with a clean slate."""
    model: str = ""
    """Public model name."""
    rule: str
    """Rule."""
    attempt: str
    """Hash of the attempt."""
    number: int = 1
    """`rollout.attempt`."""
    outcome: Outcome = Outcome.RUNNING
    """How it ended."""
    reason: str = ""
    """Machine-readable cause of the outcome."""
    message: str = ""
    """The decision with its evidence, for people."""
    why: str = ""
    """Why the release was made, in its owner's words."""
    owner: str = ""
    """Who answers for it."""
    incident: str = ""
    """The incident that it belongs to."""
    waivers: list[Waiver] = Field(default_factory=list)
    """Risks that were accepted."""
    tasks: list[str] = Field(default_factory=list)
    """Tasks that the rule matches; empty: any."""
    started: str = ""
    """RFC 3339."""
    ended: str = ""
    """RFC 3339; empty: running."""
    stable: ArmRecord = Field(default_factory=ArmRecord)
    """The baseline, which is also what a rollback goes to."""
    candidate: ArmRecord = Field(default_factory=ArmRecord)
    """What was tried."""
    gates: Gates = Field(default_factory=Gates)
    """What it was judged by."""
    fallbacks: list[str] = Field(default_factory=list)
    """Backends that would have answered in a failure."""
    excluded: list[ExclusionStatus] = Field(default_factory=list)
    """Tasks and tenants that were rolled back alone."""
    evaluation: EvaluationStatus | None = None
    """Newest run of the suites, with failing samples."""
    agreement: list[TaskAgreement] = Field(default_factory=list)
    """Greedy answers compared, by task."""
    differing: list[str] = Field(default_factory=list)
    """Ids of requests whose greedy answers differed."""
    history: list[Transition] = Field(default_factory=list)
    """Every transition, oldest first, at most 200."""
    next_review: str = ""
    """RFC 3339 time at which the comparison is due again."""
    reviews: list[Review] = Field(default_factory=list)
    """Repeated comparisons, oldest first."""
    rule_status: dict[str, Any] = Field(default_factory=dict, json_schema_extra=FREE_FORM)
    """Status of the rule as last decided, to rebuild a lost one from."""


class ReleaseRecord(Spec):
    """What was tried, with what evidence, and how it ended."""

    KIND: ClassVar = Kind(
        plural="releaserecords",
        short_names=("rr",),
        columns=(
            Column("Policy", ".spec.policy", "RoutePolicy."),
            Column("Rule", ".spec.rule", "Rule."),
            Column("Candidate", ".spec.candidate.backend", "What was tried."),
            Column("Outcome", ".spec.outcome", "How it ended."),
            Column("Reason", ".spec.reason", "Cause of the outcome."),
            AGE,
            Column("Stable", ".spec.stable.backend", "The baseline.", priority=1),
            Column("Owner", ".spec.owner", "Who answers for it.", priority=1),
            Column("Review", ".spec.nextReview", "When the comparison is due again.", priority=1),
            Column("Message", ".spec.message", "The decision with its evidence.", priority=1),
        ),
    )

    metadata: Metadata
    spec: ReleaseRecordSpec
