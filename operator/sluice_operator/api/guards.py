"""What a rollout is judged by: guards, ceilings, expected gains, and queries to the user's own Prometheus.

A guard compares the candidate with the concurrent stable arm. A *quantile* metric has a value for each
request and is compared at several percentiles; a *rate* metric says of each request whether it went wrong.
Names are checked at admission: a name that nobody measures would never fire.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .common import Decimal, DnsLabel, Percent, Spec
from .declare import SET, Cel, obeys


class Metric(StrEnum):
    """What a guard watches; those named Rate are shares of requests, the rest have a value each."""

    TTFT = "TTFT"
    TIME_TO_VERIFIED = "TimeToVerified"
    TIME_PER_TOKEN = "TimePerToken"  # noqa: S105
    INTER_TOKEN_JITTER = "InterTokenJitter"  # noqa: S105
    TOTAL = "Total"
    COST_PER_SUCCESS = "CostPerSuccess"
    ERROR_RATE = "ErrorRate"
    REFUSAL_RATE = "RefusalRate"
    NEEDLESS_REFUSAL_RATE = "NeedlessRefusalRate"
    SCHEMA_FAILURE_RATE = "SchemaFailureRate"
    TOOL_ARGUMENT_FAILURE_RATE = "ToolArgumentFailureRate"
    TRUNCATION_RATE = "TruncationRate"
    INTERRUPTION_RATE = "InterruptionRate"
    RETRY_RATE = "RetryRate"
    REPETITION_RATE = "RepetitionRate"
    NEGATIVE_FEEDBACK_RATE = "NegativeFeedbackRate"
    DISAGREEMENT_RATE = "DisagreementRate"

    @property
    def is_rate(self) -> bool:
        """Whether a request has it or not, rather than a value."""
        return self.value.endswith("Rate")


class GuardMode(StrEnum):
    """What it means when a guard fires."""

    HARD = "Hard"
    GUARD = "Guard"
    WATCH = "Watch"


class Ceiling(Spec):
    """An absolute limit, whatever stable does."""

    value: Decimal
    """Seconds, percent of requests for a rate, or money for CostPerSuccess. A string, such as "2.5"."""
    percentile: int = Field(default=95, ge=50, le=99)
    """So many percent of the candidate's requests must stay below; ignored for rates."""


class Guard(Spec):
    """A statistical comparison with the concurrent stable arm."""

    model_config = obeys(
        Cel(
            "self.mode != 'Hard' || self.metric.endsWith('Rate')",
            "mode Hard means that one request decides, which only a rate can: use Guard, or name a rate",
            ".mode",
        )
    )

    metric: Metric
    """What is compared."""
    mode: GuardMode = GuardMode.GUARD
    """Hard: one such request of the candidate rolls back. Guard: statistics decide. Watch: recorded only."""
    percentiles: list[Annotated[int, Field(ge=50, le=99)]] = Field(
        default_factory=lambda: [50, 90, 95, 99], max_length=8
    )
    """Quantiles at which the arms are compared; ignored for rates."""
    max_increase_percent: int = Field(default=20, ge=0, le=10_000)
    """How much worse than stable is tolerated: 20 means up to 1.2 times."""
    ceiling: Ceiling | None = None
    """Absolute limit beside the comparison."""
    tasks: list[DnsLabel] = Field(default_factory=list, max_length=32, json_schema_extra=SET)
    """Only requests of these tasks; absent: all."""


class Gain(Spec):
    """What the release should improve, for whom. Without evidence for it no further step begins."""

    metric: Metric
    """What gets better."""
    percentile: int = Field(default=50, ge=50, le=99)
    """Quantile; ignored for rates."""
    min_decrease_percent: int = Field(ge=1, le=99)
    """How much lower than stable it must be: 10 means at most 0.9 times."""
    tasks: list[DnsLabel] = Field(default_factory=list, max_length=32, json_schema_extra=SET)
    """For these tasks; absent: over all."""


class Query(Spec):
    """A PromQL query to the Prometheus that the operator was installed with."""

    model_config = obeys(
        Cel(
            "has(self.max) || has(self.maxIncreasePercent)",
            "query has no limit: give max, maxIncreasePercent or both",
        ),
        Cel(
            "!has(self.maxIncreasePercent) || self.query.contains('$backend') || self.query.contains('$arm')",
            "maxIncreasePercent compares the arms, so the query must name one: use $backend or $arm in it",
            ".query",
        ),
    )

    name: DnsLabel
    """Name in evidence, events and status."""
    query: str = Field(min_length=1, max_length=2000)
    """PromQL that gives one number, higher is worse. $namespace, $policy, $rule, $arm, $backend and
    $attempt are filled in."""
    mode: GuardMode = GuardMode.GUARD
    """Hard: the first value over the limit rolls back. Guard: so many in a row. Watch: recorded only."""
    max: Decimal | None = None
    """Absolute limit for the candidate. A string, such as "0.5"."""
    max_increase_percent: int | None = Field(default=None, ge=0, le=10_000)
    """How much higher than stable's value is tolerated."""
    interval_seconds: int = Field(default=15, ge=1, le=3600)
    """How often it is asked."""
    failures: int = Field(default=3, ge=1, le=100)
    """Values in a row over the limit until it fires, in mode Guard. No value is neither good nor bad."""


class Coverage(Spec):
    """Traffic that a step must have seen: a rollout that only met quiet hours has not been tested."""

    name: DnsLabel
    """Name in status."""
    min_samples: int = Field(default=20, ge=1, le=1_000_000)
    """Candidate requests of this kind that must have been judged in the step."""
    tasks: list[DnsLabel] = Field(default_factory=list, max_length=32, json_schema_extra=SET)
    """Of these tasks; absent: any."""
    min_prompt_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """With prompts at least so long."""
    hours_utc: str | None = Field(
        default=None, max_length=5, pattern=r"^([01][0-9]|2[0-3])-([01][0-9]|2[0-3])$"
    )
    """Within these hours of the day, UTC: 08-18; may cross midnight."""


def default_guards() -> list[Guard]:
    """Speed and what goes wrong, as guards; what may be a matter of taste or trade, watched. No more errors
    than stable's are tolerated: they are rare, so a tolerance would cost more requests than it spares.
    TimeToVerified is for those who ask: most rules verify nothing."""
    watched = (Metric.REFUSAL_RATE, Metric.RETRY_RATE, Metric.COST_PER_SUCCESS, Metric.DISAGREEMENT_RATE)
    strict = (Metric.ERROR_RATE, Metric.INTERRUPTION_RATE)
    return [
        Guard(
            metric=metric,
            mode=GuardMode.WATCH if metric in watched else GuardMode.GUARD,
            max_increase_percent=0 if metric in strict else 20,
        )
        for metric in Metric
        if metric is not Metric.TIME_TO_VERIFIED
    ]


class Evaluation(Spec):
    """Suites of business samples that the candidate must pass."""

    suites: list[DnsLabel] = Field(min_length=1, max_length=16, json_schema_extra=SET)
    """EvalSuites of the same namespace. They run before any traffic, and before each step that asks."""
    min_pass_percent: Percent = 0
    """Of each task's samples at least so many must pass, whatever stable does. A failed `hard` sample always
    ends it."""
    max_drop_percent: Percent = 0
    """Each task's rate may be so many points below stable's on the same samples."""
    timeout_seconds: int = Field(default=600, ge=1, le=86_400)
    """Longest run; what is not answered by then has failed."""
