"""Requests past the gateway: to which pod they go, and whose requests a backend answers."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.control.direct import NoTarget, backend_target, serves, target
from sluice_operator.plan.routes import plan
from unit.plan.routes_world import ROLLOUT, inputs, pod, policy, settled

STEP = {"phase": "Step", "weight": 10, "attempt": "a1"}


def test_a_pod_that_holds_what_the_rule_asks_of_it() -> None:
    given = inputs(policy(STEP, rollout=ROLLOUT), a=[pod("a-1"), pod("a-0")], b=[pod("b-0")])
    made = settled(given)[1]
    found = target(made, "ns/chat", "all", "candidate")
    assert (found.url, found.pod) == (f"http://{pod('b-0').pod.ip}:8000", "b-0")
    assert found.config == made.wanted[("ns/chat", "all", "candidate")].config
    assert target(made, "ns/chat", "all", "stable").pod == "a-0"
    assert backend_target(made, "ns/chat", "b").pod == "b-0"
    headers = found.headers("secret")
    assert (headers["x-sluice-arm"], headers["x-sluice-policy"]) == ("candidate", "ns/chat")
    assert (headers["x-sluice-rule"], headers["x-sluice-attempt"]) == ("", "")
    assert "secret" not in repr(found)


def test_an_ipv6_pod_can_be_named_in_a_url() -> None:
    made = settled(inputs(policy(), a=[pod("a-0", ip="fd00::7")]))[1]
    assert target(made, "ns/chat", "all", "stable").url == "http://[fd00::7]:8000"


def test_without_a_pod_it_says_why() -> None:
    given = inputs(policy(STEP, rollout=ROLLOUT), a=[pod("a-0")], b=[pod("b-0", ready=False)])
    for made, policy_, rule, arm, why in (
        (None, "ns/chat", "all", "stable", "has no stable arm"),
        (plan(given), "ns/chat", "none", "stable", "rule none of policy ns/chat has no stable arm"),
        (plan(given), "ns/chat", "all", "stable", "no ready pod of ns/a holds"),
        (settled(given)[1], "ns/chat", "all", "candidate", "no ready pod of ns/b holds"),
    ):
        with pytest.raises(NoTarget, match=why):
            target(made, policy_, rule, arm)
    with pytest.raises(NoTarget, match="no rule of policy ns/chat names backend z"):
        backend_target(plan(given), "ns/chat", "z")


@pytest.mark.parametrize(
    ("backend", "status", "rule", "who"),
    [
        ("a", {}, {}, "it answers rule all of policy chat"),
        ("b", {}, {}, ""),
        ("b", STEP, {"rollout": ROLLOUT}, "it gets 10 % of rule all of policy chat"),
        ("b", {**STEP, "weight": 0}, {"rollout": ROLLOUT}, ""),
        (
            "b",
            {"phase": "Shadowing", "shadowPercent": 50, "attempt": "a1"},
            {"rollout": ROLLOUT},
            "it gets mirrored requests of rule all of policy chat",
        ),
        ("b", {**STEP, "phase": "RolledBack"}, {"rollout": ROLLOUT}, ""),
        (
            "b",
            {"phase": "Promoted", "weight": 100, "attempt": "a1"},
            {"rollout": ROLLOUT},
            "it answers rule all of policy chat",
        ),
        ("c", {}, {"fallbacks": [{"backend": "c"}]}, "it is a fallback of rule all of policy chat"),
    ],
)
def test_whose_requests_a_backend_answers(
    backend: str, status: dict[str, Any], rule: dict[str, Any], who: str
) -> None:
    assert serves([policy(status, **rule)], "ns", backend) == who
    assert serves([policy(status, **rule)], "elsewhere", backend) == ""
