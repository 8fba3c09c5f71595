"""The set that a pod holds, and for how long it honours what has left it."""

from __future__ import annotations

import pytest

from sluice_runtime.podconfig import RETAIN_S, ConfigStore
from unit.runtime.server.support import check, pod_config


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ConfigStore:
    return ConfigStore(clock)


async def test_what_left_the_set_is_honoured_for_a_while_and_not_told_of(
    store: ConfigStore, clock: Clock
) -> None:
    await store.replace([pod_config("v1", model="old"), pod_config("v2")])
    first = store.get("v1")
    await store.replace([pod_config("v2")])
    assert store.versions == ["v2"]
    assert store.models() == ["assistant"]
    assert store.get("v1") is first is not None
    clock.now += RETAIN_S - 0.1
    assert store.get("v1") is first
    clock.now += 0.1
    assert store.get("v1") is None
    assert store.get("v2") is not None
    assert store.get("v3") is None


async def test_later_sets_do_not_prolong_it(store: ConfigStore, clock: Clock) -> None:
    await store.replace([pod_config("v1")])
    for version in ("v2", "v3", "v4"):
        await store.replace([pod_config(version)])
        clock.now += RETAIN_S / 3
    assert store.get("v1") is None
    assert store.versions == ["v4"]
    assert [v for v in ("v2", "v3") if store.get(v)] == ["v2", "v3"]


async def test_a_version_that_comes_back_is_held_again(store: ConfigStore, clock: Clock) -> None:
    await store.replace([pod_config("v1")])
    await store.replace([])
    await store.replace([pod_config("v1")])
    clock.now += 2 * RETAIN_S
    assert store.versions == ["v1"]
    assert store.get("v1") is not None
    await store.replace([])
    clock.now += RETAIN_S - 0.1
    assert store.get("v1") is not None, "counted from when it left last"


async def test_a_version_that_comes_back_different_is_the_new_one(store: ConfigStore, clock: Clock) -> None:
    await store.replace([pod_config("v1")])
    await store.replace([])
    await store.replace([pod_config("v1", model="other")])
    held = store.get("v1")
    assert held is not None
    assert held.spec.model == "other"


async def test_what_was_rejected_is_not_held_and_what_it_replaces_is_only_honoured(
    store: ConfigStore, clock: Clock
) -> None:
    await store.replace([pod_config("v1")])
    broken = pod_config("v1", contract=[check("c", "MustMatch", pattern="(")])
    [rejected] = await store.replace([broken])
    assert (rejected.version, rejected.field) == ("v1", "contract[0].pattern")
    assert store.versions == []
    assert store.get("v1") is not None
    clock.now += RETAIN_S
    assert store.get("v1") is None
