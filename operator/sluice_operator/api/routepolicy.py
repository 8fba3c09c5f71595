"""RoutePolicy: which arm answers whom under one public model name, and how a new arm is let in.

Rules are tried in order and the first match wins. A rule's ``target`` with its features, cache
scope and sampling is its *stable* arm; ``rollout.candidate`` overrides any of them and so makes the
*candidate* arm.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field

from .common import (
    MAX_SAFE_INTEGER,
    Condition,
    DataClass,
    Decimal,
    DnsLabel,
    Metadata,
    Percent,
    Regex,
    Risk,
    Spec,
    named,
)
from .declare import (
    AGE,
    FREE_FORM,
    MESSAGE,
    READY,
    REASON,
    SET,
    Cel,
    Column,
    Kind,
    exactly_one,
    keyed_by,
    obeys,
    validations,
)

ROLLOUT = '.status.rules[?(@.phase!="Stable")]'
"""JSONPath of rules with a rollout; a column shows the first."""


class Metric(StrEnum):
    """What a guard watches."""

    TTFT = "TTFT"
    TIME_PER_TOKEN = "TimePerToken"  # noqa: S105
    TOTAL = "Total"
    ERROR_RATE = "ErrorRate"


class Severity(StrEnum):
    """What a failed check does."""

    HARD = "Hard"
    WATCH = "Watch"


class Phase(StrEnum):
    """Where a rule's rollout stands. For people and printing; conditions carry the meaning."""

    STABLE = "Stable"
    SHADOWING = "Shadowing"
    STEP = "Step"
    PROMOTED = "Promoted"
    ROLLED_BACK = "RolledBack"
    ABORTED = "Aborted"


class ByteRange(Spec):
    """A range of body sizes, in bytes; min inclusive, max exclusive."""

    model_config = obeys(
        Cel(
            "!has(self.max) || self.min < self.max",
            "max must be greater than min: no body is in this range",
            ".max",
        )
    )

    min: int = Field(default=0, ge=0, le=MAX_SAFE_INTEGER)
    """At least this many bytes."""
    max: int | None = Field(default=None, ge=1, le=MAX_SAFE_INTEGER)
    """Fewer than this many bytes."""


class Match(Spec):
    """Which requests a rule takes. Everything given must hold; nothing given takes all."""

    tasks: list[DnsLabel] = Field(default_factory=list, max_length=32, json_schema_extra=SET)
    """Claimed task is one of these."""
    tenants: list[DnsLabel] = Field(default_factory=list, max_length=256, json_schema_extra=SET)
    """Tenant is one of these."""
    data_classes: list[DataClass] = Field(default_factory=list, max_length=4, json_schema_extra=SET)
    """Data class is one of these; a request without a claim is Restricted."""
    risks: list[Risk] = Field(default_factory=list, max_length=3, json_schema_extra=SET)
    """Risk is one of these; a request without a claim is High."""
    input_bytes: ByteRange | None = None
    """Size of the request's body."""


class ServiceTarget(Spec):
    """Any HTTP service with an OpenAI-like API in the same namespace, such as a keyword baseline."""

    name: DnsLabel
    """Name of the Service."""
    port: int = Field(ge=1, le=65535)
    """Port of the Service."""


class Refusal(Spec):
    """A fixed, safe answer."""

    status: int = Field(default=403, ge=400, le=599)
    """HTTP status."""
    message: str = Field(min_length=1, max_length=1000)
    """What the caller reads."""


class Target(Spec):
    """Who answers: exactly one of these."""

    model_config = obeys(
        Cel(
            exactly_one("backend", "service", "refusal"),
            "target needs exactly one kind: give one of backend, service and refusal",
        )
    )

    backend: DnsLabel | None = None
    """An InferenceBackend of the same namespace."""
    service: ServiceTarget | None = None
    """An HTTP service."""
    refusal: Refusal | None = None
    """Nobody: a fixed answer."""


class Features(Spec):
    """Switches that need no restart. Absent means the default."""

    prefix_cache: bool | None = None
    """Reuse of cached prompt prefixes within the cache scope; default on."""


