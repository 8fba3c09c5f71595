"""What is kept of verifiers is what policies, Secrets and ConfigMaps say now, and derived for news only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.api import RoutePolicySpec
from sluice_operator.control.verifiers import Verifying
from sluice_operator.plan.access import resolve
from sluice_operator.plan.routed import Accepted

NAMES = st.sampled_from(["one", "two"])
STEPS = st.one_of(
    st.tuples(st.just("policy"), NAMES, NAMES),
    st.tuples(st.just("drop"), NAMES, st.none()),
    st.tuples(st.just("secret"), NAMES, st.sampled_from(["k", "l", "", "no token"])),
    st.tuples(st.just("offered"), NAMES, st.none()),
    st.tuples(st.just("bundle"), NAMES, st.sampled_from(["", "no certificate"])),
)


def policy(name: str, names: str) -> Accepted:
    needs = {"tokenSecret": {"name": names}, "caBundle": {"configMap": {"name": names}}}
    check = {"name": "facts", "verifier": {"url": "https://facts/v1", **needs}}
    rule = {"name": "all", "target": {"backend": "a"}, "contract": {"checks": [check]}}
    return Accepted("ns", name, "1", RoutePolicySpec.model_validate({"model": name, "rules": [rule]}))


class World:
    """All that it follows from, changed in place as the operator does."""

    def __init__(self) -> None:
        self.policies: dict[str, Accepted] = {}
        self.secrets: dict[tuple[str, str], Mapping[str, str]] = {}
        self.config_maps: dict[tuple[str, str], Mapping[str, str]] = {}
        self.offered: set[tuple[str, str]] = set()
        self.verifying = Verifying(
            self.policies.values, lambda: self.secrets, lambda: self.config_maps, lambda: self.offered
        )

    def do(self, step: str, name: str, value: Any) -> None:
        if step == "policy":
            self.policies[name] = policy(name, value)
        elif step == "drop":
            self.policies.pop(name, None)
        elif step == "secret":
            self.secrets["ns", name] = {"key": value}
        elif step == "offered":
            self.offered ^= {("ns", name)}
        else:
            self.config_maps["ns", name] = {"ca.crt": value}


@given(st.lists(STEPS, max_size=12))
def test_it_is_what_would_be_derived_now(steps: list[tuple[str, str, Any]]) -> None:
    world = World()
    for step in steps:
        world.do(*step)
        now = resolve(world.policies.values(), world.secrets, world.config_maps, world.offered)
        assert world.verifying.known() == now


def test_nothing_is_derived_without_news() -> None:
    world = World()
    world.do("policy", "one", "one")
    world.do("secret", "one", "k")
    world.do("offered", "one", None)
    first = world.verifying.known()
    assert first.tokens == {"ns/Secret/one/key": "k"}
    world.do("policy", "one", "one")  # read again, and the same: a status was written
    assert world.verifying.known() is first
    world.secrets.clear()
    assert world.verifying.known().tokens == {}
