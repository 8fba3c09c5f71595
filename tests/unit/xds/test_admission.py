"""Who is held back and who goes on, without an Envoy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sluice_operator.xds.admission import Admission
from sluice_operator.xds.als import unit
from sluice_operator.xds.build import build
from sluice_operator.xds.messages import CDS, RDS, RTDS, TYPES
from sluice_operator.xds.state import (
    Arm,
    Cluster,
    Endpoint,
    GatewayState,
    Policy,
    Review,
    Rule,
    Scope,
    Tenant,
)
from sluice_operator.xds.validate import problems

ARM = Arm("ns/a", "c")
RULE = Rule("r", ARM)


def policy(name: str, model: str = "", **kwargs: Any) -> Policy:
    return Policy(name, model or name, (replace(RULE, **kwargs),))


@pytest.mark.parametrize("culprits", [{0}, {4}, {8}, {2, 3}, {0, 1, 2, 3, 4, 5, 6, 7, 8}, set()])
def test_halving_finds_all_culprits_and_nobody_else(culprits: set[int]) -> None:
    admission = Admission()
    policies = [policy(f"p{i}") for i in range(9)]
    admission.want(GatewayState(policies=tuple(policies)))
    for _ in range(60):
        trial = admission.admitted()
        if trial == admission.accepted and not admission.held:
            break
        if any(policies[i] in trial.policies for i in culprits):
            admission.refuse(trial, RDS, "bad")
        else:
            admission.accept(trial)
    assert {name for _, name in admission.held_back} == {f"p{i}" for i in culprits}
    assert {p.name for p in admission.accepted.policies} == {f"p{i}" for i in range(9)} - {
        f"p{i}" for i in culprits
    }


def test_what_was_accepted_stays_until_the_new_version_is() -> None:
    admission = Admission()
    old, new = policy("p", attempt="old"), policy("p", attempt="new")
    admission.want(GatewayState(policies=(old,)))
    admission.accept(admission.admitted())
    admission.want(GatewayState(policies=(new,)))
    assert admission.refuse(admission.admitted(), RDS, "bad") == ("policy", "p")
    assert admission.admitted().policies == (old,)
    admission.want(GatewayState(policies=(new,)))
    assert admission.admitted().policies == (old,)
    admission.want(GatewayState())
    assert admission.admitted().policies == ()
    assert not admission.held_back


def test_a_refusal_that_no_object_explains_blames_nobody() -> None:
    admission = Admission()
    admission.want(GatewayState(clusters=(Cluster("ns/a"),)))
    assert admission.refuse(admission.admitted(), RDS, "bad") is None
    assert admission.refuse(admission.admitted(), CDS, "bad") == ("cluster", "ns/a")


PROBLEMS = {
    "same model": (GatewayState(policies=(policy("b", "m"), policy("a", "m"))), "b"),
    "same name twice": (GatewayState(policies=(Policy("a", "m", (RULE, RULE)),)), "a"),
    "neither arm nor refusal": (GatewayState(policies=(policy("a", stable=None),)), "a"),
    "both": (GatewayState(policies=(policy("a", refusal=(403, "x")),)), "a"),
    "weight": (GatewayState(policies=(policy("a", weight=101),)), "a"),
    "pair": (GatewayState(policies=(policy("a", pair_percent=101),)), "a"),
    "review share": (GatewayState(policies=(policy("a", review=Review("r", ARM, ARM, 101)),)), "a"),
    "review's attempt": (GatewayState(policies=(policy("a", review=Review("r\n", ARM, ARM, 1)),)), "a"),
    "aside": (GatewayState(policies=(policy("a", aside=Arm("ns/a", "c c")),)), "a"),
    "an exclusion of everything": (
        GatewayState(policies=(policy("a", scope=Scope(excluded=(("", ""),))),)),
        "a",
    ),
    "header": (GatewayState(policies=(policy("a", stable=Arm("ns/a", "c\n")),)), "a"),
    "status": (GatewayState(policies=(policy("a", stable=None, refusal=(99, "x")),)), "a"),
    "shared key": (GatewayState(tenants=(Tenant("b", "d", ("k",)), Tenant("a", "d", ("k",)))), "b"),
    "key twice": (GatewayState(tenants=(Tenant("a", "d", ("k", "k")),)), "a"),
    "empty key": (GatewayState(tenants=(Tenant("a", "d", ("",)),)), "a"),
    "key like a token": (GatewayState(tenants=(Tenant("a", "d", ("eyJ.eyJ.x",)),)), "a"),
    "name with a space": (GatewayState(tenants=(Tenant("a b", "d"),)), "a b"),
    "port": (GatewayState(clusters=(Cluster("a", (Endpoint("10.0.0.1", 0),)),)), "a"),
    "cluster name": (GatewayState(clusters=(Cluster("a|b"),)), "a|b"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problems_are_found_before_envoy_sees_them(case: str) -> None:
    state, culprit = PROBLEMS[case]
    assert [name for _, name, _ in problems(state, GatewayState())] == [culprit]


def test_who_is_in_force_keeps_key_and_model() -> None:
    old = GatewayState(tenants=(Tenant("z", "d", ("k",)),), policies=(policy("z", "m"),))
    new = GatewayState(
        tenants=(Tenant("a", "d", ("k",)), *old.tenants), policies=(policy("a", "m"), *old.policies)
    )
    assert [(kind, name) for kind, name, _ in problems(new, old)] == [("tenant", "a"), ("policy", "a")]


def test_equal_states_give_equal_versions_and_weights_change_only_the_runtime_layer() -> None:
    def state(weight: int) -> GatewayState:
        rule = replace(RULE, candidate=Arm("ns/b", "c"), attempt="a", weight=weight, shadow_percent=weight)
        return GatewayState(
            clusters=(Cluster("ns/a", (Endpoint("10.0.0.2", 1), Endpoint("10.0.0.1", 1))), Cluster("ns/b")),
            policies=(Policy("ns/p", "m", (rule,)),),
            tenants=(Tenant("t", "d", ("k",)),),
        )

    one, same, other = build(state(1)), build(state(1)), build(state(2))
    assert [one.version(kind) for kind in TYPES] == [same.version(kind) for kind in TYPES]
    assert {kind for kind in TYPES if one.version(kind) != other.version(kind)} == {RTDS}


def test_weights_of_a_vanished_attempt_go_to_stable() -> None:
    rule = replace(RULE, candidate=Arm("ns/b", "c"), attempt="a", weight=40, shadow_percent=40)
    old = GatewayState(policies=(Policy("ns/p", "m", (rule,)),))
    new = GatewayState(policies=(Policy("ns/p", "m", (replace(rule, attempt="b"),)),))
    (layer,) = build(old, new).resources[RTDS].values()
    values = {key.rsplit(".", 1)[-1]: value.number_value for key, value in layer.message.layer.fields.items()}
    assert values == {"ns/a": 10_000, "ns/b": 0}


def test_the_unit_is_the_contracts() -> None:
    import hashlib

    expected = hashlib.sha256(b"sluice-unit\0ns/p\0c1").hexdigest()[:16]
    assert unit("ns/p", "c1", "r1") == expected
    assert unit("ns/p", "", "c1") == expected
