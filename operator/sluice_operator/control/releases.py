"""What a rollout knows beside the requests themselves, and where it goes on record.

Suites, queries, capacity and the ledger each have a module of their own; this one gives each what it needs of
a policy, and the decision what they found. Invariant: nothing here waits, so no decision waits for any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..api import EvalSuite, InferenceBackend, Metadata, RuleStatus
from ..api.cachescope import CacheScope
from ..api.releaserecord import ArmEvidence
from ..api.routepolicy import RoutePolicySpec, Rule
from ..gates.summary import Summary
from ..plan import names
from ..plan.rollout import Decision
from ..plan.scope import tasks_out
from .cache import Cache, Name
from .evaluations import ASKED, Evaluations, Run
from .ledger import Ledger
from .queries import Queries, Question
from .recording import Subject
from .traffic import Traffic
from .usage import Usage

_FOLLOW_S = 5.0
"""The ledger hears of news at once, and of mere evidence so often."""

RuleKey = tuple[str, str]
"""Policy as namespace/name, and rule."""


@dataclass
class _Rule:
    """What is kept of a rule with a rollout."""

    traffic: Traffic = field(default_factory=Traffic)
    usage: Usage = field(default_factory=Usage)
    attempt: str = ""
    followed: float = float("-inf")
    """Unix time at which the ledger last heard of it."""
    backends: dict[str, Name] = field(default_factory=dict)
    """Who serves each arm."""


class Releases:
    """One for all policies."""

    def __init__(
        self,
        cache: Cache,
        ledger: Ledger,
        evaluations: Evaluations,
        queries: Queries,
        *,
        reached: Callable[[str], int],
        kv_percent: Callable[[str, str], int],
    ) -> None:
        self._cache, self.ledger, self._evaluations, self._queries = cache, ledger, evaluations, queries
        self._reached, self._kv_percent = reached, kv_percent
        self._rules: dict[RuleKey, _Rule] = {}
        self._questions: dict[RuleKey, tuple[Question, ...]] = {}

    def kept(self, key: RuleKey) -> _Rule:
        return self._rules.setdefault(key, _Rule())

    def rate(self, backend: Name, now: datetime) -> float:
        """Requests/s that a backend got of all rules in the last minute; 0: unknown."""
        return sum(
            kept.traffic.arm_rate(arm, now.timestamp())
            for kept in self._rules.values()
            for arm, name in kept.backends.items()
            if name == backend
        )

    # For a decision

    def world(self, key: RuleKey, rule: Rule, status: RuleStatus, now: datetime) -> dict[str, Any]:
        """Fields of `plan.rollout.World` that come from here."""
        if rule.rollout is None:
            return {}
        kept, namespace = self.kept(key), key[0].partition("/")[0]
        candidate = rule.rollout.candidate.backend or rule.target.backend or ""
        stable = rule.target.backend or ""
        backend, target = (self._cache.backends.get((namespace, name)) for name in (candidate, stable))
        rates = kept.traffic.rates(now.timestamp())
        found: dict[str, Any] = {
            "evaluation": self._evaluations.status(*key, status.attempt),
            "request_rate": sum(rates.values()),
            "slice_rates": rates,
            "mean_seconds": kept.traffic.mean_seconds(now.timestamp()),
            "ready_replicas": self._reached(names.cluster(namespace, candidate)),
            "stable_replicas": self._reached(names.cluster(namespace, stable)),
        }
        if isinstance(target, InferenceBackend):
            found["stable_safe_rate"] = _safe_rate(target)
        if isinstance(backend, InferenceBackend):
            found["wanted_replicas"] = backend.spec.replicas
            found["safe_rate"] = _safe_rate(backend)
        return found

    # After one

    def decided(
        self,
        policy: Metadata,
        spec: RoutePolicySpec,
        rule: Rule,
        decision: Decision,
        summary: Summary,
        now: datetime,
    ) -> None:
        """Starts what the decision wants, ends what it no longer is about, and puts it on record. `summary`:
        what both arms have done in the attempt."""
        status, key = decision.status, (f"{policy.namespace}/{policy.name}", rule.name)
        kept = self.kept(key)
        kept.backends = _arms(policy.namespace, rule)
        if kept.attempt != status.attempt:
            kept.attempt, kept.usage = status.attempt, Usage()
            self._evaluations.sync(*key, status.attempt)
            before = self.ledger.of(self.subject(policy, spec, rule), status)
            if before is not None:
                summary.restore(before.stable.evidence, before.candidate.evidence)
        self._evaluate(key, spec, rule, decision, policy.annotations)
        self._ask(key, rule, status)
        self._use(kept, now)
        if not decision.material and now.timestamp() - kept.followed < _FOLLOW_S:
            return
        kept.followed = now.timestamp()

        def evidence() -> tuple[ArmEvidence, ArmEvidence]:
            done = summary.stable.evidence(), summary.candidate.evidence()
            return kept.usage.told(*done, self._prices(kept))

        self.ledger.follow(self.subject(policy, spec, rule), status, evidence)

    def subject(self, policy: Metadata, spec: RoutePolicySpec, rule: Rule) -> Subject:
        """What the ledger needs of a rule."""
        namespace = policy.namespace
        return Subject(
            policy,
            spec.model,
            rule,
            {
                name: found
                for (ns, name), found in self._cache.backends.items()
                if ns == namespace and isinstance(found, InferenceBackend)
            },
            {
                name: found.spec
                for (ns, name), found in self._cache.scopes.items()
                if ns == namespace and isinstance(found, CacheScope)
            },
            tuple(spec.switches),
        )

    def gone(self, policy: Metadata) -> None:
        """A policy was deleted."""
        key = f"{policy.namespace}/{policy.name}"
        self._evaluations.forget(key)
        for rule in [r for r in self._rules if r[0] == key]:
            del self._rules[rule]
        for rule in [r for r in self._questions if r[0] == key]:
            del self._questions[rule]
        self._sync_queries()
        self.ledger.ended(
            policy.namespace, policy.uid, "PolicyDeleted", "the policy was deleted while it was under way"
        )

    def suites(self, namespace: str) -> frozenset[str]:
        """Suites that a policy of the namespace may name."""
        return frozenset(
            n for (ns, n), s in self._cache.suites.items() if ns == namespace and isinstance(s, EvalSuite)
        )

    def _evaluate(
        self, key: RuleKey, spec: RoutePolicySpec, rule: Rule, decision: Decision, asked: Mapping[str, str]
    ) -> None:
        status, rollout = decision.status, rule.rollout
        if rollout is None or not status.attempt:
            return
        wanted = rollout.evaluation
        if wanted is None:
            return
        out = tasks_out(status.excluded)
        run = Run(*key, status.attempt, decision.evaluate, spec.model, wanted, out)
        if decision.evaluate:
            self._evaluations.want(run)
        else:
            self._evaluations.demand(run, asked.get(ASKED, ""), status.evaluation)

    def _ask(self, key: RuleKey, rule: Rule, status: RuleStatus) -> None:
        wanted: tuple[Question, ...] = ()
        if rule.rollout is not None and (status.weight or status.shadow_percent) and status.attempt:
            wanted = tuple(
                Question(*key, status.attempt, status.stable.backend, status.candidate.backend, query)
                for query in rule.rollout.queries
            )
        if self._questions.get(key, ()) != wanted:
            self._questions[key] = wanted
            self._sync_queries()

    def _sync_queries(self) -> None:
        self._queries.sync(question for asked in self._questions.values() for question in asked)

    def _use(self, kept: _Rule, now: datetime) -> None:
        for arm, (namespace, backend) in kept.backends.items():
            kept.usage.see(
                arm,
                self._reached(names.cluster(namespace, backend)),
                self._kv_percent(namespace, backend),
                now.timestamp(),
            )

    def _prices(self, kept: _Rule) -> dict[str, tuple[str, str]]:
        """Price of a replica's hour and currency, by arm."""
        found = {}
        for arm, name in kept.backends.items():
            backend = self._cache.backends.get(name)
            if isinstance(backend, InferenceBackend) and backend.spec.cost is not None:
                found[arm] = (backend.spec.cost.per_replica_hour, backend.spec.cost.currency)
        return found


def _arms(namespace: str, rule: Rule) -> dict[str, Name]:
    """Who serves each arm."""
    stable = rule.target.backend or ""
    candidate = rule.rollout.candidate.backend if rule.rollout is not None else None
    return {"stable": (namespace, stable), "candidate": (namespace, candidate or stable)}


def _safe_rate(backend: InferenceBackend) -> float | None:
    """Of another identity than what runs now a measurement says nothing."""
    capacity, identity = backend.status.capacity, backend.status.identity
    if capacity is None or identity is None or capacity.identity != identity.digest:
        return None
    return float(capacity.safe_requests_per_second)
