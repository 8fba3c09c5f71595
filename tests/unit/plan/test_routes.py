"""Everything in force, from what is accepted and what pods hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from sluice_operator.api import RoutePolicySpec
from sluice_operator.api.backend import Fitness
from sluice_operator.api.cachescope import CacheScopeSpec
from sluice_operator.api.rulestatus import Phase
from sluice_operator.plan.routes import Accepted, BackendView, Inputs, plan
from unit.plan.routes_world import (
    ALL,
    DIGEST,
    ROLLOUT,
    SCHEMA,
    STABLE,
    inputs,
    pod,
    policy,
    settled,
)

FACTS = {"name": "facts", "verifier": {"url": "http://facts/v1"}}


def test_one_rule() -> None:
    _, made = settled(inputs(policy(), a=[pod("a1")]))
    [told] = made.state.policies
    assert (told.name, told.model) == ("ns/chat", "assistant")
    assert told.rules[0].stable == made.arms[STABLE]
    assert told.rules[0].candidate is None
    assert [len(c.endpoints) for c in made.state.clusters] == [1]
    assert not made.waiting


def test_pod_configs_keep_to_their_contract_and_name_themselves() -> None:
    checks = [
        {"name": "json", "jsonSchema": {"type": "object"}},
        {"name": "re", "mustNotMatch": "x", "severity": "Watch"},
    ]
    told = policy(
        contract={"checks": checks}, sampling={"temperature": "0.5", "maxTokens": 7}, cacheScope="team"
    )
    given = replace(inputs(told, a=[pod("a1")]), scopes={"ns": {"team": CacheScopeSpec(epoch=4)}})
    [config] = plan(given).configs["ns/a"].values()
    jsonschema.validate(config, SCHEMA)
    assert config["scope"] == {"name": "ns/team", "isolation": "Tenant", "epoch": 4, "versions": {}}
    assert config["sampling"] == {"temperature": 0.5, "maxTokens": 7}
    later = replace(given, scopes={"ns": {"team": CacheScopeSpec(epoch=5)}})
    assert set(plan(later).configs["ns/a"]).isdisjoint(plan(given).configs["ns/a"])


def test_a_rule_that_streams_at_once_is_told_as_ever() -> None:
    """An older pod goes on; it refuses only what it can't keep to."""
    checks = [{"name": "re", "mustMatch": "x"}]
    versions = []
    for contract in ({"checks": checks}, {"checks": checks, "streaming": "Immediate"}):
        [config] = plan(inputs(policy(contract=contract), a=[pod("a1")])).configs["ns/a"].values()
        assert "streaming" not in config
        versions.append(config["version"])
    assert versions[0] == versions[1]


@pytest.mark.parametrize("streaming", ["Verified", "Draft"])
def test_verifiers_and_streaming_reach_the_pods(streaming: str) -> None:
    told = policy(contract={"streaming": streaming, "checks": [FACTS]})
    [config] = plan(inputs(told, a=[pod("a1")])).configs["ns/a"].values()
    jsonschema.validate(config, SCHEMA)
    assert config["streaming"] == streaming
    assert config["contract"] == [
        {
            "name": "facts",
            "kind": "Verifier",
            "hard": True,
            "verifier": {"url": "http://facts/v1", "timeoutSeconds": 5},
        }
    ]


@pytest.mark.parametrize(
    ("streaming", "timeouts", "seconds"),
    [
        ("Immediate", {}, 120 + 5),
        ("Draft", {"idleSeconds": 1}, 1 + 5),
        ("Verified", {}, 3600),
        ("Verified", {"idleSeconds": 30}, 3600),
        ("Verified", {"totalSeconds": 900}, 900),
        ("Verified", {"idleSeconds": 60, "totalSeconds": 30}, 60),
    ],
)
def test_the_gateway_waits_for_what_is_held(streaming: str, timeouts: dict[str, int], seconds: int) -> None:
    told = policy(contract={"streaming": streaming, "checks": [FACTS]}, timeouts=timeouts)
    _, made = settled(inputs(told, a=[pod("a1")]))
    [rule] = made.state.policies[0].rules
    assert rule.idle_seconds == seconds
    assert rule.total_seconds == timeouts.get("totalSeconds")


OFF = {"directStreaming": False}


@pytest.mark.parametrize("where", ["rule", "candidate", "switch"])
def test_the_gateway_waits_where_direct_streaming_is_switched_off(where: str) -> None:
    """Whoever it is switched off for, and whatever the rule streams otherwise: they share a route."""
    rollout = {"candidate": {"features": OFF}, "steps": [{"weight": 5}]}
    told = policy(
        timeouts={"totalSeconds": 900},
        **({"features": OFF} if where == "rule" else {}),
        **({"rollout": rollout} if where == "candidate" else {}),
    )
    switches = [{"features": OFF, "tenants": ["bank"]}] if where == "switch" else []
    spec = RoutePolicySpec.model_validate({**told.spec.model_dump(by_alias=True), "switches": switches})
    _, made = settled(inputs(replace(told, spec=spec), a=[pod("a1")]))
    [rule] = made.state.policies[0].rules
    assert rule.idle_seconds == 900


