"""How a new arm is let in: evaluation, shadow, steps, watch, and what a person decides about it.

Only a person writes here. What the operator makes of it stands in the status (`rulestatus`).
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from .common import MAX_SAFE_INTEGER, Decimal, DnsLabel, Percent, Spec
from .declare import SET, Cel, keyed_by, obeys, validations
from .guards import Coverage, Evaluation, Gain, Guard, Query, default_guards
from .tuning import Features, Sampling


class Consent(StrEnum):
    """Whether a person must agree before the rollout goes on."""

    AUTOMATIC = "Automatic"
    MANUAL = "Manual"


class RollbackScope(StrEnum):
    """What is rolled back when the evidence points at one task or tenant."""

    NARROWEST = "Narrowest"
    RULE = "Rule"


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
    pairing_percent: Percent = 2
    """Share of requests that is also answered greedily, by the candidate once and by stable twice, to see how
    often the arms agree and how often stable agrees with itself; 0: none."""
    min_seconds: int = Field(default=60, ge=0, le=2_592_000)
    """Shortest stay."""
    min_samples: int | None = Field(default=None, ge=1, le=1_000_000)
    """Mirrored requests that must have been judged; absent: as many as the guards need to see p95 doubled, or
    a third beyond what they tolerate."""


class Step(Spec):
    """One step of the canary."""

    weight: int = Field(ge=1, le=100)
    """Percent of the rule's requests for the candidate."""
    tenants: list[DnsLabel] = Field(default_factory=list, max_length=256, json_schema_extra=SET)
    """Only requests of these tenants, the low-risk ones first; absent: all that the rule matches."""
    tasks: list[DnsLabel] = Field(default_factory=list, max_length=32, json_schema_extra=SET)
    """Only requests of these tasks; absent: all that the rule matches."""
    min_seconds: int = Field(default=60, ge=0, le=2_592_000)
    """Shortest stay."""
    min_samples: int | None = Field(default=None, ge=1, le=1_000_000)
    """Candidate requests that must have been judged in this step; absent: as many as the guards need to see
    p95 doubled, or a third beyond what they tolerate."""
    coverage: list[Coverage] = Field(default_factory=list, max_length=8, json_schema_extra=keyed_by("name"))
    """Kinds of traffic that must have been among them."""
    evaluate: bool = False
    """The suites run again before this step begins."""
    consent: Consent = Consent.AUTOMATIC
    """Manual: a person must approve before this step begins."""


class Watch(Spec):
    """After the last step: the candidate serves, a holdback stays on the old arm to compare with."""

    seconds: int = Field(default=604_800, ge=0, le=7_776_000)
    """How long; rollback stays armed all the while. 0: not at all."""
    holdback_percent: int = Field(default=2, ge=0, le=50)
    """Percent of requests that stay on the old arm. 0: only ceilings and hard gates stay armed."""


class Approval(Spec):
    """A person's consent. It is for one attempt, so that it can't let in another candidate later."""

    attempt: str = Field(min_length=1, max_length=64)
    """The attempt, as the status names it."""
    step: int = Field(ge=0, le=20)
    """Up to which step, counted from 0; the number of steps stands for the promotion."""


class Exclusion(Spec):
    """Requests that the candidate shall not get: of this task, of this tenant, or of both together."""

    model_config = obeys(
        Cel("has(self.task) || has(self.tenant)", "exclude excludes nothing: give task, tenant or both")
    )

    task: DnsLabel | None = None
    """Requests of this task."""
    tenant: DnsLabel | None = None
    """Requests of this tenant."""


class Waiver(Spec):
    """A risk that somebody has accepted; recorded, not acted upon."""

    risk: str = Field(min_length=1, max_length=500)
    """What was accepted."""
    by: str = Field(min_length=1, max_length=200)
    """Who accepted it."""


class Release(Spec):
    """What the ledger shall say of this release beyond what the operator sees for itself."""

    reason: str = Field(default="", max_length=2000)
    """Why it is made."""
    owner: str = Field(default="", max_length=200)
    """Who answers for it; absent: the candidate backend's owner."""
    incident: str = Field(default="", max_length=500)
    """The incident that it belongs to."""
    waivers: list[Waiver] = Field(default_factory=list, max_length=16)
    """Risks that were accepted."""
    review_after_days: int = Field(default=90, ge=1, le=3650)
    """When the comparison is due again."""


SAME_SCOPE = (
    "has(other.tenants) == has(step.tenants) && (!has(step.tenants) || other.tenants == step.tenants)"
    " && has(other.tasks) == has(step.tasks) && (!has(step.tasks) || other.tasks == step.tasks)"
)


class Rollout(Spec):
    """How the candidate is let in. Removing it, or `abort`, puts everything back on the target."""

    model_config = obeys(
        Cel(
            "self.steps.filter(step, !has(step.tenants) && !has(step.tasks)).map(step, step.weight)"
            ".isSorted()"
            " && self.steps.all(step, self.steps.exists_one(other, other.weight == step.weight"
            f" && {SAME_SCOPE}))",
            "steps must have ascending weights, such as 10, 25, 50: put them in order and remove duplicates",
            ".steps",
        ),
        Cel(
            "!has(self.steps[self.steps.size() - 1].tenants)"
            " && !has(self.steps[self.steps.size() - 1].tasks)",
            "steps end with one for tenants or tasks only, and the rest would meet the candidate untested:"
            " add a last step for all",
            ".steps",
        ),
        Cel(
            "!has(self.guards) || self.guards.all(guard, has(guard.tasks) || self.guards.exists_one(other,"
            " other.metric == guard.metric && !has(other.tasks)))",
            "guards watch the same metric twice: remove one, or name the tasks that it is for",
            ".guards",
        ),
        Cel(
            "!has(self.shadow) || self.shadow.pairingPercent <= self.shadow.percent",
            "shadow.pairingPercent is above shadow.percent: lower it",
            ".shadow.pairingPercent",
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
    exclude: list[Exclusion] = Field(default_factory=list, max_length=64)
    """Tasks and tenants that go back to the target alone, in force at once."""
    rollback_scope: RollbackScope = RollbackScope.NARROWEST
    """Narrowest: where only one task or tenant suffers, only that goes back. Rule: everything does."""
    evaluation: Evaluation | None = None
    """Suites that must pass; absent: none."""
    shadow: Shadow | None = None
    """Shadow stage before the first step; absent: none."""
    steps: list[Step] = Field(min_length=1, max_length=20)
    """Steps; after the last one the candidate is promoted."""
    promotion: Consent = Consent.AUTOMATIC
    """Manual: a person must approve the promotion after the last step."""
    approval: Approval | None = None
    """What a person has approved so far."""
    watch: Watch = Field(default_factory=Watch)
    """After the last step."""
    guards: list[Guard] = Field(default_factory=default_guards, max_length=48)
    """Statistical guards."""
    queries: list[Query] = Field(default_factory=list, max_length=16, json_schema_extra=keyed_by("name"))
    """Guards on metrics of the user's own Prometheus."""
    gains: list[Gain] = Field(default_factory=list, max_length=8)
    """What the release should improve; without evidence for it no further step begins."""
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
    release: Release = Field(default_factory=Release)
    """For the ledger."""
