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
    BundleRef,
    Condition,
    DataClass,
    Decimal,
    DnsLabel,
    Metadata,
    Regex,
    Risk,
    SecretKeyRef,
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
)
from .rollout import Rollout
from .rulestatus import RuleStatus
from .tuning import Features, Sampling, Switch

VERIFIER_URL = r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?(/[!-\"$->@-~]*)?$"
HAS_HARD_CHECK = "self.contract.checks.exists(c, !has(c.severity) || c.severity == 'Hard')"
ROLLOUT = '.status.rules[?(@.phase!="Stable")]'
"""JSONPath of rules with a rollout; a column shows the first."""


class Severity(StrEnum):
    """What a failed check does."""

    HARD = "Hard"
    WATCH = "Watch"


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


class Fallback(Spec):
    """Who answers when the target can't."""

    backend: DnsLabel
    """An InferenceBackend of the same namespace."""


class Timeouts(Spec):
    """How long a request may take."""

    idle_seconds: int = Field(default=120, ge=1, le=3600)
    """Longest silence: queue and prefill before the first token, or between tokens. What verifiers may take
    is added. Where streaming is Verified, all of an answer is silence: there totalSeconds counts, or else an
    hour."""
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


class CaBundle(Spec):
    """Where certificate authorities stand, in PEM: exactly one of these."""

    model_config = obeys(
        Cel(
            exactly_one("configMap", "secret"),
            "caBundle needs exactly one source: give one of configMap and secret",
        )
    )

    config_map: BundleRef | None = None
    """A ConfigMap, as tools that distribute authorities make them; looked at twice a minute."""
    secret: BundleRef | None = None
    """A Secret."""


class Verifier(Spec):
    """An HTTP service of yours that is asked about each answer before its verdict is known."""

    model_config = obeys(
        Cel(
            "self.url.startsWith('https://') || !(has(self.tokenSecret) || has(self.caBundle))",
            "url must be https where tokenSecret or caBundle is given: over http anybody on the way reads the"
            " token, and nobody proves who answers",
            ".url",
        )
    )

    url: str = Field(min_length=1, max_length=2048, pattern=VERIFIER_URL)
    """Where pods POST the question; without user, query and fragment, since policies are read by many.
    Redirects are not followed."""
    timeout_seconds: int = Field(default=5, ge=1, le=60)
    """Within which it must answer; after that the answer counts as not verified and is withheld."""
    token_secret: SecretKeyRef | None = None
    """A token that pods send as Authorization: Bearer; https only. Its Secret must be of type
    sluice.dev/verifier-token. Rotated within seconds, without a restart. While it is missing, answers are
    withheld."""
    ca_bundle: CaBundle | None = None
    """Authorities that its certificate is checked against, in place of those that everybody trusts."""


class Check(Spec):
    """A named check of each answer; exactly one kind."""

    model_config = obeys(
        Cel(
            exactly_one("jsonSchema", "mustMatch", "mustNotMatch", "verifier"),
            "check needs exactly one kind: give one of jsonSchema, mustMatch, mustNotMatch and verifier",
        ),
        Cel(
            "!has(self.leak) || !self.leak || !has(self.severity) || self.severity == 'Hard'",
            "leak needs severity Hard: a check of severity Watch rolls nothing back",
            ".leak",
        ),
    )

    name: DnsLabel
    """Name in evidence, events and status."""
    severity: Severity = Severity.HARD
    """Hard: one violation by a candidate rolls it back. Watch: recorded."""
    leak: bool = False
    """A violation has let out what must not be: the rollback also cuts the candidate's requests that still
    run, where they would else end in peace."""
    json_schema: dict[str, Any] | None = Field(default=None, json_schema_extra=FREE_FORM)
    """The answer is JSON that validates against this schema (2020-12)."""
    must_match: Regex | None = None
    """The answer contains a match of this RE2 pattern."""
    must_not_match: Regex | None = None
    """The answer contains no match of this RE2 pattern."""
    verifier: Verifier | None = None
    """The answer passes a service of yours. Without its verdict, a Hard check withholds the answer."""


class Streaming(StrEnum):
    """When the answers of a rule may be shown."""

    IMMEDIATE = "Immediate"
    VERIFIED = "Verified"
    DRAFT = "Draft"


class Refusals(StrEnum):
    """What a refusal by the model means in a rule."""

    NEEDLESS = "Needless"
    PROPER = "Proper"


class Contract(Spec):
    """What answers of this rule must keep to."""

    model_config = obeys(
        Cel(
            "!has(self.streaming) || self.streaming == 'Immediate'"
            " || (has(self.checks) && self.checks.exists(c, !has(c.severity) || c.severity == 'Hard'))",
            "streaming Verified and Draft need a check of severity Hard to pass: add one, or use Immediate",
            ".streaming",
        )
    )

    streaming: Streaming = Streaming.IMMEDIATE
    """Immediate: as it is generated. Verified: not a byte before all checks have passed. Draft: as it is
    generated, marked as unverified until the last event tells the verdict."""
    refusals: Refusals = Refusals.NEEDLESS
    """Needless: a model that refuses has failed, as in most work. Proper: it may be right, as in
    compliance."""
    checks: list[Check] = Field(default_factory=list, max_length=16, json_schema_extra=keyed_by("name"))
    """Checks, by name."""

    @property
    def can_fail(self) -> bool:
        """Whether it has a hard check: to pass it means something."""
        return any(check.severity is Severity.HARD for check in self.checks)


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
        *(
            Cel(
                f"!has(self.rollout) || !has(self.rollout.{asked})"
                f" || !self.rollout.{asked}.exists(one, one.metric == 'TimeToVerified')"
                f" || (has(self.contract) && has(self.contract.checks) && {HAS_HARD_CHECK})",
                f"rollout.{asked} name TimeToVerified, but no check of severity Hard can be passed: add one,"
                " or name another metric",
                f".rollout.{asked}",
            )
            for asked in ("guards", "gains")
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


class Slo(Spec):
    """Latency that users are promised, at the 95th percentile."""

    ttft_seconds: Decimal = "2"
    """Arrival to first token. A string, such as "2"."""
    time_per_token_seconds: Decimal = "0.2"  # noqa: S105
    """Mean time per output token after the first. A string, such as "0.2"."""
    error_percent: Decimal = "1"
    """Requests that may fail. A string, such as "1"."""


class RoutePolicySpec(Spec):
    """A public model name and its rules."""

    model: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._:/-]+$")
    """The name that callers put into `model`."""
    switches: list[Switch] = Field(default_factory=list, max_length=16)
    """Features switched by task or tenant under this model; a later one wins."""
    slo: Slo = Field(default_factory=Slo)
    """What "fast enough" means here: the load ramp of `sluice calibrate` stops where it ends."""
    rules: list[Rule] = Field(min_length=1, max_length=32, json_schema_extra=keyed_by("name"))
    """Rules in order; the first match wins, no match is refused with 403."""


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