def test_routes_move_only_when_all_pods_hold_or_patience_ends() -> None:
    given, before = settled(inputs(policy(), a=[pod("a1"), pod("a2")]))
    edited = replace(given, policies=(policy(sampling={"maxTokens": 9}),))
    made = plan(edited)
    old, new = before.arms[STABLE].config, made.wanted[STABLE].config
    assert made.arms[STABLE].config == old != new
    assert "0 of 2 pods" in made.waiting[STABLE]
    half = replace(edited, backends={"ns/a": BackendView((pod("a1", old, new), pod("a2", old)), DIGEST, ALL)})
    assert plan(half).arms[STABLE].config == old
    assert len(plan(half).endpoints["ns/a"]) == 2
    late = plan(replace(half, overdue=frozenset({STABLE})))
    assert late.arms[STABLE].config == new
    assert [p.pod.name for p in late.endpoints["ns/a"]] == ["a1"], (
        "who lacks what routes name gets no traffic"
    )


def test_a_pod_that_takes_nothing_is_what_an_arm_waits_for() -> None:
    mute = pod("a2")
    mute = replace(mute, stream=replace(mute.stream, refused="access: unknown"))
    made = plan(inputs(policy(), a=[mute]))
    assert made.waiting[STABLE] == "pod a2 refused the configuration: access: unknown"
    held = replace(mute, stream=replace(mute.stream, versions=frozenset(made.configs["ns/a"])))
    assert STABLE not in plan(inputs(policy(), a=[held])).waiting
    both = plan(inputs(policy(), a=[held, pod("a3")]))
    assert both.waiting[STABLE] == "1 of 2 pods of ns/a hold the configuration"


def test_an_arm_is_left_only_for_one_that_is_there() -> None:
    given, before = settled(inputs(policy(), a=[pod("a1")]))
    moved = replace(
        given,
        policies=(policy(target={"backend": "c"}),),
        backends={**given.backends, "ns/c": BackendView((), "", ALL)},
    )
    assert plan(moved).arms[STABLE] == before.arms[STABLE]
    version = plan(moved).wanted[STABLE].config
    there = replace(
        moved, backends={**moved.backends, "ns/c": BackendView((pod("c1", version),), DIGEST, ALL)}
    )
    assert plan(there).arms[STABLE].cluster == "ns/c"
    gone = replace(moved, backends={"ns/c": BackendView((), "", ALL)})
    assert plan(gone).arms[STABLE].cluster == "ns/c", "an arm that is gone holds nobody back"


@pytest.mark.parametrize(
    ("status", "stable", "candidate", "weight"),
    [
        (None, "ns/a", "ns/b", 0),
        ({"phase": "Step", "weight": 10}, "ns/a", "ns/b", 10),
        ({"phase": "RolledBack", "weight": 0}, "ns/a", None, 0),
        ({"phase": "Aborted"}, "ns/a", None, 0),
        ({"phase": "Promoted", "weight": 100}, "ns/b", None, 0),
        ({"phase": "Promoted", "weight": 0}, "ns/a", "ns/b", 0),
    ],
)
def test_arms_by_phase(
    status: dict[str, Any] | None, stable: str, candidate: str | None, weight: int
) -> None:
    _, made = settled(inputs(policy(status, rollout=ROLLOUT), a=[pod("a1")], b=[pod("b1")]))
    rule = made.state.policies[0].rules[0]
    assert rule.stable is not None
    assert rule.stable.cluster == stable
    assert (rule.candidate.cluster if rule.candidate else None) == candidate
    assert rule.weight == weight


def test_a_human_abort_needs_nobody_elses_word() -> None:
    told = policy({"phase": "Step", "weight": 50}, rollout={**ROLLOUT, "abort": True})
    _, made = settled(inputs(told, a=[pod("a1")], b=[pod("b1")]))
    assert made.state.policies[0].rules[0].candidate is None


def test_an_abort_leaves_a_promoted_candidate_even_for_nobody() -> None:
    promoted = policy({"phase": "Promoted", "weight": 100}, rollout=ROLLOUT)
    given, before = settled(inputs(promoted, a=[], b=[pod("b1")]))
    assert before.arms[STABLE].cluster == "ns/b"
    aborted = policy({"phase": "Aborted"}, rollout={**ROLLOUT, "abort": True})
    assert plan(replace(given, policies=(aborted,))).arms[STABLE].cluster == "ns/a"
    removed = policy({"phase": "Stable"})
    assert plan(replace(given, policies=(removed,))).arms[STABLE].cluster == "ns/b", (
        "an edit waits for its target"
    )


