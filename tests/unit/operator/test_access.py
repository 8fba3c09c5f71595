"""Secrets and ConfigMaps that verifiers name are read where a policy names them, and read again."""

from __future__ import annotations

import base64
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice_operator.api import RoutePolicy
from sluice_operator.control.context import Context
from sluice_operator.control.others import Others
from sluice_operator.kube import KubeError
from sluice_operator.kube.client import CONFIG_MAP, SECRET, Kind
from sluice_operator.plan.access import OFFERED_TYPE

POLICY = ("ns", "chat")


class Kube:
    """Objects by kind, namespace and name."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str, str], dict[str, Any]] = {}
        self.reads: list[tuple[Kind, str]] = []
        self.away = False
        self.while_reading: Callable[[], None] = lambda: None

    async def find(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        self.reads.append((kind, name))
        if self.away:
            raise KubeError(503, "away")
        self.while_reading()
        return self.objects.get((kind, namespace, name))

    def secret(self, token: str) -> None:
        data = {"key": base64.b64encode(token.encode()).decode()}
        self.objects[SECRET, "ns", "facts"] = {"data": data, "type": OFFERED_TYPE}


class World:
    """One policy, and what is read for it."""

    def __init__(self, **verifier: Any) -> None:
        self.kube, self.dirty, self.num_flushes = Kube(), list[tuple[str, tuple[str, str]]](), 0
        self.later: list[tuple[str, float]] = []
        check = {"name": "facts", "verifier": {"url": "https://facts/v1", **verifier}}
        rule = {"name": "all", "target": {"backend": "a"}, "contract": {"checks": [check]}}
        meta = {"name": "chat", "namespace": "ns"}
        policy = RoutePolicy.model_validate({"metadata": meta, "spec": {"model": "m", "rules": [rule]}})
        self.ctx = SimpleNamespace(
            kube=self.kube,
            cache=SimpleNamespace(policies={POLICY: policy}, tenants={}),
            book=SimpleNamespace(entries={}),
            router=SimpleNamespace(flush=self._flush),
            secrets={},
            config_maps={},
            offered=set(),
            dirty=self._dirty,
        )
        self.others = Others(cast(Context, self.ctx))

    def _dirty(self, kind: str, name: tuple[str, str], delay: float = 0.0) -> None:
        if delay:
            self.later.append((kind, delay))
        else:
            self.dirty.append((kind, name))

    async def _flush(self) -> None:
        self.num_flushes += 1


async def test_a_token_is_read_and_a_rotated_one_is_told_at_once() -> None:
    world = World(tokenSecret={"name": "facts"})
    world.kube.secret("old")
    assert await world.others.load_secrets() is None, "Secrets are watched"
    assert world.ctx.secrets == {("ns", "facts"): {"key": "old"}}
    assert world.ctx.offered == {("ns", "facts")}
    assert (world.num_flushes, world.dirty) == (1, [("policy", POLICY)])
    await world.others.load_secrets()
    assert world.num_flushes == 1, "nothing new"
    world.kube.secret("new")
    await world.others.load_secrets()
    assert (world.ctx.secrets[("ns", "facts")], world.num_flushes) == ({"key": "new"}, 2)
    del world.kube.objects[SECRET, "ns", "facts"]
    await world.others.load_secrets()
    assert (world.ctx.secrets[("ns", "facts")], world.num_flushes) == ({}, 3)


async def test_config_maps_are_read_again_and_again() -> None:
    world = World(caBundle={"configMap": {"name": "company"}})
    assert await world.others.load_secrets() is not None
    assert world.ctx.config_maps == {("ns", "company"): {}}, "looked for, and not there"
    world.kube.objects[CONFIG_MAP, "ns", "company"] = {"data": {"ca.crt": "PEM"}}
    await world.others.load_secrets()
    assert world.ctx.config_maps == {("ns", "company"): {"ca.crt": "PEM"}}
    assert world.num_flushes == 2


@pytest.mark.parametrize("verifier", [{}, {"timeoutSeconds": 3}])
async def test_a_policy_that_names_nothing_costs_no_request(verifier: dict[str, Any]) -> None:
    world = World(**verifier)
    await world.others.read_for(POLICY)
    assert await world.others.load_secrets() is None
    assert (world.dirty, world.kube.reads) == ([], [])


async def test_an_edit_reads_what_it_names_once() -> None:
    company = {"name": "company"}
    world = World(tokenSecret={"name": "facts"}, caBundle={"configMap": company})
    await world.others.read_for(POLICY)
    assert world.kube.reads == [(SECRET, "facts"), (CONFIG_MAP, "company")]
    assert [kind for kind, delay in world.later] == ["secrets"], "the ConfigMap is looked at again, later"
    assert ("secrets", ("", "")) not in world.dirty
    await world.others.read_for(POLICY)
    assert len(world.kube.reads) == 2, "known now"


async def test_an_edit_whose_secrets_cannot_be_read_is_tried_again() -> None:
    world = World(tokenSecret={"name": "facts"})
    world.kube.away = True
    await world.others.read_for(POLICY)
    assert (world.dirty, world.later) == ([("secrets", ("", ""))], [])


async def test_a_secret_that_is_made_while_it_is_looked_for_is_news() -> None:
    """Its event comes before anybody knows that it was not there; nothing else would tell of it."""
    world = World(tokenSecret={"name": "facts"})
    heard: list[bool] = []
    world.kube.while_reading = lambda: heard.append(world.others.seeks(("ns", "facts")))
    assert not world.others.seeks(("ns", "facts"))
    await world.others.read_for(POLICY)
    assert heard == [True]
    assert world.others.seeks(("ns", "facts"))
    assert not world.others.seeks(("ns", "another"))
