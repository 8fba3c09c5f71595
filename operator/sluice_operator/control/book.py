"""RoutePolicies in memory: which spec is in force, and where each rollout stands.

Invariant of the order of writes: ``rules`` is what the gateway is told. A reduction enters it at once and
is persisted after; an increase waits in ``pending`` until it is persisted. So a crash at any point leaves
the candidate with no more than the status says.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ..api import CacheScope, InferenceBackend, Metadata, RoutePolicy, RoutePolicySpec, RuleStatus, Tenant
from ..api.routepolicy import Rule
from ..api.rulestatus import ArmStatus, Phase, Transition
from ..gates import GateState, Observation, align, deafen, fold, take_query
from ..plan import names
from ..plan.arms import CANDIDATE, STABLE, candidate_arm, stable_arm
from ..plan.backend_status import PodState
from ..plan.conditions import Problem
from ..plan.rollout import Arms, Decision, World, decide
from ..plan.routes import Accepted
from ..plan.validate import Surroundings, policy_problems
from ..plan.withdrawn import withdrawn
from . import metrics
from .cache import Broken, Cache, Name
from .releases import Releases
from .router import Router

log = logging.getLogger(__name__)
_HTTP_IDENTITY = "http-service"


@dataclass
class Entry:
    """One policy."""

    name: Name
    created: str
    uid: str = ""
    generation: int = 0
    accepted: int = 0
    whole: RoutePolicySpec | None = None
    """Spec of the generation that was accepted last."""
    spec: RoutePolicySpec | None = None
    """What is in force: that, without what a later generation takes from candidates."""
    withdrawn: tuple[str, ...] = ()
    """What that is, for people."""
    problems: tuple[Problem, ...] = ()
    rules: dict[str, RuleStatus] = field(default_factory=dict)
    pending: dict[str, RuleStatus] = field(default_factory=dict)
    gates: dict[str, GateState] = field(default_factory=dict)
    unheard: dict[str, datetime] = field(default_factory=dict)
    """Since when evidence of a rule's arms can't be heard."""
    news: list[tuple[str, Transition]] = field(default_factory=list)
    services: tuple[Problem, ...] = ()
    """Services that it names and that were not there when last looked for."""
    looked: tuple[int, float] = (0, 0.0)
    """Generation whose Services were looked for, and when."""
    told: tuple[Problem, ...] = ()
    """Problems that an Event has told already."""
    urgent: bool = True
    written: float = 0.0
    in_force: int = 0
    """Generation that every gateway has had; a later push of weights or endpoints takes nothing from that."""
    kept: int = 0
    """Generation of the newest ControllerRevision."""
    metadata: Metadata | None = None
    """Of the policy, as last seen."""

    @property
    def key(self) -> str:
        return f"{self.name[0]}/{self.name[1]}"

    def view(self) -> Accepted | None:
        if self.spec is None:
            return None
        return Accepted(self.name[0], self.name[1], self.created, self.spec, dict(self.rules))


class Book:
    """All policies. Everything here is synchronous and without I/O; the caller pushes and persists."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.router: Router | None = None
        self.releases: Releases | None = None
        self.prometheus = False
        """Whether there is one to ask."""
        self.entries: dict[Name, Entry] = {}
        self.warm = False
        """False after a start, until the gateway has what the statuses say: nobody is blamed for not being
        ready."""
        self._revisions: dict[Name, tuple[int, RoutePolicySpec]] = {}

    def accepted(self) -> list[Accepted]:
        return [view for entry in self.entries.values() if (view := entry.view()) is not None]

    def restore(self, revisions: Iterable[Mapping[str, Any]]) -> None:
        """Takes in the ControllerRevisions that keep accepted specs; the newest of a policy counts."""
        for revision in revisions:
            data = revision.get("data") or {}
            owner: Mapping[str, Any] = next(iter(revision["metadata"].get("ownerReferences") or []), {})
            name = (revision["metadata"]["namespace"], owner.get("name", ""))
            try:
                spec = RoutePolicySpec.model_validate(data["spec"])
            except (KeyError, ValueError):
                continue
            policy = self._cache.policies.get(name)
            if policy is None or policy.metadata.uid != owner.get("uid"):
                continue
            if revision["revision"] > self._revisions.get(name, (0, spec))[0]:
                self._revisions[name] = (revision["revision"], spec)

    def consider(self, name: Name) -> bool:
        """Looks at the policy as it is now. Returns whether what is in force has changed."""
        policy = self._cache.policies.get(name)
        entry = self.entries.get(name)
        if entry is not None and (policy is None or (entry.created, entry.uid) != _birth(policy)):
            self._forget(entry)
        if policy is None:
            return self.entries.pop(name, None) is not None
        if entry is None or (entry.created, entry.uid) != _birth(policy):
            entry = self.entries[name] = self._new(policy)
        spec_before, problems_before = entry.spec, entry.problems
        entry.metadata = policy.metadata
        entry.generation = policy.metadata.generation
        if isinstance(policy, Broken):
            entry.problems = (policy.problem,)
        else:
            entry.problems = policy_problems(policy.spec, self._around(name, entry.created))
            if not entry.problems or entry.accepted == entry.generation:
                entry.accepted, entry.whole = entry.generation, policy.spec
                entry.spec, entry.withdrawn = policy.spec, ()
            elif entry.whole is not None:
                entry.spec, entry.withdrawn = withdrawn(entry.whole, policy.spec)
        entry.urgent = entry.urgent or entry.problems != problems_before or entry.spec != spec_before
        return entry.spec != spec_before

    def _new(self, policy: RoutePolicy | Broken) -> Entry:
        name = (policy.metadata.namespace, policy.metadata.name)
        entry = Entry(name, *_birth(policy))
        if name in self._revisions:
            entry.accepted, entry.whole = self._revisions[name]
            entry.spec, entry.kept = entry.whole, entry.accepted
        # Also where the spec is not understood: what was rolled back stays so.
        rules = policy.status.rules if isinstance(policy, RoutePolicy) else _rules(policy.status)
        entry.rules = {r.name: r for r in rules} or self._rebuilt(policy, entry)
        return entry

    def _rebuilt(self, policy: RoutePolicy | Broken, entry: Entry) -> dict[str, RuleStatus]:
        """A lost status, from the ledger: what was rolled back stays so, and what was promoted serves."""
        spec = policy.spec if isinstance(policy, RoutePolicy) else entry.spec
        if self.releases is None or spec is None:
            return {}
        meta, ledger = policy.metadata, self.releases.ledger
        found = {r.name: ledger.restore(meta.namespace, meta.uid, r.name) for r in spec.rules}
        return {name: status for name, status in found.items() if status is not None}

    def _forget(self, entry: Entry) -> None:
        if self.releases is not None and entry.metadata is not None:
            self.releases.gone(entry.metadata)

    def _around(self, name: Name, created: str) -> Surroundings:
        namespace, cache = name[0], self._cache
        mine = (created, f"{name[0]}/{name[1]}")
        return Surroundings(
            backends={
                n: b.spec.fitness
                for (ns, n), b in cache.backends.items()
                if ns == namespace and isinstance(b, InferenceBackend) and not b.metadata.deletion_timestamp
            },
            scopes=frozenset(
                n for (ns, n), s in cache.scopes.items() if ns == namespace and isinstance(s, CacheScope)
            ),
            suites=self.releases.suites(namespace) if self.releases else frozenset(),
            prometheus=self.prometheus,
            tenants={n: tuple(t.spec.tasks) for (_, n), t in cache.tenants.items() if isinstance(t, Tenant)},
            models_taken={
                e.spec.model: e.key
                for e in self.entries.values()
                if e.spec is not None and (e.created, e.key) < mine
            },
        )

    def observe(self, entry: Entry, rule: Rule, observations: Iterable[Observation], now: datetime) -> None:
        status = entry.rules.get(rule.name) or RuleStatus(name=rule.name)
        if self.releases is not None:
            observations = tuple(observations)
            self.releases.kept((entry.key, rule.name)).traffic.take(observations)
        gate = align(entry.gates.get(rule.name), rule, status, now)
        self._listen(entry, rule, gate, now)
        try:
            entry.gates[rule.name] = fold(gate, observations)
        except Exception:
            # One pod's nonsense must not end the loop that all rollouts depend on.
            metrics.DECISION_ERRORS.inc()
            log.exception("evidence could not be taken in", extra={"policy": entry.key, "rule": rule.name})

    def decide(self, entry: Entry, now: datetime, only: str | None = None) -> bool:
        """Decides each rule, or ``only`` one. Returns whether the gateway must be told at once."""
        if entry.spec is None:
            return False
        changed = False
        for rule in entry.spec.rules:
            if only is None or rule.name == only:
                changed |= self._decide(entry, rule, now)
        known = {rule.name for rule in entry.spec.rules}
        for table in (entry.rules, entry.pending, entry.gates, entry.unheard):
            for gone in [n for n in table if n not in known]:
                del table[gone]
        return changed

    def _decide(self, entry: Entry, rule: Rule, now: datetime) -> bool:
        before = entry.rules.get(rule.name) or RuleStatus(name=rule.name)
        if rule.target.refusal is not None:
            entry.rules[rule.name] = RuleStatus(name=rule.name, history=before.history)
            return False
        try:
            gate = align(entry.gates.get(rule.name), rule, before, now)
            self._listen(entry, rule, gate, now)
            world = self._world(entry, rule, now)
            if self.releases is not None:
                known = self.releases.world((entry.key, rule.name), rule, before, now)
                world = replace(world, **known)
            decision = decide(entry.key, rule, before, gate, world, now)
        except Exception:
            metrics.DECISION_ERRORS.inc()
            log.exception("a decision failed", extra={"policy": entry.key, "rule": rule.name})
            return False
        entry.gates[rule.name] = gate
        if decision.increases and rule.name in entry.pending:
            return False
        self._record(entry, rule, decision, gate, now)
        if decision.increases:
            entry.pending[rule.name] = decision.status
            self._tell(entry, rule, decision.transitions)
            return False
        if decision.material:
            # What was decided on the way up is void once something else has been decided.
            entry.pending.pop(rule.name, None)
        entry.rules[rule.name] = decision.status
        entry.gates[rule.name] = align(gate, rule, decision.status, now)
        if decision.material:
            self._tell(entry, rule, decision.transitions)
        return decision.material

    def _record(self, entry: Entry, rule: Rule, decision: Decision, gate: GateState, now: datetime) -> None:
        if self.releases is not None and entry.metadata is not None and entry.spec is not None:
            self.releases.decided(entry.metadata, entry.spec, rule, decision, gate.summary, now)

    def recorded(self) -> dict[str, list[str]]:
        """Rules that may have an attempt, by the policy's uid."""
        return {
            entry.uid: [r.name for r in entry.spec.rules if r.target.refusal is None] if entry.spec else []
            for entry in self.entries.values()
        }

    def take_query(
        self, name: Name, rule: str, query: str, candidate: float | None, stable: float | None, error: str,
        now: datetime,
    ) -> bool:  # fmt: skip
        """Takes in a value of a PromQL guard. Returns whether anybody is judged by it."""
        entry = self.entries.get(name)
        gate = entry.gates.get(rule) if entry is not None else None
        if gate is None:
            return False
        with contextlib.suppress(KeyError):  # the query has been edited away meanwhile
            take_query(gate, query, candidate, stable, now, error)
        return True

    def _tell(self, entry: Entry, rule: Rule, transitions: Iterable[Transition]) -> None:
        entry.urgent = True
        for line in transitions:
            entry.news.append((rule.name, line))
            metrics.DECISIONS.labels(line.phase.value, line.reason).inc()

    def apply_pending(self, entry: Entry, persisted: Mapping[str, RuleStatus], now: datetime) -> bool:
        """Lets increases in that are persisted now, unless something else was decided meanwhile."""
        changed = False
        for name, status in persisted.items():
            if entry.pending.get(name) is status:
                del entry.pending[name]
                entry.rules[name] = status
                rule = next((r for r in entry.spec.rules if r.name == name), None) if entry.spec else None
                if rule is not None:
                    entry.gates[name] = align(entry.gates.get(name), rule, status, now)
                changed = True
        return changed

    def running(self, entry: Entry) -> bool:
        """Whether time alone may change something."""
        return entry.spec is not None and any(
            r.rollout is not None or (s := entry.rules.get(r.name)) is None or s.phase is not Phase.STABLE
            for r in entry.spec.rules
        )

    def _listen(self, entry: Entry, rule: Rule, gate: GateState, now: datetime) -> None:
        """Evidence of one arm alone is none, whichever of them it is."""
        if not self.warm or rule.rollout is None:
            return
        arms = {rule.target.backend, rule.rollout.candidate.backend} - {None}
        if any(self._unheard(entry.name[0], str(backend)) for backend in arms):
            deafen(gate, now)

    def _world(self, entry: Entry, rule: Rule, now: datetime) -> World:
        stable, candidate = stable_arm(rule), candidate_arm(rule)
        namespace = entry.name[0]
        if stable is not None and stable.service is not None:
            target = ArmStatus(
                backend=stable.service.name, identity=_HTTP_IDENTITY, config=self._config(entry, rule, STABLE)
            )
            stable_ready = True
        else:
            backend = stable.backend if stable is not None and stable.backend else ""
            target = ArmStatus(
                backend=backend,
                identity=self._identity(namespace, backend),
                config=self._config(entry, rule, STABLE),
            )
            stable_ready = not self.warm or self._reached(namespace, backend) > 0
        other, ready, live = None, False, False
        if (
            candidate is not None
            and candidate.backend
            and (namespace, candidate.backend) in self._cache.backends
        ):
            config = self._config(entry, rule, CANDIDATE)
            other = ArmStatus(
                backend=candidate.backend,
                identity=self._identity(namespace, candidate.backend),
                config=config,
            )
            ready = not self.warm or (
                self._holds(namespace, candidate.backend, config)
                and self._reached(namespace, candidate.backend) > 0
            )
            live = (
                self.warm
                and self._live(namespace, candidate.backend)
                and not self._unheard(namespace, target.backend)
            )
        if live or not self.warm:
            entry.unheard.pop(rule.name, None)
            return World(Arms(target, other), stable_ready, ready, live)
        # Not later than now, also where the clock was set back: else nobody would be unheard for as long.
        since = entry.unheard[rule.name] = min(entry.unheard.get(rule.name, now), now)
        arms = Arms(target, other)
        unreadable = tuple(
            arm.backend
            for arm in (arms.stable, arms.candidate)
            if arm is not None and any(p.stream.unreadable for p in self._pods(namespace, arm.backend))
        )
        unheard_s = (now - since).total_seconds()
        return World(arms, stable_ready, ready, live, unheard_s, unreadable=unreadable)

    def _identity(self, namespace: str, backend: str) -> str:
        found = self._cache.backends.get((namespace, backend))
        if isinstance(found, InferenceBackend) and found.status.identity is not None:
            return found.status.identity.digest
        return ""

    def _config(self, entry: Entry, rule: Rule, role: str) -> str:
        made = self.router.plan if self.router else None
        arm = made.wanted.get((entry.key, rule.name, role)) if made else None
        if arm is None and made is not None and role == CANDIDATE:
            arm = made.wanted.get((entry.key, rule.name, STABLE))
        return arm.config if arm else ""

    def _reached(self, namespace: str, backend: str) -> int:
        return self.router.reached(names.cluster(namespace, backend)) if self.router else 0

    def _holds(self, namespace: str, backend: str, config: str) -> bool:
        made = self.router.plan if self.router else None
        return made is not None and any(
            config in p.stream.versions for p in made.endpoints.get(names.cluster(namespace, backend), ())
        )

    def _live(self, namespace: str, backend: str) -> bool:
        return bool(self._pods(namespace, backend)) and not self._unheard(namespace, backend)

    def _unheard(self, namespace: str, backend: str) -> bool:
        """Whether some pod answers requests and tells nothing of them. (Where no pod answers there is
        nothing to tell: a stable arm that is down is no reason to send it the candidate's traffic too.)"""
        return any(not p.stream.heard for p in self._pods(namespace, backend))

    def _pods(self, namespace: str, backend: str) -> tuple[PodState, ...]:
        made = self.router.plan if self.router else None
        return made.endpoints.get(names.cluster(namespace, backend), ()) if made else ()


def _birth(policy: RoutePolicy | Broken) -> tuple[str, str]:
    """What tells an object from its successor of the same name, which may come within the same second."""
    return policy.metadata.creation_timestamp, policy.metadata.uid


def _rules(status: Mapping[str, Any]) -> list[RuleStatus]:
    try:
        return [RuleStatus.model_validate(rule) for rule in status.get("rules") or []]
    except ValueError:
        return []