def test_a_dead_arm_is_left_for_the_first_pod_of_the_next() -> None:
    given, _ = settled(inputs(policy(), a=[pod("a1")]))
    moved = replace(given, policies=(policy(target={"backend": "c"}),))
    version = (
        plan(replace(moved, backends={**moved.backends, "ns/c": BackendView((), "", ALL)}))
        .wanted[STABLE]
        .config
    )
    half = BackendView((pod("c1", version), pod("c2")), DIGEST, ALL)
    both = replace(moved, backends={**moved.backends, "ns/c": half})
    assert plan(both).arms[STABLE].cluster == "ns/a"
    dead = replace(both, backends={"ns/a": BackendView((pod("a1", ready=False),), DIGEST, ALL), "ns/c": half})
    assert plan(dead).arms[STABLE].cluster == "ns/c"


@pytest.mark.parametrize(
    "view", [{"ready": False}, {"terminating": True}, {"ip": ""}, {"digest": "sha256:2"}]
)
def test_a_candidate_without_a_fit_pod_gets_nothing_whatever_the_status_says(view: dict[str, Any]) -> None:
    told = policy({"phase": "Step", "weight": 50}, rollout=ROLLOUT)
    _, made = settled(inputs(told, a=[pod("a1")], b=[pod("b1", **view)]))
    assert made.state.policies[0].rules[0].weight == 0
    assert made.endpoints["ns/b"] == ()


def test_a_backend_that_no_route_names_is_a_cluster_with_endpoints() -> None:
    _, made = settled(inputs(a=[pod("a1")]))
    assert [(c.name, len(c.endpoints)) for c in made.state.clusters] == [("ns/a", 1)]


def test_the_oldest_policy_keeps_a_model() -> None:
    younger = policy(created="2", name="other", target={"backend": "b"})
    _, made = settled(inputs(younger, policy(created="1"), a=[pod("a1")], b=[pod("b1")]))
    assert [p.name for p in made.state.policies] == ["ns/chat"]


def test_fallbacks_hold_the_arms_configuration_and_join_when_they_do() -> None:
    told = policy(fallbacks=[{"backend": "b"}])
    first = plan(inputs(told, a=[pod("a1")], b=[pod("b1")]))
    assert first.configs["ns/b"].keys() == first.configs["ns/a"].keys()
    _, made = settled(inputs(told, a=[pod("a1")], b=[pod("b1")]))
    assert made.state.policies[0].rules[0].fallbacks == ("ns/b",)
    assert plan(inputs(told, a=[pod("a1")], b=[])).state.policies[0].rules[0].fallbacks == ()


def test_services_and_refusals() -> None:
    spec = RoutePolicySpec.model_validate(
        {
            "model": "m",
            "rules": [
                {
                    "name": "search",
                    "match": {"tasks": ["kw"]},
                    "target": {"service": {"name": "solr", "port": 80}},
                },
                {"name": "rest", "target": {"refusal": {"message": "ask a person"}}},
            ],
        }
    )
    made = plan(Inputs(policies=(Accepted("ns", "desk", "1", spec),)))
    search, rest = made.state.policies[0].rules
    assert search.stable is not None
    assert (rest.refusal, rest.stable) == ((403, "ask a person"), None)
    assert [(c.name, c.dns) for c in made.state.clusters] == [("ns/svc:solr:80", ("solr.ns.svc", 80))]


def test_what_became_unfit_after_acceptance_is_refused_at_the_gateway() -> None:
    narrow = Fitness.model_validate({"forbiddenTasks": ["sql"], "dataClasses": ["Public"]})
    given, _ = settled(inputs(policy(), a=[pod("a1")]))
    made = plan(replace(given, backends={"ns/a": replace(given.backends["ns/a"], fitness=narrow)}))
    *guards, rule = made.state.policies[0].rules
    assert rule.name == "all"
    assert {(g.tasks, tuple(c.value for c in g.data_classes)) for g in guards} == {
        (("sql",), ()),
        ((), ("Internal", "Confidential", "Restricted")),
    }
    assert all(g.refusal and g.stable is None for g in guards)
    assert len({r.name for r in made.state.policies[0].rules}) == 3


def test_a_plan_is_a_function() -> None:
    given, made = settled(
        inputs(policy({"phase": "Step", "weight": 10}, rollout=ROLLOUT), a=[pod("a1")], b=[pod("b1")])
    )
    assert plan(given) == made == plan(replace(given, before=made.arms))
    assert Phase.STEP == "Step"


def test_a_leak_is_told_where_the_candidates_requests_may_be_and_nowhere_else() -> None:
    over = {"phase": "RolledBack", "attempt": "x", "candidate": {"backend": "b"}}
    pods = {name: [pod(f"{name}1")] for name in "abcd"}
    fallbacks = [{"backend": "c"}]

    def told(**status: Any) -> dict[str, frozenset[str]]:
        given = inputs(policy({**over, **status}, rollout=ROLLOUT, fallbacks=fallbacks), **pods)
        return dict(plan(given).leaked)

    assert told() == {}, "streams end in peace"
    assert told(leaked=True) == {"ns/b": {"x"}, "ns/c": {"x"}}
