"""What is kept of tenants is what their objects and Secrets say now, and is derived again only for news."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.api import Tenant
from sluice_operator.control.cache import Cache
from sluice_operator.control.tenancy import Known, Tenancy
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
    tenancy = Tenancy(cache, lambda: secrets)
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
    tenancy = Tenancy(cache, lambda: secrets)
    cache.put("Tenant", manifest(("a", "one"), 2, 1))
    first = tenancy.known()
    cache.put("Tenant", manifest(("a", "one"), 2, 1))
    assert tenancy.known() is first
    secrets.clear()
    assert tenancy.known().told[0].api_keys == ()
