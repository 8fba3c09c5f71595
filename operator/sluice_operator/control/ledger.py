"""The ledger on the wire: a ReleaseRecord for each attempt, written as it goes on.

`follow` is called after each decision, never waits, and queues what is news; `run` writes it. Only
`ensure` waits, before a candidate gets its first or more traffic: an attempt that nobody would find
afterwards does not begin. Invariant: no rollback ever waits for the ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ..api import ReleaseRecord, RuleStatus
from ..api.common import Metadata
from ..api.releaserecord import Outcome, ReleaseRecordSpec, Review, ReviewOutcome
from ..kube import KubeError
from ..plan import ledger as plan_ledger
from . import metrics
from .cache import Name
from .recording import Evidence, Subject, gap, grown, is_due, made_from, object_of, text

__all__ = ["Ledger", "Subject"]
log = logging.getLogger(__name__)
REFRESH_S = 30.0
"""Evidence alone is no reason to write a record more often."""
_BACKOFF_S = (1.0, 60.0)
_LOOK_AGAIN_DAYS = 7


@dataclass
class _Kept:
    """One record, as it shall be."""

    spec: ReleaseRecordSpec
    written: float = float("-inf")
    """When it was last written, monotonic seconds."""
    dirty: bool = False
    attempts: int = 0
    due: float = 0.0
    """When it may be tried again."""
    seen: tuple[object, ...] = ()
    """What it was last made from."""


class Ledger:
    """All records. `apply` and `delete` are the API server's verbs; `now` and `clock` give Unix and
    monotonic time."""

    def __init__(
        self,
        apply: Callable[[dict[str, Any]], Awaitable[Any]],
        delete: Callable[[str, str], Awaitable[None]],
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        keep: int = 50,
        max_age_days: int = 400,
    ) -> None:
        self._apply, self._delete, self._now, self._clock = apply, delete, now, clock
        self._keep, self._max_age_days = keep, max_age_days
        self._records: dict[Name, _Kept] = {}
        self._current: dict[tuple[str, str, str], Name] = {}
        """The record of each rule's attempt under way."""
        self._gone: set[Name] = set()
        """To be deleted."""
        self._wake = asyncio.Event()
        self._one = asyncio.Lock()

    # What is known

    def load(self, records: Iterable[ReleaseRecord]) -> None:
        """Takes in what the API server holds, at start."""
        for record in records:
            self._records[_name(record)] = _Kept(record.spec, written=self._clock())
        for (namespace, name), kept in self._records.items():
            if kept.spec.outcome is Outcome.RUNNING:
                self._current[(namespace, kept.spec.policy_uid, kept.spec.rule)] = (namespace, name)
        self._prune()

    def dropped(self, name: Name) -> None:
        """Somebody has deleted a record: one that runs is written again, any other forgotten."""
        kept = self._records.get(name)
        if kept is not None and name in self._current.values():
            self._mark(kept)
        elif kept is not None:
            del self._records[name]

    def get(self, name: Name) -> ReleaseRecordSpec | None:
        """One record."""
        kept = self._records.get(name)
        return kept.spec if kept is not None else None

    def of(self, subject: Subject, status: RuleStatus) -> ReleaseRecordSpec | None:
        """The record of the status' attempt: after a restart the gate's summary goes on from its evidence."""
        name = self._name_of(subject, status)
        return self.get(name) if name is not None else None

    def restore(self, namespace: str, policy_uid: str, rule: str) -> RuleStatus | None:
        """A lost status, from the policy's own records; None: there is none."""
        mine = (kept.spec for name, kept in self._records.items() if name[0] == namespace)
        return plan_ledger.rebuild(mine, policy_uid, rule)

    # What happens

    def follow(self, subject: Subject, status: RuleStatus, evidence: Evidence) -> None:
        """Records where the rule's rollout stands; to be called with every decision."""
        before = self._current.get(subject.where)
        name = self._name_of(subject, status)
        if before is not None and before != name:
            self._close(subject, status)
        if name is None:
            return
        self._current[subject.where] = name
        kept = self._records.get(name)
        seen = made_from(subject, status)
        if kept is not None and kept.seen == seen and not self._stale(kept):
            return
        spec = self._made(subject, status, kept.spec if kept is not None else None, evidence)
        if kept is None:
            kept = self._records[name] = _Kept(spec)
        kept.seen = seen
        if kept.spec != spec or kept.written == float("-inf"):
            kept.spec = spec
            self._mark(kept)

    def ended(self, namespace: str, policy_uid: str, reason: str, message: str) -> None:
        """The policy is gone: its attempts under way end with it."""
        for where in [w for w in self._current if w[:2] == (namespace, policy_uid)]:
            self._end(where, reason, message)

    def sync(self, living: Mapping[str, Collection[str]]) -> None:
        """Ends attempts whose policy or rule went while nobody looked. `living`: rules by policy's uid."""
        for where in [w for w in self._current if w[2] not in living.get(w[1], ())]:
            self._end(where, "RuleRemoved", f"rule {where[2]} is gone, and the attempt with it")

    async def ensure(self, subject: Subject, status: RuleStatus) -> None:
        """Returns once the record of the status' attempt is in the API server. Raises KubeError."""
        name = self._name_of(subject, status)
        kept = self._records.get(name) if name is not None else None
        if name is not None and kept is not None and kept.dirty:
            await self._write(name, kept)

    def reviewed(self, name: Name, outcome: ReviewOutcome, message: str) -> None:
        """Adds a review's result; the next is due after as long as the first was, sooner where it could not
        tell."""
        kept = self._records.get(name)
        if kept is None:
            return
        now, after = self._now(), gap(kept.spec)
        if outcome is ReviewOutcome.LOOK_LONGER:
            after = min(after, timedelta(days=_LOOK_AGAIN_DAYS))
        review = Review(time=text(now), outcome=outcome, message=message)
        kept.spec = kept.spec.model_copy(
            update={"reviews": [*kept.spec.reviews, review], "next_review": text(now + after)}
        )
        self._mark(kept)

    def due(self) -> list[Name]:
        """Records whose comparison is due again: the newest of each rule, where it ended by evidence."""
        newest: dict[tuple[str, str, str], tuple[str, Name]] = {}
        for name, kept in self._records.items():
            where = (name[0], kept.spec.policy_uid, kept.spec.rule)
            newest[where] = max(newest.get(where, ("", name)), (kept.spec.started, name))
        found = [name for _, name in newest.values()]
        return sorted(name for name in found if is_due(self._records[name].spec, self._now()))

    # Writing

    async def run(self) -> None:
        """Writes what is news, until cancelled."""
        while True:
            self._wake.clear()
            wait = await self._write_due()
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _write_due(self) -> float | None:
        """Writes what may be written now. Returns seconds until more may be; None: there is nothing."""
        for name, kept in list(self._records.items()):
            if kept.dirty and kept.due <= self._clock():
                try:
                    await self._write(name, kept)
                except KubeError as error:
                    log.warning("a release record could not be written", extra={"error": str(error)})
        await self._delete_gone()
        waiting = [kept.due for kept in self._records.values() if kept.dirty]
        if not waiting and not self._gone:
            return None
        return max(0.0, min(waiting, default=self._clock() + _BACKOFF_S[1]) - self._clock())

    async def _write(self, name: Name, kept: _Kept) -> None:
        async with self._one:
            if not kept.dirty:
                return
            spec = kept.spec
            try:
                await self._apply(object_of(name, spec))
            except KubeError:
                metrics.LEDGER_FAILURES.inc()
                kept.attempts += 1
                kept.due = self._clock() + min(_BACKOFF_S[0] * 2 ** (kept.attempts - 1), _BACKOFF_S[1])
                raise
            kept.attempts, kept.due, kept.written = 0, 0.0, self._clock()
            kept.dirty = kept.spec is not spec
        if spec.ended:
            self._prune()

    def _prune(self) -> None:
        by_namespace: dict[str, list[ReleaseRecord]] = {}
        for name, kept in self._records.items():
            record = ReleaseRecord(metadata=Metadata(namespace=name[0], name=name[1]), spec=kept.spec)
            by_namespace.setdefault(name[0], []).append(record)
        for namespace, records in by_namespace.items():
            gone = plan_ledger.expired(records, self._keep, self._max_age_days, self._now())
            self._gone.update((namespace, name) for name in gone)
        if self._gone:
            self._wake.set()

    async def _delete_gone(self) -> None:
        for name in sorted(self._gone):
            try:
                await self._delete(*name)
            except KubeError as error:
                metrics.LEDGER_FAILURES.inc()
                log.warning("an old release record could not be deleted", extra={"error": str(error)})
                return
            self._gone.discard(name)
            self._records.pop(name, None)

    # Making

    def _name_of(self, subject: Subject, status: RuleStatus) -> Name | None:
        if not status.attempt or subject.rule.rollout is None:
            return None
        policy = subject.policy
        return (
            policy.namespace,
            plan_ledger.name(policy.name, subject.rule.name, status.attempt, policy.uid),
        )

    def _end(self, where: tuple[str, str, str], reason: str, message: str) -> None:
        kept = self._records[self._current.pop(where)]
        spec = plan_ledger.closed(kept.spec, reason, message, self._now())
        if spec is not kept.spec:
            kept.spec = spec
            self._mark(kept)

    def _close(self, subject: Subject, status: RuleStatus) -> None:
        """The attempt that was under way is no longer named."""
        last = status.history[-1] if status.history else None
        reason = last.reason if last is not None else "Superseded"
        message = last.message if last is not None else "another attempt has begun"
        self._end(subject.where, reason, message)

    def _stale(self, kept: _Kept) -> bool:
        running = kept.spec.outcome is Outcome.RUNNING
        return running and not kept.dirty and self._clock() - kept.written >= REFRESH_S

    def _made(
        self,
        subject: Subject,
        status: RuleStatus,
        previous: ReleaseRecordSpec | None,
        evidence: Evidence,
    ) -> ReleaseRecordSpec:
        if previous is not None and previous.ended and plan_ledger.outcome(status) is previous.outcome:
            # What came after the end is no evidence of the attempt.
            stable, candidate = previous.stable.evidence, previous.candidate.evidence
        else:
            stable, candidate = evidence()
            if previous is not None:
                stable = grown(previous.stable.evidence, stable)
                candidate = grown(previous.candidate.evidence, candidate)
        spec = plan_ledger.record(
            subject.policy.namespace,
            subject.policy,
            subject.model,
            subject.rule,
            status,
            backends=subject.backends,
            stable=stable,
            candidate=candidate,
            previous=previous,
            now=self._now(),
            scopes=subject.scopes,
            switches=subject.switches,
        )
        if previous is not None and previous.reviews:
            return spec.model_copy(update={"next_review": previous.next_review})
        return spec

    def _mark(self, kept: _Kept) -> None:
        kept.dirty = True
        self._wake.set()


def _name(record: ReleaseRecord) -> Name:
    return (record.metadata.namespace, record.metadata.name)
