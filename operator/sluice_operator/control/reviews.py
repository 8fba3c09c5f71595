"""Reviews: a recorded comparison repeated on today's traffic, because somebody asks or because it is due.

Asked for by the annotation `sluice.dev/review: RECORD TIME` on the RoutePolicy, whose traffic it is (not on
the record, which nobody but the operator writes). The result is a Review in the record; a request is
answered once the record holds a review that is not older. Invariant: copies carry an attempt of their own,
so nothing that they show counts for or against a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from ..api import RoutePolicy, RuleStatus
from ..api.releaserecord import ReleaseRecordSpec, ReviewOutcome
from ..api.routepolicy import Rule
from ..api.rulestatus import Phase
from ..gates import GateState, Observation, align, checkpoint, fold, verdict
from ..plan import review as plan_review
from ..plan.routed import Review, RuleKey
from ..plan.situation import ARMED
from . import metrics
from .cache import Name

ASKED = "sluice.dev/review"
_BUSY = (Phase.EVALUATING, *ARMED)


@dataclass
class _Running:
    record: Name
    asked: str
    spec: ReleaseRecordSpec
    rule: Rule
    status: RuleStatus
    gate: GateState
    since: datetime
    """When copies were first sent; before, when it began."""
    copied: bool = False

    @property
    def attempt(self) -> str:
        return self.status.attempt


@dataclass(frozen=True)
class World:
    """What reviews need of the operator."""

    record: Callable[[Name], ReleaseRecordSpec | None]
    rule: Callable[[RuleKey], tuple[Rule, RuleStatus] | None]
    """A rule as it is accepted, and its status."""
    problem: Callable[[RuleKey], str]
    """Why the gateway does not send copies for a review of the rule; empty: it does (Plan.reviews)."""
    reviewed: Callable[[Name, ReviewOutcome, str], None]
    """Writes the result into the record (Ledger.reviewed)."""
    due: Callable[[], list[Name]]
    """Records whose comparison is due again (Ledger.due)."""
    tell_policy: Callable[[Name, str, str, bool], None]
    """An Event on a RoutePolicy: reason, message, whether it is a warning. Does not wait."""
    tell_record: Callable[[Name, str, str, bool], None]
    """The same on a ReleaseRecord."""
    changed: Callable[[], None]
    """What gets copies has changed: plan and push."""
    now: Callable[[], datetime]


class Reviews:
    """At most one review of a rule at a time. All synchronous; `tick` once a second."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._running: dict[RuleKey, _Running] = {}
        self._refused: dict[Name, str] = {}
        """The request of each policy that was refused, so that it is told once."""
        self._told: set[Name] = set()

    def inputs(self) -> Mapping[RuleKey, Review]:
        """For `routes.Inputs.reviews`."""
        return {
            key: Review(one.attempt, one.spec.stable.backend, one.spec.candidate.backend, plan_review.PERCENT)
            for key, one in self._running.items()
        }

    def consider(self, policy: RoutePolicy) -> None:
        """To be called with every news of a policy."""
        name = (policy.metadata.namespace, policy.metadata.name)
        asked = policy.metadata.annotations.get(ASKED, "").strip()
        self._stop_others(name, asked)
        if not asked or self._refused.get(name) == asked or self._is_running(name, asked):
            return
        record_name, _, time = asked.partition(" ")
        record = (name[0], record_name)
        spec = self._world.record(record)
        if spec is not None and _answered(spec, time):
            return
        why = self._why_not(name, record_name, spec)
        if spec is None or why:
            self._refused[name] = asked
            self._world.tell_policy(name, "ReviewRefused", f"review of {record_name}: {why}", True)
            return
        found = self._world.rule((f"{name[0]}/{name[1]}", spec.rule))
        assert found is not None
        self._start(record, asked, spec, found[0], name)

    def forget(self, name: Name) -> None:
        """The policy is gone."""
        self._stop_others(name, "")
        self._refused.pop(name, None)

    def take(self, key: RuleKey, observations: Iterable[Observation]) -> list[Observation]:
        """Takes in what copies have shown, and returns what is left: all else, for the rule's own gate."""
        mine: list[Observation] = []
        others: list[Observation] = []
        for seen in observations:
            (mine if plan_review.is_review(seen.attempt) else others).append(seen)
        one = self._running.get(key)
        if one is not None and mine:
            fold(one.gate, [_as_sample(seen) for seen in mine if seen.attempt == one.attempt])
        return others

    def tick(self) -> None:
        """Ends what has something to say, and tells what is due."""
        for key, one in list(self._running.items()):
            said = self._look(key, one)
            if said is not None:
                self._finish(key, *said)
        self._tell_due()

    def _look(self, key: RuleKey, one: _Running) -> tuple[ReviewOutcome, str] | None:
        now = self._world.now()
        found = self._world.rule(key)
        if found is None:
            return ReviewOutcome.LOOK_LONGER, f"rule {key[1]} is gone, and its traffic with it"
        if found[1].phase in _BUSY:
            return ReviewOutcome.LOOK_LONGER, "a rollout has begun, which needs its arms for itself"
        problem = self._world.problem(key)
        elapsed = (now - one.since).total_seconds()
        if problem:
            if elapsed < plan_review.PATIENCE_S:
                return None
            return ReviewOutcome.LOOK_LONGER, f"copies can't be sent: {problem}"
        if not one.copied:
            one.copied, one.since, elapsed = True, now, 0.0
        status = checkpoint(one.gate, one.status)
        return plan_review.conclude(verdict(one.gate, now), status, plan_review.needed(one.rule), elapsed)

    def _finish(self, key: RuleKey, outcome: ReviewOutcome, message: str) -> None:
        one = self._running.pop(key)
        self._world.reviewed(one.record, outcome, message)
        bad = outcome in (ReviewOutcome.GO_BACK, ReviewOutcome.LIMIT)
        told = f"review of {one.record[1]}: {outcome.value}: {message}"
        namespace, _, policy = key[0].partition("/")
        self._world.tell_policy((namespace, policy), "Reviewed", told, bad)
        self._world.changed()

    def _start(self, record: Name, asked: str, spec: ReleaseRecordSpec, rule: Rule, policy: Name) -> None:
        now = self._world.now()
        judged = plan_review.rule_of(rule, spec)
        status = plan_review.status_of(judged, spec, plan_review.attempt(record[1], asked), now)
        key = (f"{policy[0]}/{policy[1]}", rule.name)
        self._running[key] = _Running(
            record, asked, spec, judged, status, align(None, judged, status, now), now
        )
        self._world.tell_policy(
            policy,
            "ReviewBegun",
            f"review of {record[1]}: {plan_review.PERCENT} % of rule {rule.name} are copied to"
            f" {spec.stable.backend} and {spec.candidate.backend}; nobody sees the answers",
            False,
        )
        self._world.changed()

    def _why_not(self, policy: Name, record_name: str, spec: ReleaseRecordSpec | None) -> str:
        if spec is None:
            return f"there is no ReleaseRecord {record_name}: see `sluice ledger`"
        if spec.policy != policy[1]:
            return f"it is of policy {spec.policy}: ask there"
        found = self._world.rule((f"{policy[0]}/{policy[1]}", spec.rule))
        if found is None:
            return f"the policy has no rule {spec.rule} any more, so there is no traffic to copy"
        if found[1].phase in _BUSY:
            return f"rule {spec.rule} has a rollout under way: ask again when it has ended"
        return plan_review.unfit(spec)

    def _is_running(self, policy: Name, asked: str) -> bool:
        key = f"{policy[0]}/{policy[1]}"
        return any(k[0] == key and one.asked == asked for k, one in self._running.items())

    def _stop_others(self, policy: Name, asked: str) -> None:
        key = f"{policy[0]}/{policy[1]}"
        gone = [k for k, one in self._running.items() if k[0] == key and one.asked != asked]
        for k in gone:
            del self._running[k]
        if gone:
            self._world.changed()

    def _tell_due(self) -> None:
        due = self._world.due()
        metrics.REVIEWS_DUE.clear()
        for name in due:
            metrics.REVIEWS_DUE.labels(*name).set(1)
            if name not in self._told:
                told = f"the comparison is due again: kubectl sluice review {name[1]} -n {name[0]}"
                self._world.tell_record(name, "ReviewDue", told, False)
        self._told = set(due)


def _as_sample(seen: Observation) -> Observation:
    """Both arms answer copies, so that neither is a mirror beside the other."""
    return seen._replace(mirror=False)


def _answered(spec: ReleaseRecordSpec, asked: str) -> bool:
    try:
        since = datetime.fromisoformat(asked)
        return any(datetime.fromisoformat(one.time) >= since for one in spec.reviews)
    except (TypeError, ValueError):
        return bool(spec.reviews)
