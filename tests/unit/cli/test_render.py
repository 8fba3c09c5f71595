"""What `sluice` prints and what its edits are: pure functions, and the commands' help and errors."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from sluice_operator.api import RoutePolicy
from sluice_operator.cli.app import app
from sluice_operator.cli.edit import EditError, abort_patch, retry_patch, rule_with_rollout
from sluice_operator.cli.render import history_table, policies_view, since

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


def text(view: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(view)
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
            held="NoEvidence",
            stageSince="2026-03-01T11:55:00Z",
            guards=[
                {"name": "TTFT/p95", "logWealth": ["0.0", "0.0"], "numBadStable": 3, "numBadCandidate": 1}
            ],
        )
    )
    assert row(shown) == "chat Step 1/2 25 % old new 7/10 5m"
    assert row(shown, "chat waits") == "chat waits: no requests were judged: it waits for traffic"
    assert row(shown, "chat evidence") == "chat evidence: TTFT/p95 1:3 bad ×1"
    assert row(shown, "rest") == "rest Stable refusal 403"


def test_a_shadow() -> None:
    assert row(policy(rule(phase="Shadowing", shadowPercent=50, numSamples=2))) == (
        "chat Shadowing mirror 50 % old new 2/30"
    )


def test_a_reason_that_this_version_does_not_know_is_shown_as_it_is() -> None:
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


def test_the_only_rollout_is_found_and_others_are_explained() -> None:
    assert rule_with_rollout(policy(), "") == 0
    assert rule_with_rollout(policy(), "chat") == 0
    with pytest.raises(EditError, match="rule rest has no rollout"):
        rule_with_rollout(policy(), "rest")
    with pytest.raises(EditError, match="it has chat, rest"):
        rule_with_rollout(policy(), "none")


def test_an_abort_hits_the_rule_that_was_meant_or_nothing() -> None:
    assert abort_patch(policy(), 0) == [
        {"op": "test", "path": "/spec/rules/0/name", "value": "chat"},
        {"op": "add", "path": "/spec/rules/0/rollout/abort", "value": True},
    ]


def test_a_retry_is_another_attempt_and_no_abort() -> None:
    aborted = policy(rule(phase="Aborted"), abort=True, attempt=3)
    assert [(o["path"], o["value"]) for o in retry_patch(aborted, 0)[1:]] == [
        ("/spec/rules/0/rollout/attempt", 4),
        ("/spec/rules/0/rollout/abort", False),
    ]
    with pytest.raises(EditError, match="under way"):
        retry_patch(policy(rule(phase="Step")), 0)


@pytest.mark.parametrize(
    "command", [[], ["status"], ["history"], ["rollback"], ["abort"], ["retry"], ["version"]]
)
def test_help(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.output


def test_without_a_cluster_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    shown = CliRunner().invoke(app, ["status"])
    assert shown.exit_code == 1
    assert "no usable kubeconfig" in shown.output
    assert "Traceback" not in shown.output
