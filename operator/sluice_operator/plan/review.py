"""A recorded comparison, repeated on copies of today's traffic: what it is judged by, and what it says. Pure.

Both arms get copies of the same requests, so by chance alone half of the bad ones are the candidate's: the
gates see a step of weight 50. Invariant: too little evidence never says Keep.
"""

from __future__ import annotations

from datetime import datetime

from ..api.guards import default_guards
from ..api.releaserecord import ReleaseRecordSpec, ReviewOutcome
from ..api.rollout import CandidateArm, Rollout, Step, Watch
from ..api.routepolicy import Rule
from ..api.rulestatus import ArmStatus, Phase, RuleStatus
from ..gates import Verdict
from ..gates.power import min_samples
from .names import digest
from .scope import told

PERCENT = 10
"""Of the rule's requests are copied, to each arm: so much more load do both take meanwhile."""
MIN_SECONDS = 300.0
MAX_SECONDS = 3600.0
PATIENCE_S = 60.0
"""How long pods may take to hold what the copies ask of them."""
_WEIGHT = 50
_PREFIX = "review-"


def attempt(record: str, asked: str) -> str:
    """What the copies carry as their attempt; no release's hash begins so."""
    return f"{_PREFIX}{digest(f'{record}/{asked}')}"


def is_review(attempt: str) -> bool:
    """Whether a request was copied for a review."""
    return attempt.startswith(_PREFIX)


def unfit(record: ReleaseRecordSpec) -> str:
    """Why the record can't be reviewed; empty: it can."""
    if not record.ended:
        return "the attempt goes on: wait until it has ended"
    if not record.stable.backend or not record.candidate.backend:
        return "the record names no two backends: there is nothing to send copies to"
    if record.stable.backend == record.candidate.backend:
        return (
            f"both arms were of backend {record.stable.backend} and differed in settings, which copies can't"
            " have: start a rollout to compare them"
        )
    return ""


def rule_of(rule: Rule, record: ReleaseRecordSpec) -> Rule:
    """The rule as the gates need it: its guards if it still has a rollout, else the default ones."""
    before = rule.rollout
    rollout = Rollout(
        candidate=CandidateArm(backend=record.candidate.backend),
        steps=[Step(weight=_WEIGHT)],
        watch=Watch(seconds=0),
        guards=before.guards if before is not None else default_guards(),
        alpha=before.alpha if before is not None else "0.01",
    )
    return rule.model_copy(update={"rollout": rollout})


def status_of(rule: Rule, record: ReleaseRecordSpec, attempt: str, now: datetime) -> RuleStatus:
    """A step of weight 50 that begins now."""
    since = now.isoformat()
    return RuleStatus(
        name=rule.name,
        phase=Phase.STEP,
        weight=_WEIGHT,
        attempt=attempt,
        stable=ArmStatus(backend=record.stable.backend, identity=record.stable.identity),
        candidate=ArmStatus(backend=record.candidate.backend, identity=record.candidate.identity),
        stage_since=since,
        evidence_since=since,
    )


def needed(rule: Rule) -> int:
    """Copies that the candidate must have answered; `rule` is that of `rule_of`."""
    return min_samples(rule, _WEIGHT)


def conclude(
    said: Verdict, status: RuleStatus, needed: int, elapsed_s: float
) -> tuple[ReviewOutcome, str] | None:
    """What the review says; None: it goes on. `status` holds the newest counts."""
    seen = f"{status.num_samples} and {status.num_stable_samples} copies judged of candidate and stable"
    if said.reason:
        if said.slice is None:
            return ReviewOutcome.GO_BACK, f"{said.message}; {seen}"
        return ReviewOutcome.LIMIT, f"keep it from {told([said.slice])}: {said.message}; {seen}"
    enough = min(status.num_samples, status.num_stable_samples) >= needed
    if enough and elapsed_s >= MIN_SECONDS:
        return ReviewOutcome.KEEP, f"no guard fired; {seen}"
    if elapsed_s >= MAX_SECONDS:
        why = f"{needed} of each are needed within {MAX_SECONDS / 60:.0f} minutes"
        return ReviewOutcome.LOOK_LONGER, f"{seen}; {why}"
    return None
