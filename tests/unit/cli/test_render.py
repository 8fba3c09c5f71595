"""What `sluice` prints of policies: pure functions."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console, RenderableType

from sluice_operator.api import RoutePolicy
from sluice_operator.cli.render import history_table, policies_view, since, until

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def policy(status: dict[str, Any] | None = None, **rollout: Any) -> RoutePolicy:
    return RoutePolicy.model_validate(
        {
            "metadata": {"name": "assistant", "namespace": "demo"},
            "spec": {
                "model": "assistant",
                "rules": [
                    {
                        "name": "chat",
                        "target": {"backend": "old"},
                        "rollout": {
                            "candidate": {"backend": "new"},
                            "shadow": {"minSamples": 30},
                            "steps": [{"weight": 25, "minSamples": 10}, {"weight": 50}],
                            **rollout,
                        },
                    },
                    {"name": "rest", "target": {"refusal": {"message": "no"}}},
                ],
            },
            "status": status or {},
        }
    )


def rule(**fields: Any) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": "x"}
    return {"conditions": [ready], "rules": [{"name": "chat", **fields}]}


def text(view: RenderableType, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(view)
    return out.getvalue()


def row(policy: RoutePolicy, name: str = "chat") -> str:
    lines = text(policies_view([policy], NOW, "demo")).splitlines()
    return " ".join(next(line for line in lines if line.startswith(name)).split())


def test_no_policy() -> None:
    assert "No RoutePolicy in namespace demo" in text(policies_view([], NOW, "demo"))


def test_a_policy_that_nobody_has_seen() -> None:
    assert "no operator has seen it yet" in text(policies_view([policy()], NOW, "demo"))


def test_a_step() -> None:
    shown = policy(
        rule(
            phase="Step",
            weight=25,
            numSamples=7,
            minSamples=10,
            held="NoEvidence",
            heldMessage="the stage asks for 10 judged requests of the candidate",
            stageSince="2026-03-01T11:55:00Z",
            guards=[
                {"name": "TTFT/p95", "logWealth": ["0.0", "0.0"], "numBadStable": 3, "numBadCandidate": 1}
            ],
        )
    )
    assert row(shown) == "chat Step 1/2 25 % old new 7/10 5m"
    assert row(shown, "chat waits") == ("chat waits: the stage asks for 10 judged requests of the candidate")
    assert row(shown, "chat evidence") == "chat evidence: TTFT/p95 1:3 bad ×1"
    assert row(shown, "rest") == "rest Stable refusal 403"


def test_a_shadow() -> None:
    assert row(policy(rule(phase="Shadowing", shadowPercent=50, numSamples=2, minSamples=30))) == (
        "chat Shadowing mirror 50 % old new 2/30"
    )


def test_a_reason_without_a_message_is_shown_as_it_is() -> None:
    assert row(policy(rule(phase="Step", held="SomethingNew")), "chat waits").endswith("SomethingNew")


def test_a_refused_edit() -> None:
    stalled = {
        "type": "Stalled",
        "status": "True",
        "reason": "InvalidSpec",
        "message": "spec.rules[0].target.backend: [none]",
        "lastTransitionTime": "x",
    }
    status = rule()
    status["conditions"].append(stalled)
    shown = text(policies_view([policy(status)], NOW, "demo"))
    assert "refused edit (InvalidSpec): spec.rules[0].target.backend: [none]" in shown


def test_history_in_order_and_as_it_is() -> None:
    lines = [
        {
            "time": "2026-03-01T11:00:00Z",
            "phase": "Step",
            "step": 0,
            "reason": "Begun",
            "message": "[red]25 %[/red]",
        },
        {
            "time": "2026-03-01T11:01:00Z",
            "phase": "RolledBack",
            "reason": "GuardFired",
            "message": "TTFT/p95",
        },
    ]
    shown = text(history_table(policy(rule(history=lines)))).splitlines()
    assert shown[1].split() == ["2026-03-01", "11:00:00", "chat", "Step", "1", "Begun", "[red]25", "%[/red]"]
    assert "RolledBack" in shown[2]
    assert "Nothing has happened" in text(history_table(policy()))


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        ("", ""),
        ("2026-03-01T12:00:10Z", "0s"),
        ("2026-03-01T11:58:01Z", "119s"),
        ("2026-03-01T11:58:00Z", "2m"),
        ("2026-03-01T09:00:00Z", "3h"),
        ("2026-02-20T12:00:00Z", "9d"),
    ],
)
def test_since(start: str, shown: str) -> None:
    assert since(start, NOW) == shown


def test_until() -> None:
    assert (until("2026-03-08T12:00:00Z", NOW), until("2026-03-01T11:00:00Z", NOW)) == ("7d", "0s")


def test_what_waits_for_a_person_comes_with_the_command_to_type() -> None:
    waiting = rule(phase="Step", step=0, stageSince="2026-03-01T11:55:00Z", held="AwaitingApproval")
    shown = policy(waiting, steps=[{"weight": 25}, {"weight": 50, "consent": "Manual"}])
    assert row(shown, "chat waits") == "chat waits for approval: step 2 of 2, 50 % of requests"
    assert row(shown, "chat to") == "chat to approve: kubectl sluice approve assistant chat -n demo"
    waiting["rules"][0]["step"] = 1
    shown = policy(waiting, promotion="Manual")
    assert row(shown, "chat waits").endswith("the promotion: the candidate serves everybody")
    limited = [{"weight": 25, "tenants": ["a", "b"], "tasks": ["t"], "consent": "Manual"}, {"weight": 50}]
    shown = policy(rule(phase="Shadowing", held="AwaitingApproval"), steps=limited)
    assert row(shown, "chat waits").endswith("step 1 of 2, 25 % of tenants a, b and tasks t")


def test_the_phases_before_and_after_the_steps() -> None:
    shown = policy(rule(phase="Evaluating", evaluation={"stage": "Start", "started": "2026-03-01T11:59:00Z"}))
    assert row(shown) == "chat Evaluating 0 % old new"
    assert row(shown, "chat suites") == "chat suites: Start running since 2026-03-01 11:59:00 UTC"
    shown = policy(rule(phase="Watching", weight=98, numSamples=3, watchUntil="2026-03-08T11:00:00Z"))
    assert row(shown) == "chat Watching 98 % old new 3"
    assert row(shown, "chat is") == "chat is watched until 2026-03-08 11:00:00 UTC, in 6d"


def test_what_was_rolled_back_alone_is_told_also_when_all_is_over() -> None:
    excluded = [
        {"task": "nl2sql", "reason": "GuardFired", "message": "TTFT/p95: [9] of 10", "time": "x"},
        {"task": "a", "tenant": "shop", "reason": "Excluded", "message": "by rollout.exclude", "time": "x"},
    ]
    shown = text(policies_view([policy(rule(phase="Promoted", weight=100, excluded=excluded))], NOW, "demo"))
    assert "chat leaves out task nl2sql (GuardFired): TTFT/p95: [9] of 10" in shown
    assert "chat leaves out task a of tenant shop (Excluded): by rollout.exclude" in shown


def test_suites_by_task_with_what_failed() -> None:
    run = {
        "stage": "Step/1",
        "ended": "x",
        "candidate": [{"task": "nl2sql", "numSamples": 10, "numPassed": 7}],
        "stable": [{"task": "nl2sql", "numSamples": 10, "numPassed": 10}],
        "failed": ["s/a", "s/b"],
        "failedHard": ["s/c"],
    }
    shown = policy(rule(phase="Step", evaluation=run))
    assert row(shown, "chat suites") == (
        "chat suites: Step/1 nl2sql 7/10 (stable 10/10); failed hard samples: s/c; failed: s/a, s/b"
    )
    shown = policy(rule(phase="Step", evaluation={"stage": "Start", "ended": "x", "error": "no pod"}))
    assert row(shown, "chat suites") == "chat suites: Start could not be finished: no pod"


def test_gains_coverage_queries_and_agreement() -> None:
    shown = policy(
        rule(
            phase="Step",
            gains=[{"name": "TTFT/p50", "shown": True}, {"name": "Total/p95"}],
            coverage=[{"name": "long", "numSamples": 4}],
            queries=[
                {"name": "gpu", "candidate": "0.9", "stable": "0.5", "numFailures": 2},
                {"name": "bad", "error": "gives no series"},
                {"name": "new"},
            ],
            agreement=[
                {"task": "t", "numPairs": 9, "numEqual": 8, "numBaselinePairs": 9, "numBaselineEqual": 9}
            ],
        )
    )
    assert row(shown, "chat gains") == "chat gains: TTFT/p50 shown, Total/p95 not shown yet"
    assert row(shown, "chat has") == "chat has seen: long 4"
    assert row(shown, "chat query gpu") == "chat query gpu: 0.9, stable 0.5; 2 in a row over the limit"
    assert row(shown, "chat query bad") == "chat query bad: gives no series"
    assert row(shown, "chat greedy") == "chat greedy answers that agree, t: 8/9, stable with itself 9/9"


def test_the_guards_nearest_to_firing_are_shown() -> None:
    guards = [{"name": f"G{i}", "logWealth": [f"{i}.0"], "numBadCandidate": i} for i in range(5)]
    guards.append({"name": "unbet"})
    shown = row(policy(rule(phase="Step", guards=guards)), "chat evidence")
    assert shown == "chat evidence: G4 4:0 bad ×54.6; G3 3:0 bad ×20.1; G2 2:0 bad ×7.39; and 3 more"


def test_it_fits_a_terminal_of_80_columns() -> None:
    long = "a-rather-long-name-of-a-backend-2026-03-int4"
    shown = policy(
        rule(phase="Step", held="AwaitingApproval", weight=25, numSamples=1, minSamples=200),
        candidate={"backend": long},
    )
    lines = text(policies_view([shown], NOW, "demo"), width=80).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "kubectl sluice approve assistant chat -n demo" in "\n".join(lines)