class Sampling(Spec):
    """Defaults for what a request leaves open."""

    temperature: Decimal | None = Field(
        default=None,
        json_schema_extra=validations(
            Cel("double(self) <= 2.0", "temperature must be from 0 to 2, as a string such as '0.7'")
        ),
    )
    """Temperature, 0 to 2; 0 is greedy. A string, such as "0.7"."""
    top_p: Decimal | None = Field(
        default=None,
        json_schema_extra=validations(
            Cel(
                "double(self) > 0.0 && double(self) <= 1.0",
                "topP must be above 0 and at most 1, as a string such as '0.9'",
            )
        ),
    )
    """Nucleus mass, above 0 to 1. A string, such as "0.9"."""
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    """Length of the answer, in tokens."""


class Fallback(Spec):
    """Who answers when the target can't."""

    backend: DnsLabel
    """An InferenceBackend of the same namespace."""


class Timeouts(Spec):
    """How long a request may take."""

    idle_seconds: int = Field(default=120, ge=1, le=3600)
    """Longest silence: queue and prefill before the first token, or between tokens."""
    total_seconds: int | None = Field(default=None, ge=1, le=86_400)
    """Longest request; absent: no limit."""


class Retries(Spec):
    """Retries before the first byte; a stream already shown is never repeated."""

    attempts: int = Field(default=1, ge=0, le=5)
    """Further attempts after the first."""


class CircuitBreaker(Spec):
    """Bounds towards one arm; beyond them a request is refused at once with 503."""

    max_requests: int = Field(default=256, ge=1, le=1_000_000)
    """Requests in flight."""
    max_pending: int = Field(default=64, ge=0, le=1_000_000)
    """Requests waiting for a connection."""


class Check(Spec):
    """A named check of each answer; exactly one kind."""

    model_config = obeys(
        Cel(
            exactly_one("jsonSchema", "mustMatch", "mustNotMatch"),
            "check needs exactly one kind: give one of jsonSchema, mustMatch and mustNotMatch",
        )
    )

    name: DnsLabel
    """Name in evidence, events and status."""
    severity: Severity = Severity.HARD
    """Hard: one violation by a candidate rolls it back. Watch: recorded."""
    json_schema: dict[str, Any] | None = Field(default=None, json_schema_extra=FREE_FORM)
    """The answer is JSON that validates against this schema (2020-12)."""
    must_match: Regex | None = None
    """The answer contains a match of this RE2 pattern."""
    must_not_match: Regex | None = None
    """The answer contains no match of this RE2 pattern."""


class Contract(Spec):
    """What answers of this rule must keep to."""

    checks: list[Check] = Field(default_factory=list, max_length=16, json_schema_extra=keyed_by("name"))
    """Checks, by name."""


class CandidateArm(Spec):
    """What the candidate does differently from the rule's target; at least one."""

    model_config = obeys(
        Cel(
            "has(self.backend) || has(self.features) || has(self.cacheScope) || has(self.sampling)",
            "candidate differs in nothing: give at least one of backend, features, cacheScope and sampling",
        )
    )

    backend: DnsLabel | None = None
    """Another InferenceBackend."""
    features: Features | None = Field(default=None, json_schema_extra={"minProperties": 1})
    """Other feature switches."""
    cache_scope: DnsLabel | None = None
    """Another CacheScope."""
    sampling: Sampling | None = Field(default=None, json_schema_extra={"minProperties": 1})
    """Other sampling defaults."""


class Shadow(Spec):
    """Mirrored traffic whose answers nobody sees, before the first step."""

    percent: int = Field(default=100, ge=1, le=100)
    """Share of requests that is mirrored."""
    min_seconds: int = Field(default=60, ge=0, le=2_592_000)
    """Shortest stay."""
    min_samples: int = Field(default=50, ge=1, le=1_000_000)
    """Mirrored requests that must have been judged."""


class Step(Spec):
    """One step of the canary."""

    weight: int = Field(ge=1, le=100)
    """Percent of the rule's requests for the candidate."""
    min_seconds: int = Field(default=60, ge=0, le=2_592_000)
    """Shortest stay."""
    min_samples: int = Field(default=50, ge=1, le=1_000_000)
    """Candidate requests that must have been judged in this step."""


