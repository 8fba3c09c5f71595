"""A policy on the wire: nothing is written, told or tried again without a cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sluice_operator.api.routepolicy import ServiceTarget
from sluice_operator.api.rulestatus import Phase, RuleStatus
from sluice_operator.control.book import Book
from sluice_operator.control.cache import Cache
from sluice_operator.control.policies import Policies
from sluice_operator.plan.conditions import Problem, find
from sluice_operator.plan.validate import service_problem
from unit.operator.test_book import NAME, backend, policy


class Kube:
    """Answers as an API server with nothing else in it would."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.num_writes, self.services = cache, 0, {}  # type: ignore[var-annotated]

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        return obj

    async def list_all(self, *_: object, **__: object) -> list[dict[str, Any]]:
        return []

    async def find(self, kind: Any, namespace: str, name: str) -> dict[str, Any] | None:
        return self.services.get(name)

    async def patch_status(self, _: object, namespace: str, name: str, status: Any) -> dict[str, Any]:
        self.num_writes += 1
        before = self.cache.policies[(namespace, name)]
        told = before.model_dump(by_alias=True, mode="json", exclude_none=True)  # type: ignore[union-attr]
        told["metadata"]["resourceVersion"] = str(100 + self.num_writes)
        return {**told, "status": status}


def world(**rule: Any) -> tuple[SimpleNamespace, Policies, list[str]]:
    cache = Cache()
    book = Book(cache)
    for name in "ab":
        cache.put("InferenceBackend", backend(name))
    cache.put("RoutePolicy", policy(1, **rule))
    book.consider(NAME)
    events: list[str] = []

    async def tell(_: object, reason: str, *__: object, **___: object) -> bool:
        events.append(reason)
        return True

    async def answered(kind: str, obj: dict[str, Any]) -> None:
        cache.put(kind, obj)

    async def flush() -> None:
        pass

    router = SimpleNamespace(plan=None, reached=lambda cluster: 1, flush=flush)
    ads = SimpleNamespace(quarantined={}, num_gateways=1)
    ctx = SimpleNamespace(
        cache=cache, book=book, router=router, ads=ads, kube=Kube(cache), answered=answered,
        recorder=SimpleNamespace(tell=tell), access_problems={},
    )  # fmt: skip
    return ctx, Policies(ctx), events  # type: ignore[arg-type]


async def test_what_is_told_is_told_once_and_is_no_reason_to_come_back() -> None:
    """A restart finds a status that is true already; a rollout's checkpoints go on under a bad edit."""
    ctx, policies, events = world(target={"backend": "none"})
    for _ in range(4):
        delay = await policies.reconcile(NAME)
    assert (delay, ctx.kube.num_writes, events) == (None, 1, ["BackendNotFound"])
    # The next operator, with the same world.
    ctx.book.entries.clear()
    ctx.book.consider(NAME)
    assert await policies.reconcile(NAME) is None
    assert ctx.kube.num_writes == 1


async def test_a_token_that_is_not_there_is_told_once_until_it_is_there() -> None:
    ctx, policies, events = world()
    field = "spec.rules[0].contract.checks[0].verifier.tokenSecret"
    missing = (Problem("SecretNotFound", "Secret 'facts' has no key 'key'", field),)
    for problems in (missing, missing, ()):
        ctx.access_problems = {NAME: problems}
        await policies.reconcile(NAME)
        ready = find(ctx.cache.policies[NAME].status.conditions, "Ready")
        assert ready is not None
        assert (ready.reason == "SecretNotFound" and field in ready.message) == bool(problems)
    assert events == ["SecretNotFound"]


async def test_a_service_that_is_not_there_is_told_and_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("sluice_operator.control.policies.monotonic", lambda: clock[0])
    ctx, policies, events = world(target={"service": {"name": "plain", "port": 80}}, contract={"checks": []})
    delay = await policies.reconcile(NAME)
    assert delay is not None
    conditions = {c.type: c for c in ctx.cache.policies[NAME].status.conditions}
    assert conditions["Stalled"].status == "True"
    assert conditions["Stalled"].reason == "ServiceNotFound"
    assert conditions["Stalled"].message.startswith("spec.rules[0].target.service.name: ")
    assert conditions["Ready"].status == "False"
    assert ctx.book.entries[NAME].spec is not None, "it is in force all the same: the Service may yet come"
    ctx.kube.services["plain"] = {"spec": {"ports": [{"port": 80}]}}
    clock[0] += delay
    await policies.reconcile(NAME)
    conditions = {c.type: c for c in ctx.cache.policies[NAME].status.conditions}
    assert conditions["Stalled"].status == "False"
    assert events == ["ServiceNotFound"]


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"ports": [{"port": 8080}]}, ""),
        ({"ports": [{"port": 80, "targetPort": 8080}]}, "only 80"),
        ({"clusterIP": "None", "ports": [{"port": 80, "targetPort": 8080}]}, ""),
        ({"type": "ExternalName", "externalName": "x.example"}, ""),
        ({}, "only none"),
    ],
)
def test_a_service_needs_the_port(spec: dict[str, Any], wrong: str) -> None:
    told = service_problem(3, ServiceTarget(name="s", port=8080), {"spec": spec})
    assert (told is None) == (not wrong)
    if told is not None:
        assert wrong in told.message
        assert told.field == "spec.rules[3].target.service.port"


async def test_a_rollback_is_kept_also_where_the_spec_is_not_understood() -> None:
    """An older operator than the object: what it decides about the last accepted spec must outlive it."""
    ctx, policies, _ = world()
    written: list[Any] = []

    async def patch_status(_: object, namespace: str, name: str, status: Any) -> dict[str, Any]:
        written.append(status)
        return {**odd, "status": {**odd["status"], **status}}

    odd = policy(9, 2, surprise=1)
    odd["status"] = {"rules": [{"name": "all", "phase": "Step", "weight": 10}]}
    ctx.kube.patch_status = patch_status
    ctx.cache.put("RoutePolicy", odd)
    ctx.book.consider(NAME)
    entry = ctx.book.entries[NAME]
    entry.rules = {"all": RuleStatus(name="all", phase=Phase.ROLLED_BACK, rejected=["x"])}
    entry.urgent = True
    await policies.reconcile(NAME)
    assert [s["rules"][0]["phase"] for s in written if "rules" in s] == ["RolledBack"]
    await policies.reconcile(NAME)
    assert len([s for s in written if "rules" in s]) == 1
