"""What is kept of tenants is what their objects and Secrets say now, and is derived again only for news."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.api import Tenant
from sluice_operator.control.cache import Cache
from sluice_operator.control.tenancy import REVOKED_S, Known, Tenancy
from sluice_operator.plan.limits import tenant_limits
from sluice_operator.plan.tenants import resolve

NAMES = st.sampled_from(["one", "two"])
PLACES = st.tuples(st.sampled_from(["a", "b"]), NAMES)
STEPS = st.one_of(
    st.tuples(st.just("put"), PLACES, st.integers(1, 3)),
    st.tuples(st.just("put"), PLACES, st.just("broken")),
    st.tuples(st.just("drop"), PLACES, st.none()),
    st.tuples(st.just("secret"), PLACES, st.sampled_from(["k", "l", ""])),
)


def manifest(place: tuple[str, str], weight: Any, version: int) -> dict[str, Any]:
    namespace, name = place
    meta = {"name": name, "namespace": namespace, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {"weight": weight, "apiKeys": [{"name": name, "key": "key"}]}}


def fresh(cache: Cache, secrets: dict[tuple[str, str], dict[str, str]]) -> Known:
    found = [t for t in cache.tenants.values() if isinstance(t, Tenant)]
    return Known(*resolve(found, secrets), tenant_limits(found))


@given(st.lists(STEPS, max_size=12))
def test_it_is_what_would_be_derived_now(steps: list[tuple[str, tuple[str, str], Any]]) -> None:
    cache, secrets = Cache(), dict[tuple[str, str], dict[str, str]]()
    tenancy = Tenancy(cache, lambda: secrets, lambda: 0.0)
    for version, (step, place, value) in enumerate(steps, start=1):
        if step == "put":
            cache.put("Tenant", manifest(place, value, version))
        elif step == "drop":
            cache.drop("Tenant", place)
        else:
            secrets[place] = {"key": value}
        assert tenancy.known() == fresh(cache, secrets)


def test_nothing_is_derived_without_news() -> None:
    cache, secrets = Cache(), {("a", "one"): {"key": "k"}}
    tenancy = Tenancy(cache, lambda: secrets, lambda: 0.0)
    cache.put("Tenant", manifest(("a", "one"), 2, 1))
    first = tenancy.known()
    cache.put("Tenant", manifest(("a", "one"), 2, 1))
    assert tenancy.known() is first
    secrets.clear()
    assert tenancy.known().told[0].api_keys == ()


class World:
    """Tenants, their Secrets and a clock."""

    def __init__(self) -> None:
        self.cache, self.now, self.version = Cache(), 0.0, 0
        self.secrets = {("a", "one"): {"key": "k"}, ("b", "one"): {"key": "l"}, ("a", "new"): {"key": "n"}}
        self.tenancy = Tenancy(self.cache, lambda: self.secrets, lambda: self.now)
        self.put(("a", "one"))

    def put(self, place: tuple[str, str], secret: str = "one", weight: Any = 1) -> frozenset[str]:
        self.version += 1
        told = manifest(place, weight, self.version)
        told["spec"]["apiKeys"] = [{"name": secret, "key": "key"}]
        self.cache.put("Tenant", told)
        return self.tenancy.revoked()

    def drop(self, place: tuple[str, str]) -> frozenset[str]:
        self.cache.drop("Tenant", place)
        return self.tenancy.revoked()

    def keys(self, **keys: dict[str, str] | None) -> frozenset[str]:
        for name, found in keys.items():
            self.secrets.pop(("a", name), None)
            if found is not None:
                self.secrets[("a", name)] = found
        return self.tenancy.revoked()


def test_a_deleted_tenant_is_revoked_for_a_minute_or_until_it_is_back() -> None:
    world = World()
    assert world.tenancy.revoked() == frozenset()
    assert world.drop(("a", "one")) == {"one"}
    world.now = REVOKED_S - 1
    assert world.tenancy.revoked() == {"one"}
    world.now = REVOKED_S
    assert world.tenancy.revoked() == frozenset()
    assert world.put(("a", "one")) == frozenset()
    world.drop(("a", "one"))
    assert world.put(("a", "one")) == frozenset()


def test_of_two_tenants_of_a_name_one_is_enough() -> None:
    world = World()
    world.put(("b", "one"))
    assert world.drop(("a", "one")) == frozenset()
    assert world.drop(("b", "one")) == {"one"}


def test_a_tenant_without_its_last_key_is_revoked() -> None:
    world = World()
    assert world.keys(one={"key": "another"}) == frozenset(), "rotated"
    assert world.keys(one={}) == {"one"}
    assert world.keys(one={"key": "k"}) == frozenset()


def test_a_key_that_is_a_mistake_is_no_revocation() -> None:
    world = World()
    assert world.keys(one={"key": "not a key"}) == frozenset()
    assert world.keys(one=None) == frozenset(), "nobody has looked again"
    assert world.keys(one={}) == {"one"}


def test_what_is_not_known_yet_or_not_understood_is_no_revocation() -> None:
    world = World()
    world.keys(new=None)
    assert world.put(("a", "one"), secret="new") == frozenset(), "nobody has looked for the new Secret"
    assert world.put(("a", "one"), secret="new", weight="broken") == frozenset()
    assert world.put(("a", "one"), secret="new") == frozenset()
    assert world.keys(new={}) == {"one"}, "now somebody has"


def test_after_a_start_nobody_is_revoked() -> None:
    world = World()
    world.secrets.clear()
    later = Tenancy(world.cache, lambda: world.secrets, lambda: 0.0)
    assert later.revoked() == frozenset()
    world.secrets[("a", "one")] = {"key": "k"}
    assert later.revoked() == frozenset()