class Guard(Spec):
    """A statistical comparison with the concurrent stable arm."""

    metric: Metric
    """What is compared."""
    percentile: int = Field(default=95, ge=50, le=99)
    """Quantile, for the latency metrics."""
    max_increase_percent: int = Field(default=20, ge=0, le=10_000)
    """How much worse than stable is tolerated: 20 means up to 1.2 times."""


def default_guards() -> list[Guard]:
    """p95 of TTFT, time per token and total, and the error rate."""
    return [Guard(metric=metric) for metric in Metric]


class Rollout(Spec):
    """How the candidate is let in. Removing it, or `abort`, puts everything back on the target."""

    model_config = obeys(
        Cel(
            "self.steps.map(step, step.weight).isSorted()"
            " && self.steps.all(step, self.steps.exists_one(other, other.weight == step.weight))",
            "steps must have ascending weights, such as 10, 25, 50: put them in order and remove duplicates",
            ".steps",
        ),
        Cel(
            "!has(self.guards) || self.guards.all(guard, self.guards.exists_one(other,"
            " other.metric == guard.metric"
            " && (guard.metric == 'ErrorRate' || other.percentile == guard.percentile)))",
            "guards watch the same metric at the same percentile twice: remove one",
            ".guards",
        ),
    )

    candidate: CandidateArm
    """What is new."""
    attempt: int = Field(default=1, ge=1, le=MAX_SAFE_INTEGER)
    """Raise it to try again after a rollback; a rolled-back attempt never comes back by itself."""
    abort: bool = False
    """True: the candidate leaves at once."""
    paused: bool = False
    """True: stay at the current step; guards stay armed."""
    shadow: Shadow | None = None
    """Shadow stage before the first step; absent: none."""
    steps: list[Step] = Field(min_length=1, max_length=20)
    """Steps with ascending weights; after the last one the candidate is promoted."""
    guards: list[Guard] = Field(default_factory=default_guards, max_length=16)
    """Statistical guards."""
    alpha: Decimal = Field(
        default="0.01",
        json_schema_extra=validations(
            Cel(
                "double(self) > 0.0 && double(self) < 0.5",
                "alpha must be above 0 and below 0.5, as a string such as '0.01'",
            )
        ),
    )
    """Chance of a false rollback over the whole rollout and all guards together."""


class Rule(Spec):
    """One routing rule."""

    model_config = obeys(
        Cel(
            "!has(self.rollout) || has(self.target.backend)",
            "rollout needs target.backend to compare the candidate with: name one, or remove the rollout",
            ".rollout",
        ),
        Cel(
            "!has(self.rollout) || !has(self.rollout.candidate.backend) || !has(self.target.backend)"
            " || self.rollout.candidate.backend != self.target.backend"
            " || has(self.rollout.candidate.features)"
            " || has(self.rollout.candidate.cacheScope) || has(self.rollout.candidate.sampling)",
            "rollout.candidate.backend is already the target: remove the rollout, or name another backend",
            ".rollout.candidate.backend",
        ),
        Cel(
            "!has(self.fallbacks) || !has(self.target.backend)"
            " || self.fallbacks.all(fallback, fallback.backend != self.target.backend)",
            "fallbacks name the target itself: name another backend",
            ".fallbacks",
        ),
        Cel(
            "!has(self.fallbacks) || !has(self.rollout) || !has(self.rollout.candidate.backend)"
            " || self.fallbacks.all(fallback, fallback.backend != self.rollout.candidate.backend)",
            "fallbacks name the candidate, which would let it in unproven: name another backend",
            ".fallbacks",
        ),
        Cel(
            "!has(self.fallbacks) || self.fallbacks.size() == 0 || !has(self.target.refusal)",
            "fallbacks mean nothing after a refusal, which can't fail: remove them",
            ".fallbacks",
        ),
        Cel(
            "!has(self.contract) || !has(self.contract.checks) || self.contract.checks.size() == 0"
            " || has(self.target.backend)",
            "contract needs target.backend, whose pods do the checking: remove it, or name a backend",
            ".contract",
        ),
    )

    name: DnsLabel
    """Unique within the policy."""
    match: Match = Field(default_factory=Match)
    """Which requests it takes."""
    target: Target
    """Who answers."""
    features: Features = Field(default_factory=Features)
    """Feature switches."""
    cache_scope: DnsLabel | None = None
    """CacheScope; absent: shared within a tenant."""
    sampling: Sampling = Field(default_factory=Sampling)
    """Sampling defaults."""
    fallbacks: list[Fallback] = Field(default_factory=list, max_length=4)
    """Tried in order when the target fails before the first byte."""
    timeouts: Timeouts = Field(default_factory=Timeouts)
    """Time limits."""
    retries: Retries = Field(default_factory=Retries)
    """Retries."""
    circuit_breaker: CircuitBreaker = Field(default_factory=CircuitBreaker)
    """Bounds."""
    contract: Contract = Field(default_factory=Contract)
    """What answers must keep to."""
    rollout: Rollout | None = None
    """A release in progress."""


