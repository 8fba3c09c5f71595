"""What a policy gets wrong, with the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sluice_operator.api import RoutePolicySpec
from sluice_operator.api.backend import Fitness
from sluice_operator.plan.validate import Surroundings, pattern_error, policy_problems

ALL = ["Public", "Internal", "Confidential", "Restricted"]
AROUND = Surroundings(
    backends={
        "a": Fitness.model_validate({"dataClasses": ALL}),
        "b": Fitness.model_validate({"dataClasses": ALL}),
        "default": Fitness(),
        "no-sql": Fitness.model_validate({"dataClasses": ALL, "forbiddenTasks": ["sql"]}),
        "only-qa": Fitness.model_validate({"dataClasses": ALL, "allowedTasks": ["qa"]}),
        "only-x": Fitness.model_validate({"dataClasses": ALL, "tenants": ["x"]}),
    },
    scopes=frozenset({"team"}),
    tenants={"x": ("qa",), "y": ("sql",)},
    models_taken={"taken": "ns/older"},
    suites=frozenset({"six"}),
    prometheus=True,
)


def found(*rules: dict[str, Any], model: str = "m", around: Surroundings = AROUND) -> list[tuple[str, str]]:
    full = [{"name": f"r{i}", **rule} for i, rule in enumerate(rules)]
    spec = RoutePolicySpec.model_validate({"model": model, "rules": full})
    return [(p.reason, p.field) for p in policy_problems(spec, around)]


def rollout(**more: Any) -> dict[str, Any]:
    return {
        "target": {"backend": "a"},
        "rollout": {"candidate": {"backend": "b"}, "steps": [{"weight": 5}], **more},
    }


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    return {"target": {"backend": "a"}, "contract": {"checks": [{"name": "c", "jsonSchema": schema}]}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return checked(schema)


def wide(num: int, part: dict[str, Any] | bool) -> dict[str, Any]:
    return checked({"properties": {str(i): part for i in range(num)}})


@pytest.mark.parametrize(
    ("rule", "reason", "field"),
    [
        ({"target": {"backend": "none"}}, "BackendNotFound", "spec.rules[0].target.backend"),
        (
            {"target": {"backend": "a"}, "fallbacks": [{"backend": "z"}]},
            "BackendNotFound",
            "spec.rules[0].fallbacks[0].backend",
        ),
        (rollout(candidate={"backend": "z"}), "BackendNotFound", "spec.rules[0].rollout.candidate.backend"),
        ({"target": {"backend": "a"}, "cacheScope": "z"}, "CacheScopeNotFound", "spec.rules[0].cacheScope"),
        (
            rollout(candidate={"cacheScope": "z"}),
            "CacheScopeNotFound",
            "spec.rules[0].rollout.candidate.cacheScope",
        ),
        (
            {"target": {"backend": "a"}, "match": {"tenants": ["z"]}},
            "TenantNotFound",
            "spec.rules[0].match.tenants",
        ),
        (
            rollout(steps=[{"weight": 5}, {"weight": 5}]),
            "InvalidSpec",
            "spec.rules[0].rollout.steps[1].weight",
        ),
        (deep(40), "InvalidSchema", "spec.rules[0].contract.checks[0].jsonSchema"),
        (deep(5000), "InvalidSchema", "spec.rules[0].contract.checks[0].jsonSchema"),
        (wide(2001, {}), "InvalidSchema", "spec.rules[0].contract.checks[0].jsonSchema"),
        (wide(2001, True), "InvalidSchema", "spec.rules[0].contract.checks[0].jsonSchema"),
        (
            {"target": {"backend": "a"}, "contract": {"streaming": "Verified"}},
            "InvalidSpec",
            "spec.rules[0].contract.streaming",
        ),
        (
            {
                "target": {"backend": "a"},
                "contract": {
                    "streaming": "Draft",
                    "checks": [{"name": "c", "mustMatch": "a", "severity": "Watch"}],
                },
            },
            "InvalidSpec",
            "spec.rules[0].contract.streaming",
        ),
        (
            {
                "target": {"backend": "a"},
                "contract": {
                    "checks": [{"name": "c", "mustMatch": "a", "verifier": {"url": "http://facts"}}]
                },
            },
            "InvalidSpec",
            "spec.rules[0].contract.checks[0]",
        ),
        (rollout(alpha="0.5"), "InvalidSpec", "spec.rules[0].rollout.alpha"),
        (rollout(alpha="1"), "InvalidSpec", "spec.rules[0].rollout.alpha"),
        (rollout(candidate={"backend": "a"}), "InvalidSpec", "spec.rules[0].rollout.candidate"),
        (
            {"target": {"backend": "a"}, "contract": {"checks": [{"name": "c", "mustMatch": "(a"}]}},
            "InvalidPattern",
            "spec.rules[0].contract.checks[0].mustMatch",
        ),
        (
            {
                "target": {"backend": "a"},
                "contract": {"checks": [{"name": "c", "jsonSchema": {"type": "objekt"}}]},
            },
            "InvalidSchema",
            "spec.rules[0].contract.checks[0].jsonSchema",
        ),
        (
            {
                "target": {"backend": "a"},
                "contract": {"checks": [{"name": "c", "jsonSchema": {"$ref": "http://x"}}]},
            },
            "InvalidSchema",
            "spec.rules[0].contract.checks[0].jsonSchema",
        ),
        (
            {"target": {"backend": "a"}, "sampling": {"topP": "1.5"}},
            "InvalidSpec",
            "spec.rules[0].sampling.topP",
        ),
        ({"target": {"backend": "default"}}, "UnfitBackend", "spec.rules[0].target.backend"),
        ({"target": {"backend": "no-sql"}}, "UnfitBackend", "spec.rules[0].target.backend"),
        (
            {"target": {"backend": "no-sql"}, "match": {"tasks": ["sql"]}},
            "UnfitBackend",
            "spec.rules[0].target.backend",
        ),
        ({"target": {"backend": "only-qa"}}, "UnfitBackend", "spec.rules[0].target.backend"),
        ({"target": {"backend": "only-x"}}, "UnfitBackend", "spec.rules[0].target.backend"),
        (
            {"target": {"backend": "only-x"}, "match": {"tenants": ["x", "y"]}},
            "UnfitBackend",
            "spec.rules[0].target.backend",
        ),
        (
            {"target": {"backend": "a"}, "fallbacks": [{"backend": "default"}]},
            "UnfitBackend",
            "spec.rules[0].fallbacks[0].backend",
        ),
    ],
)
def test_each_problem_names_its_field(rule: dict[str, Any], reason: str, field: str) -> None:
    assert (reason, field) in found(rule)


@pytest.mark.parametrize(
    "rules",
    [
        [{"target": {"backend": "a"}}],
        [{"target": {"backend": "a"}, "cacheScope": "team"}],
        [deep(31)],
        [rollout()],
        [{"target": {"backend": "default"}, "match": {"dataClasses": ["Public"]}}],
        [{"target": {"backend": "only-qa"}, "match": {"tasks": ["qa"]}}],
        [{"target": {"backend": "only-x"}, "match": {"tenants": ["x"]}}],
        # Nobody whom this rule takes may claim the forbidden task.
        [{"target": {"backend": "no-sql"}, "match": {"tenants": ["x"]}}],
        # An earlier rule takes it.
        [
            {"target": {"refusal": {"message": "no"}}, "match": {"tasks": ["sql"]}},
            {"target": {"backend": "no-sql"}},
        ],
    ],
)
def test_good_ones_pass(rules: list[dict[str, Any]]) -> None:
    assert found(*rules) == []


def test_an_older_policy_keeps_its_model() -> None:
    assert found({"target": {"backend": "a"}}, model="taken") == [("DuplicateModel", "spec.model")]


def test_patterns_are_re2() -> None:
    assert pattern_error(r"(?i)\bparis\b") == ""
    assert "look" in pattern_error("(?=a)") or pattern_error("(?=a)")
    assert pattern_error(r"(a)\1")


GOOD: list[dict[str, Any]] = [
    {"evaluation": {"suites": ["six"]}, "steps": [{"weight": 5, "evaluate": True}]},
    {"steps": [{"weight": 100, "tenants": ["x"]}, {"weight": 100, "tasks": ["qa"]}, {"weight": 5}]},
    {"exclude": [{"task": "qa"}, {"tenant": "y"}, {"task": "sql", "tenant": "y"}]},
    {"queries": [{"name": "q", "query": "sum(x{arm='$arm'})", "max": "1", "maxIncreasePercent": 10}]},
    {"approval": {"attempt": "a", "step": 1}},
    {"guards": [{"metric": "TTFT"}, {"metric": "TTFT", "tasks": ["qa"]}]},
    {"shadow": {}, "guards": [{"metric": "DisagreementRate"}]},
    {"gains": [{"metric": "TTFT", "minDecreasePercent": 5}, {"metric": "Total", "minDecreasePercent": 5}]},
    {"guards": [{"metric": "TTFT", "percentiles": [], "ceiling": {"value": "2.5"}}]},
    {"guards": [{"metric": "ErrorRate", "ceiling": {"value": "0"}}]},
    {
        "steps": [
            {"weight": 5, "tasks": ["qa"], "coverage": [{"name": "c", "tasks": ["sql", "qa"]}]},
            {"weight": 9},
        ]
    },
    {
        "steps": [{"weight": 5, "tasks": ["qa"]}, {"weight": 9}],
        "gains": [{"metric": "TTFT", "minDecreasePercent": 5, "tasks": ["sql"]}],
    },
]


@pytest.mark.parametrize("more", GOOD)
def test_rollouts_that_can_come_to_an_end(more: dict[str, Any]) -> None:
    assert found(rollout(**more)) == []


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"evaluation": {"suites": ["six", "none"]}}, "SuiteNotFound", "evaluation.suites[1]"),
    ({"steps": [{"weight": 5, "evaluate": True}]}, "InvalidSpec", "steps[0].evaluate"),
    ({"steps": [{"weight": 5, "tenants": ["z"]}, {"weight": 9}]}, "TenantNotFound", "steps[0].tenants"),
    ({"steps": [{"weight": 5, "tasks": ["nobody"]}, {"weight": 9}]}, "InvalidSpec", "steps[0].tasks"),
    ({"steps": [{"weight": 5}, {"weight": 9, "tasks": ["qa"]}]}, "InvalidSpec", "steps[1]"),
    ({"exclude": [{"tenant": "z"}]}, "TenantNotFound", "exclude[0].tenant"),
    ({"exclude": [{"tenant": "x"}, {"task": "nobody"}]}, "InvalidSpec", "exclude[1].task"),
    ({"guards": [{"metric": "TTFT"}, {"metric": "TTFT"}]}, "InvalidSpec", "guards[1]"),
    ({"guards": [{"metric": "TTFT", "tasks": ["nobody"]}]}, "InvalidSpec", "guards[0].tasks"),
    ({"guards": [{"metric": "DisagreementRate"}]}, "InvalidSpec", "guards[0].metric"),
    (
        {"gains": [{"metric": "TTFT", "minDecreasePercent": p} for p in (5, 9)]},
        "InvalidSpec",
        "gains[1]",
    ),
    (
        {"gains": [{"metric": "TTFT", "minDecreasePercent": 5, "tasks": ["nobody"]}]},
        "InvalidSpec",
        "gains[0].tasks",
    ),
    (
        {"steps": [{"weight": 5, "coverage": [{"name": "c", "tasks": ["nobody"]}]}]},
        "InvalidSpec",
        "steps[0].coverage[0].tasks",
    ),
    ({"queries": [{"name": "q", "query": "x{b='$bakend'}", "max": "1"}]}, "InvalidSpec", "queries[0].query"),
    ({"approval": {"attempt": "a", "step": 2}}, "InvalidSpec", "approval.step"),
    (
        {
            "steps": [
                {"weight": 5, "tasks": ["qa"], "coverage": [{"name": "c", "tasks": ["sql"]}]},
                {"weight": 9},
            ]
        },
        "InvalidSpec",
        "steps[0].coverage[0].tasks",
    ),
    ({"guards": [{"metric": "TTFT", "percentiles": []}]}, "InvalidSpec", "guards[0].percentiles"),
    ({"guards": [{"metric": "Total", "ceiling": {"value": "0"}}]}, "InvalidSpec", "guards[0].ceiling.value"),
    (
        {"guards": [{"metric": "ErrorRate", "ceiling": {"value": "100"}}]},
        "InvalidSpec",
        "guards[0].ceiling.value",
    ),
    (
        {"shadow": {}, "guards": [{"metric": "DisagreementRate", "ceiling": {"value": "5"}}]},
        "InvalidSpec",
        "guards[0].ceiling",
    ),
    (
        {"shadow": {}, "guards": [{"metric": "DisagreementRate", "mode": "Hard"}]},
        "InvalidSpec",
        "guards[0].mode",
    ),
    (
        {"gains": [{"metric": "DisagreementRate", "minDecreasePercent": 5}]},
        "InvalidSpec",
        "gains[0].metric",
    ),
]


@pytest.mark.parametrize(("more", "reason", "field"), BAD)
def test_rollouts_that_could_not(more: dict[str, Any], reason: str, field: str) -> None:
    assert found(rollout(**more)) == [(reason, f"spec.rules[0].rollout.{field}")]


@pytest.mark.parametrize(
    ("verifier", "field"),
    [
        ({"url": "http://facts/v1", "tokenSecret": {"name": "t"}}, ".url"),
        ({"url": "http://facts/v1", "caBundle": {"secret": {"name": "t"}}}, ".url"),
        ({"url": "https://facts/v1", "caBundle": {}}, ".caBundle"),
        (
            {"url": "https://facts/v1", "caBundle": {"secret": {"name": "t"}, "configMap": {"name": "t"}}},
            ".caBundle",
        ),
        ({"url": "https://facts/v1", "caBundle": {"configMap": {"name": "kube-root-ca.crt"}}}, None),
        ({"url": "http://facts/v1"}, None),
    ],
)
def test_a_token_needs_https_and_a_bundle_one_source(verifier: dict[str, Any], field: str | None) -> None:
    rule = {"target": {"backend": "a"}, "contract": {"checks": [{"name": "c", "verifier": verifier}]}}
    at = "spec.rules[0].contract.checks[0].verifier"
    assert found(rule) == ([] if field is None else [("InvalidSpec", at + field)])


HARD = {"checks": [{"name": "c", "mustMatch": "a"}]}
WATCHED = {"checks": [{"name": "c", "mustMatch": "a", "severity": "Watch"}]}


def test_time_to_verified_needs_something_that_can_be_passed() -> None:
    asked = {
        "guards": [{"metric": "TTFT"}, {"metric": "TimeToVerified"}],
        "gains": [{"metric": "TimeToVerified", "minDecreasePercent": 5}],
    }
    at = "spec.rules[0].rollout"
    wrong = [("InvalidSpec", f"{at}.guards[1].metric"), ("InvalidSpec", f"{at}.gains[0].metric")]
    assert found(rollout(**asked)) == wrong
    assert found({**rollout(**asked), "contract": WATCHED}) == wrong
    assert found({**rollout(**asked), "contract": HARD}) == []


def test_a_rule_that_never_meets_whom_its_rollout_names() -> None:
    rule = rollout(steps=[{"weight": 5, "tenants": ["y"]}, {"weight": 9, "tasks": ["sql"]}, {"weight": 10}])
    rule["match"] = {"tenants": ["x"], "tasks": ["qa"]}
    at = "spec.rules[0].rollout.steps"
    assert found(rule) == [("InvalidSpec", f"{at}[0].tenants"), ("InvalidSpec", f"{at}[1].tasks")]


def test_a_task_that_only_other_tenants_may_claim_never_comes() -> None:
    rule = rollout(steps=[{"weight": 5, "tasks": ["sql"]}, {"weight": 9}])
    assert found(rule) == []
    rule["match"] = {"tenants": ["x"]}
    assert found(rule) == [("InvalidSpec", "spec.rules[0].rollout.steps[0].tasks")]


def test_a_query_needs_a_prometheus() -> None:
    query = {"name": "q", "query": "x", "max": "1"}
    told = found(rollout(queries=[query]), around=replace(AROUND, prometheus=False))
    assert told == [("PrometheusNotFound", "spec.rules[0].rollout.queries[0]")]
