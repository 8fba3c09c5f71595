"""Whom a candidate may get, pairs, reviews and switches: as routes and pod configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from sluice_operator.api.backend import Fitness
from sluice_operator.api.cachescope import CacheScopeSpec
from sluice_operator.api.routepolicy import RoutePolicySpec
from sluice_operator.plan.routes import BackendView, Inputs, Plan, Review, plan
from sluice_operator.xds.state import Arm, Rule, Scope, Tenant
from unit.plan.routes_world import ALL, CANDIDATE, ROLLOUT, SCHEMA, STABLE, inputs, pod, policy, settled

ASIDE = ("ns/chat", "all", "aside")
GUARDED = {"reason": "GuardFired", "message": "m", "time": "2026-01-01T00:00:00Z"}


def both(status: dict[str, Any] | None = None, **rollout: Any) -> tuple[Inputs, Plan]:
    told = policy(status, rollout={**ROLLOUT, **rollout})
    return settled(inputs(told, a=[pod("a1")], b=[pod("b1")]))


def only(made: Plan) -> Rule:
    [rule] = made.state.policies[0].rules
    return rule


def test_what_was_rolled_back_alone_and_what_a_person_excludes_is_in_the_route() -> None:
    status = {"phase": "Step", "weight": 10, "attempt": "x", "excluded": [{"task": "sql", **GUARDED}]}
    _, made = both(status, exclude=[{"tenant": "acme"}])
    rule = only(made)
    assert rule.scope == Scope(excluded=(("", "acme"), ("sql", "")))
    assert (rule.weight, rule.attempt, rule.aside) == (10, "x", None)
    assert made.arms[CANDIDATE].cluster == "ns/b"


def test_an_exclusion_moves_nothing_but_the_route() -> None:
    status = {"phase": "Step", "weight": 10, "attempt": "x"}
    given, before = both(status)
    edited = policy(status, rollout={**ROLLOUT, "exclude": [{"task": "sql"}]})
    after = plan(replace(given, policies=(edited,)))
    assert only(after) == replace(only(before), scope=Scope(excluded=(("sql", ""),)))
    assert (after.configs, after.endpoints, after.arms) == (before.configs, before.endpoints, before.arms)
    assert not after.waiting, "in force with the very next push"


def test_a_step_for_some_tenants_is_for_them_while_it_lasts() -> None:
    steps = [{"weight": 50, "tenants": ["acme"], "tasks": ["code"]}, {"weight": 10}]
    for status, scope in (
        ({"phase": "Step", "step": 0, "weight": 50}, Scope(tasks=("code",), tenants=("acme",))),
        ({"phase": "Step", "step": 1, "weight": 10}, Scope()),
        ({"phase": "Shadowing", "shadowPercent": 100}, Scope()),
        ({"phase": "Watching", "weight": 98}, Scope()),
    ):
        assert only(both(status, steps=steps)[1]).scope == scope


def test_a_watched_candidate_leaves_what_is_excluded_to_stable() -> None:
    _, made = both({"phase": "Watching", "weight": 98, "excluded": [{"task": "sql", **GUARDED}]})
    rule = only(made)
    assert (rule.stable, rule.candidate) == (made.arms[STABLE], made.arms[CANDIDATE])
    assert (rule.weight, rule.aside, rule.scope.excluded) == (98, None, (("sql", ""),))


def test_a_promoted_candidate_leaves_what_is_excluded_to_the_arm_before_it() -> None:
    status = {"phase": "Promoted", "weight": 100, "excluded": [{"task": "sql", **GUARDED}]}
    _, made = both(status)
    rule = only(made)
    assert rule.stable is not None
    assert rule.aside is not None
    assert (rule.stable.cluster, rule.candidate, rule.aside.cluster) == ("ns/b", None, "ns/a")
    assert rule.scope == Scope(excluded=(("sql", ""),))
    assert {c.name: len(c.endpoints) for c in made.state.clusters} == {"ns/a": 1, "ns/b": 1}
    assert made.arms[ASIDE] == rule.aside
    _, aborted = both(status, abort=True)
    assert (only(aborted).aside, only(aborted).scope) == (None, Scope())
    _, whole = both({"phase": "Promoted", "weight": 100})
    assert (only(whole).aside, only(whole).scope) == (None, Scope())


def test_what_is_excluded_of_a_promotion_stays_unserved_where_the_old_backend_is_gone() -> None:
    status = {"phase": "Promoted", "weight": 100, "excluded": [{"task": "sql", **GUARDED}]}
    told = policy(status, rollout=ROLLOUT)
    _, made = settled(inputs(told, b=[pod("b1")]))
    assert only(made).aside == Arm("ns/a", made.wanted[ASIDE].config)
    assert made.waiting[ASIDE] == "backend ns/a does not exist"


def test_a_rolled_back_candidate_has_no_scope() -> None:
    _, made = both({"phase": "RolledBack", "excluded": [{"task": "sql", **GUARDED}]})
    assert (only(made).candidate, only(made).scope) == (None, Scope())


@pytest.mark.parametrize(
    ("status", "shadow", "percent"),
    [
        ({"phase": "Shadowing", "shadowPercent": 100}, {}, 2),
        ({"phase": "Shadowing", "shadowPercent": 100}, {"pairingPercent": 30}, 30),
        ({"phase": "Shadowing", "shadowPercent": 1}, {"pairingPercent": 30}, 1),
        ({"phase": "Shadowing", "shadowPercent": 0}, {}, 0),
        ({"phase": "Shadowing", "shadowPercent": 100}, {"pairingPercent": 0}, 0),
        ({"phase": "Step", "weight": 10}, {}, 0),
    ],
)
def test_pairs_are_taken_while_shadowing(
    status: dict[str, Any], shadow: dict[str, Any], percent: int
) -> None:
    _, made = both(status, shadow={"percent": 100, **shadow})
    assert only(made).pair_percent == percent


def test_no_pairs_for_a_candidate_that_is_not_there() -> None:
    told = policy({"phase": "Shadowing", "shadowPercent": 100}, rollout={**ROLLOUT, "shadow": {}})
    _, made = settled(inputs(told, a=[pod("a1")], b=[]))
    assert (only(made).shadow_percent, only(made).pair_percent) == (0, 0)


def test_what_a_candidate_is_unfit_for_and_does_not_get_is_refused_nobody() -> None:
    given, _ = both({"phase": "Step", "weight": 10}, exclude=[{"task": "sql"}])
    narrow = Fitness.model_validate({**ALL.model_dump(by_alias=True), "forbiddenTasks": ["sql"]})
    for cluster, guards in (("ns/b", 0), ("ns/a", 1)):
        backends = {**given.backends, cluster: replace(given.backends[cluster], fitness=narrow)}
        made = plan(replace(given, backends=backends))
        assert len(made.state.policies[0].rules) == 1 + guards


# Reviews

REVIEW = Review("review-1", "old", "new", 20)


def reviewed(**views: BackendView) -> tuple[Inputs, Plan]:
    given = inputs(policy(), a=[pod("a1")], old=[pod("o1")], new=[pod("n1"), pod("n2")])
    backends = {**given.backends, **{f"ns/{name}": view for name, view in views.items()}}
    return settled(replace(given, backends=backends, reviews={("ns/chat", "all"): REVIEW}))


def test_a_review_copies_to_both_backends_under_the_stable_arms_configuration() -> None:
    given, made = reviewed()
    review = only(made).review
    assert review is not None
    version = made.arms[STABLE].config
    assert (review.attempt, review.percent) == ("review-1", 20)
    assert (review.stable, review.candidate) == (Arm("ns/old", version), Arm("ns/new", version))
    assert made.reviews == {("ns/chat", "all"): ""}
    assert {name: set(c) for name, c in made.configs.items()} == {key: {version} for key in given.backends}
    assert only(plan(replace(given, reviews={}))).review is None


def test_a_review_waits_for_all_pods_of_both_and_takes_none_of_them_out() -> None:
    given, made = reviewed()
    version = made.arms[STABLE].config
    half = BackendView((pod("n1", version), pod("n2", "else")), given.backends["ns/new"].digest, ALL)
    late = plan(replace(given, backends={**given.backends, "ns/new": half}))
    assert only(late).review is None
    assert late.reviews == {("ns/chat", "all"): "1 of 2 pods of ns/new hold the configuration"}
    assert len(late.endpoints["ns/new"]) == 2


def test_a_review_gives_a_backend_nothing_that_it_may_not_have() -> None:
    public = Fitness.model_validate({"dataClasses": ["Public"]})
    _, made = reviewed(old=BackendView((pod("o1"),), "sha256:1", public))
    assert only(made).review is None
    assert "data classes" in made.reviews[("ns/chat", "all")]
    assert not made.configs["ns/old"]
    forbidden = Fitness.model_validate({**ALL.model_dump(by_alias=True), "forbiddenTasks": ["sql"]})
    given, made = reviewed(new=BackendView((pod("n1"),), "sha256:1", forbidden))
    assert only(made).review is not None, "nobody may claim that task"
    claiming = replace(given, tenants=(Tenant("t", "d", tasks=("sql",)),))
    assert only(plan(claiming)).review is None


def test_a_review_of_what_is_gone_says_so() -> None:
    given, _ = reviewed()
    gone = {name: view for name, view in given.backends.items() if name != "ns/old"}
    assert plan(replace(given, backends=gone)).reviews == {("ns/chat", "all"): "backend old does not exist"}
    elsewhere = replace(given, reviews={("ns/chat", "none"): REVIEW})
    assert plan(elsewhere).reviews == {("ns/chat", "none"): "no such rule serves"}


# Switches


def configured(switches: list[dict[str, Any]], scope: CacheScopeSpec | None = None) -> dict[str, Any]:
    told = policy(cacheScope="team" if scope else None)
    spec = RoutePolicySpec.model_validate({**told.spec.model_dump(by_alias=True), "switches": switches})
    given = replace(
        inputs(replace(told, spec=spec), a=[pod("a1")]), scopes={"ns": {"team": scope}} if scope else {}
    )
    [config] = plan(given).configs["ns/a"].values()
    jsonschema.validate(config, SCHEMA)
    return config


def test_switches_reach_the_pods_in_order_and_name_a_new_version() -> None:
    off = {"features": {"prefixCache": False, "speculation": False}, "tasks": ["sql", "code"]}
    on = {"features": {"prefixCache": True}, "tenants": ["acme"]}
    config = configured([off, on])
    assert config["switches"] == [
        {
            "tasks": ["code", "sql"],
            "tenants": [],
            "features": {"prefixCache": False, "speculation": False},
        },
        {"tasks": [], "tenants": ["acme"], "features": {"prefixCache": True}},
    ]
    versions = {configured(switches)["version"] for switches in ([], [off], [off, on], [on, off])}
    assert len(versions) == 4


def test_direct_streaming_is_told_only_where_it_is_switched() -> None:
    assert "directStreaming" not in configured([])["features"]
    [switch] = configured([{"features": {"directStreaming": False}, "tasks": ["advice"]}])["switches"]
    assert switch["features"] == {"directStreaming": False}
    arm = policy(features={"directStreaming": False})
    [config] = plan(inputs(arm, a=[pod("a1")])).configs["ns/a"].values()
    jsonschema.validate(config, SCHEMA)
    assert config["features"] == {"prefixCache": True, "directStreaming": False}


def test_a_switch_never_allows_what_the_cache_scope_forbids() -> None:
    closed = CacheScopeSpec.model_validate({"prefix": {"enabled": False}})
    config = configured([{"features": {"prefixCache": True}}], closed)
    assert config["features"] == {"prefixCache": False}
    assert config["switches"][0]["features"] == {"prefixCache": False}
    assert configured([{"features": {"prefixCache": True}}], CacheScopeSpec())["switches"][0]["features"] == {
        "prefixCache": True
    }