class RoutePolicySpec(Spec):
    """A public model name and its rules."""

    model: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._:/-]+$")
    """The name that callers put into `model`."""
    rules: list[Rule] = Field(min_length=1, max_length=32, json_schema_extra=keyed_by("name"))
    """Rules in order; the first match wins, no match is refused with 403."""


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
    """Why it is not advancing: NoEvidence, CandidateNotReady, Paused …; empty: advancing."""
    stage_since: str = ""
    """RFC 3339 time at which this stage's traffic began; empty: not begun."""
    evidence_since: str = ""
    """RFC 3339 time at which evidence last restarted; requests older than that count for no guard."""
    num_samples: int = 0
    """Candidate requests answered and judged in this stage; failures are evidence, but no samples."""
    num_stable_samples: int = 0
    """Stable requests judged in this stage."""
    guards: list[GuardStatus] = Field(default_factory=list)
    """Evidence of the guards."""
    num_restarts: int = 0
    """How often evidence has restarted; each restart has its own share of alpha."""
    rejected: list[str] = Field(default_factory=list)
    """Attempts that were rolled back or aborted, newest last, at most 20; none of them starts again."""
    history: list[Transition] = Field(default_factory=list)
    """Newest last, at most 20."""


class RoutePolicyStatus(Spec):
    """Observed state, kstatus style."""

    observed_generation: int = 0
    """Generation last looked at."""
    accepted_generation: int = 0
    """Generation in force; lags behind observedGeneration where the last edit was refused."""
    conditions: list[Condition] = Field(default_factory=list, json_schema_extra=keyed_by("type"))
    """Ready, Reconciling, Stalled, RolledBack, PromotionNotInGit …"""
    rules: list[RuleStatus] = Field(default_factory=list, json_schema_extra=keyed_by("name"))
    """One entry a rule."""


class RoutePolicy(Spec):
    """Which arm answers whom under one public model name."""

    KIND: ClassVar = Kind(
        plural="routepolicies",
        short_names=("rp",),
        columns=(
            Column("Model", ".spec.model", "The name that callers put into `model`."),
            READY,
            REASON,
            Column("Rollout", f"{ROLLOUT}.phase", "Phase of the first rule with a rollout."),
            Column(
                "Weight", f"{ROLLOUT}.weight", "Percent of its requests that go to the candidate.", "integer"
            ),
            AGE,
            Column("Rule", f"{ROLLOUT}.name", "Name of the rule whose rollout is shown.", priority=1),
            Column("Held", f"{ROLLOUT}.held", "Why it is not advancing.", priority=1),
            Column(
                "Samples", f"{ROLLOUT}.numSamples", "Candidate requests judged in this stage.", "integer", 1
            ),
            MESSAGE,
        ),
    )
    model_config = obeys(named())

    metadata: Metadata
    spec: RoutePolicySpec
    status: RoutePolicyStatus = Field(default_factory=RoutePolicyStatus)
