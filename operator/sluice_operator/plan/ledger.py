"""The record of a release attempt: what was tried, by what it was judged, what came out; and back again.

A record has no owner, so it outlives its policy. Invariants: its name follows from policy, rule and attempt
alone, so writing it again is harmless; its history only grows; an outcome that was recorded as rejected is
never lost, since a lost status is rebuilt from it. Control writes `record` at an attempt's start, at every
transition and at its end, and `closed` where the attempt ends because the spec names it no longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from ..api.backend import InferenceBackend
from ..api.cachescope import CacheScopeSpec
from ..api.common import Metadata
from ..api.releaserecord import ArmEvidence, ArmRecord, Gates, Outcome, ReleaseRecord, ReleaseRecordSpec
from ..api.rollout import Release
from ..api.routepolicy import Rule
from ..api.rulestatus import ArmStatus, ExclusionStatus, Phase, RuleStatus, Transition
from ..api.tuning import Switch
from .arms import Arm, candidate_arm, stable_arm
from .names import digest
from .release_words import checked_by, hoped_for, judged_by, parameters
from .report import markdown
from .scope import BY_PERSON
from .stages import MAX_EXCLUDED_BEFORE, MAX_REJECTED, text

__all__ = ["closed", "expired", "markdown", "name", "outcome", "rebuild", "record"]

MAX_HISTORY = 200
_LONGEST = 63
_BEGINS = ("AttemptStarted", "AttemptRejected", "StatusUnreadable")
_REJECTED = (Outcome.ROLLED_BACK, Outcome.ABORTED)
_OUTCOMES = {
    Phase.PROMOTED: Outcome.PROMOTED,
    Phase.ROLLED_BACK: Outcome.ROLLED_BACK,
    Phase.ABORTED: Outcome.ABORTED,
}


def name(policy: str, rule: str, attempt: str, uid: str = "") -> str:
    """Name of the attempt's record: a DNS label, the same every time. `uid`: the policy's, so that another
    policy of the same name overwrites nothing."""
    end = f"-{attempt[:10]}-{digest(f'{uid}/{policy}/{rule}/{attempt}', 6)}"
    start = f"{policy}-{rule}"
    return f"{start[: _LONGEST - len(end)].rstrip('-')}{end}"


def outcome(status: RuleStatus) -> Outcome:
    """How the attempt ended, if it has: one that is watched has not."""
    return _OUTCOMES.get(status.phase, Outcome.RUNNING)


def record(
    namespace: str,
    policy: Metadata,
    model: str,
    rule: Rule,
    status: RuleStatus,
    *,
    backends: Mapping[str, InferenceBackend],
    stable: ArmEvidence,
    candidate: ArmEvidence,
    previous: ReleaseRecordSpec | None,
    now: datetime,
    scopes: Mapping[str, CacheScopeSpec] | None = None,
    switches: Iterable[Switch] = (),
) -> ReleaseRecordSpec:
    """The attempt under way as its record. `backends` and `scopes` are those of `namespace`; `previous` is
    the record as it was last written, whose history and reviews go on. Raises ValueError where there is no
    attempt."""
    if not status.attempt or rule.rollout is None:
        raise ValueError(f"rule {namespace}/{policy.name}/{rule.name} has no attempt to record")
    rollout, release = rule.rollout, rule.rollout.release
    history = _merged(previous, status)
    started = previous.started if previous else next(iter(history)).time if history else text(now)
    ended_as = outcome(status)
    same_end = previous is not None and previous.outcome is ended_as and previous.ended
    ended = "" if ended_as is Outcome.RUNNING else previous.ended if previous and same_end else text(now)
    last = _cause(history, ended_as)
    backend = backends.get(status.candidate.backend)

    def arm(role: Arm | None, seen: ArmStatus, did: ArmEvidence, is_candidate: bool) -> ArmRecord:
        found = backends.get(seen.backend)
        told = (
            {}
            if role is None
            else parameters(rule, role, found, candidate=is_candidate, scopes=scopes or {}, switches=switches)
        )
        return ArmRecord(
            backend=seen.backend, identity=seen.identity, config=seen.config, parameters=told, evidence=did
        )

    return ReleaseRecordSpec(
        policy=policy.name,
        policy_uid=policy.uid,
        model=model,
        rule=rule.name,
        attempt=status.attempt,
        number=rollout.attempt,
        outcome=ended_as,
        reason=last.reason if last else "",
        message=last.message if last else "",
        why=release.reason,
        owner=release.owner or (backend.spec.owner if backend is not None else ""),
        incident=release.incident,
        waivers=release.waivers,
        tasks=rule.match.tasks,
        started=started,
        ended=ended,
        stable=arm(stable_arm(rule), status.stable, stable, False),
        candidate=arm(candidate_arm(rule), status.candidate, candidate, True),
        gates=_gates(rule, status),
        fallbacks=[one.backend for one in rule.fallbacks],
        excluded=status.excluded,
        evaluation=status.evaluation,
        agreement=status.agreement,
        differing=status.differing,
        history=history,
        next_review=_review(release, ended or started),
        reviews=previous.reviews if previous else [],
        rule_status=status.model_dump(mode="json", by_alias=True),
    )


def _gates(rule: Rule, status: RuleStatus) -> Gates:
    rollout = rule.rollout
    assert rollout is not None
    named = rollout.evaluation.suites if rollout.evaluation is not None else []
    return Gates(
        alpha=rollout.alpha,
        guards=judged_by(rollout),
        checks=checked_by(rule.contract.checks),
        suites=(status.evaluation.suites if status.evaluation is not None else []) or named,
        gains=hoped_for(rule, status),
    )


def _review(release: Release, since: str) -> str:
    return text(datetime.fromisoformat(since) + timedelta(days=release.review_after_days))


def _merged(previous: ReleaseRecordSpec | None, status: RuleStatus) -> list[Transition]:
    """The attempt's lines: those recorded, and what is new; the status keeps fewer, and earlier attempts'."""
    lines = list(status.history)
    begins = [i for i, line in enumerate(lines) if line.reason in _BEGINS]
    if begins:
        lines = lines[begins[-1] :]
    elif previous is not None:
        lines = [line for line in lines if line.time >= previous.started]
    known = previous.history if previous is not None else []
    return [*known, *(line for line in lines if line not in known)][-MAX_HISTORY:]


def _cause(history: list[Transition], ended: Outcome) -> Transition | None:
    """The line that says why it ended so; while it runs, the newest."""
    phases = [phase for phase, one in _OUTCOMES.items() if one is ended]
    return next((line for line in reversed(history) if not phases or line.phase in phases), None)


def closed(previous: ReleaseRecordSpec, reason: str, message: str, now: datetime) -> ReleaseRecordSpec:
    """The record of an attempt that the spec names no longer: another candidate, no rollout, no policy. One
    that had ended stays as it ended; one whose candidate has become the target was promoted."""
    if previous.outcome is not Outcome.RUNNING:
        return previous
    taken = reason == "PromotedInSpec"
    phase = Phase.PROMOTED if taken else Phase.STABLE
    line = Transition(time=text(now), phase=phase, reason=reason, message=message)
    return previous.model_copy(
        update={
            "outcome": Outcome.PROMOTED if taken else Outcome.SUPERSEDED,
            "reason": reason,
            "message": message,
            "ended": text(now),
            "history": [*previous.history, line][-MAX_HISTORY:],
        }
    )


def rebuild(records: Iterable[ReleaseRecordSpec], policy_uid: str, rule: str) -> RuleStatus | None:
    """A lost status from the ledger; None: there is no record of this policy's rule.

    What was promoted serves again, what was rejected stays rejected. An attempt that ran comes back in the
    stage where it was last recorded, at weight 0 and with fresh evidence: what has happened since is unknown.
    """
    mine = sorted(
        (one for one in records if one.policy_uid == policy_uid and one.rule == rule),
        key=lambda one: (one.started, one.attempt),
    )
    if not mine:
        return None
    newest = mine[-1]
    status = RuleStatus.model_validate(newest.rule_status) if newest.rule_status else RuleStatus(name=rule)
    refused = [*status.rejected, *(one.attempt for one in mine if one.outcome in _REJECTED)]
    left = newest.outcome is Outcome.SUPERSEDED
    kept = {
        "rejected": list(dict.fromkeys(refused))[-MAX_REJECTED:],
        "excluded_before": _apart(mine if left else mine[:-1], status)[-MAX_EXCLUDED_BEFORE:],
    }
    if left:
        return RuleStatus(name=rule, history=status.history).model_copy(update=kept)
    if newest.outcome is Outcome.RUNNING:
        status = _from_nothing(status, newest)
    return status.model_copy(update=kept)


def _apart(records: Iterable[ReleaseRecordSpec], status: RuleStatus) -> list[ExclusionStatus]:
    """What attempts of the past rolled back alone, each with its attempt."""
    found = [
        one.model_copy(update={"attempt": record.attempt})
        for record in records
        for one in record.excluded
        if one.reason != BY_PERSON
    ]
    return [*status.excluded_before, *(one for one in found if one not in status.excluded_before)]


def _from_nothing(status: RuleStatus, newest: ReleaseRecordSpec) -> RuleStatus:
    watching = status.phase is Phase.WATCHING
    return status.model_copy(
        update={
            "weight": 0,
            "shadow_percent": 0,
            "held": "",
            "held_message": "",
            "guards": [],
            "slices": [],
            "coverage": [],
            "num_samples": 0,
            "num_stable_samples": 0,
            "num_restarts": status.num_restarts + 1,
            "stage_since": status.stage_since if watching else "",
            "history": newest.history[-20:],
        }
    )


def expired(records: Iterable[ReleaseRecord], keep: int, max_age_days: int, now: datetime) -> tuple[str, ...]:
    """Names of records, all of one namespace, that may be deleted: beyond the newest `keep` of a policy, or
    ended more than `max_age_days` ago. Never one that runs, nor the newest of a rule, which a lost status is
    rebuilt from."""
    by_policy: dict[str, list[ReleaseRecord]] = {}
    for one in sorted(records, key=lambda one: (one.spec.started, one.metadata.name), reverse=True):
        by_policy.setdefault(one.spec.policy, []).append(one)
    gone = []
    for group in by_policy.values():
        rules: set[tuple[str, str]] = set()
        for i, one in enumerate(group):
            key = (one.spec.policy_uid, one.spec.rule)
            newest = key not in rules and one.spec.policy_uid == group[0].spec.policy_uid
            rules.add(key)
            if newest or one.spec.outcome is Outcome.RUNNING:
                continue
            ended = datetime.fromisoformat(one.spec.ended or one.spec.started)
            if i >= keep or now - ended > timedelta(days=max_age_days):
                gone.append(one.metadata.name)
    return tuple(gone)
