"""The commands over a cluster that is played: what they ask for, wait for, print, and say when they can't."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice_operator.api import InferenceBackend, ReleaseRecord, RoutePolicy
from sluice_operator.cli import app as app_module
from sluice_operator.cli import asking, common, evaluate, reading
from sluice_operator.cli.app import app
from sluice_operator.cli.cluster import ClusterError
from unit.cli.test_render import policy, rule

COMMANDS = [
    "status", "history", "ledger", "approve", "exclude", "rollback", "abort", "retry", "review", "evaluate",
    "calibrate", "simulate", "version",
]  # fmt: skip


def record(name: str = "assistant-chat-a1", **spec: Any) -> ReleaseRecord:
    told = {
        "policy": "assistant", "rule": "chat", "attempt": "a1", "started": "2026-03-01T11:00:00Z",
        "ended": "2026-03-01T12:00:00Z", "outcome": "RolledBack", "reason": "GuardFired",
        "message": "TTFT/p95: [9] of 10", "stable": {"backend": "old"}, "candidate": {"backend": "new"},
    }  # fmt: skip
    meta = {"name": name, "namespace": "demo"}
    return ReleaseRecord.model_validate({"metadata": meta, "spec": {**told, **spec}})


def backend(annotations: dict[str, str] | None = None) -> InferenceBackend:
    meta = {"name": "new", "namespace": "demo", "annotations": annotations or {}}
    return InferenceBackend.model_validate(
        {"metadata": meta, "spec": {"model": {"hostPath": {"path": "/m"}}}}
    )


@dataclass
class Played:
    """A cluster whose operator answers a request as soon as it is looked at again."""

    policy_: RoutePolicy = field(default_factory=policy)
    records_: list[ReleaseRecord] = field(default_factory=lambda: [record()])
    annotations: dict[str, str] = field(default_factory=dict)
    patches: list[Any] = field(default_factory=list)
    answer: Any = None
    namespace: str = "demo"

    def policy(self, name: str) -> RoutePolicy:
        if name != "assistant":
            raise ClusterError(f"RoutePolicy {name} is not in namespace demo; another one: -n NAMESPACE")
        asked = self.annotations.get("sluice.dev/evaluate")
        if self.answer and asked:
            self.policy_ = policy(
                rule(phase="Step", evaluation={"stage": f"OnDemand/{asked}", **self.answer})
            )
        return self.policy_

    def policies(self) -> list[RoutePolicy]:
        return [self.policy_]

    def records(self) -> list[ReleaseRecord]:
        return self.records_

    def record(self, name: str) -> ReleaseRecord:
        asked = self.annotations.get("sluice.dev/review", "").partition(" ")[2]
        if asked and self.answer:
            return record(name, reviews=[{"time": asked, **self.answer}])
        return next(one for one in self.records_ if one.metadata.name == name)

    def backend(self, name: str) -> InferenceBackend:
        asked = self.annotations.get("sluice.dev/calibrate")
        told = {"sluice.dev/calibrated": json.dumps({"request": asked, **self.answer})} if asked else {}
        return backend(told)

    def annotate(self, model: type, name: str, annotations: dict[str, str]) -> None:
        self.annotations |= annotations

    def patch_policy(self, name: str, patch: Any) -> None:
        self.patches.append(patch)

    def newest_event(self, kind: str, name: str, reason: str) -> str:
        return ""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    found = Played()
    for module in (app_module, asking, common, evaluate, reading):
        monkeypatch.setattr(module, "Cluster", lambda **_: found)
    return found


def sluice(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert "Traceback" not in done.output
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_teaches_within_80_columns(command: str) -> None:
    done = CliRunner().invoke(app, [*filter(None, [command]), "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "Usage" in done.output
    assert max(len(line) for line in done.output.splitlines()) <= 80


def test_the_overview_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert [command for command in COMMANDS if command not in shown] == []


def test_without_a_cluster_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    code, said = sluice("status")
    assert (code, "no usable kubeconfig" in said) == (1, True)


def test_an_approval_says_what_it_lets_in(played: Played) -> None:
    played.policy_ = policy(
        rule(
            phase="Step",
            held="AwaitingApproval",
            attempt="a1",
            stageSince="2026-03-01T11:00:00Z",
            candidate={"backend": "new"},
            stable={"backend": "old"},
        )
    )
    code, said = sluice("approve", "assistant")
    assert code == 0
    assert "You approve new against old: step 2 of 2, 50 % of requests" in said
    assert played.patches[0][-1]["value"] == {"attempt": "a1", "step": 1}


def test_an_approval_that_nobody_waits_for_changes_nothing(played: Played) -> None:
    code, said = sluice("approve", "assistant", "chat")
    assert (code, said) == (1, "error: rule chat waits for no approval; it is at Stable")
    assert played.patches == []


def test_an_exclusion(played: Played) -> None:
    code, said = sluice("exclude", "assistant", "--task", "nl2sql")
    assert code == 0
    assert "rollout.exclude is now [{'task': 'nl2sql'}]" in said
    assert sluice("exclude", "assistant")[0] == 1


def test_the_ledger_in_short_and_in_full(played: Played) -> None:
    code, said = sluice("ledger")
    assert code == 0
    assert "assistant-chat-a1 RolledBack" in said
    assert "assistant/chat: new against old GuardFired: TTFT/p95: [9] of 10" in said
    assert "review due" not in said
    played.records_ = [record(nextReview="2026-03-02T00:00:00Z")]
    assert "review due" in sluice("ledger")[1]
    assert "RolledBack" in sluice("ledger", "assistant-chat-a1")[1]
    assert "No release has been recorded" in sluice("ledger", "--policy", "another")[1]


def test_the_ledger_for_programs_and_for_reports(played: Played) -> None:
    done = CliRunner().invoke(app, ["ledger", "-o", "json"])
    (told,) = json.loads(done.output)
    assert (told["name"], told["outcome"], told["stable"]["backend"]) == (
        "assistant-chat-a1",
        "RolledBack",
        "old",
    )
    done = CliRunner().invoke(app, ["ledger", "assistant-chat-a1", "-o", "json"])
    assert json.loads(done.output)["attempt"] == "a1"
    done = CliRunner().invoke(app, ["ledger", "-o", "markdown"])
    assert done.output.startswith("# assistant / chat: new against old")
    assert sluice("ledger", "-o", "yaml")[0] == 2


def test_a_review_is_asked_for_and_waited_for(played: Played) -> None:
    code, said = sluice("review", "assistant-chat-a1")
    assert (code, "new is compared with old on copies of rule chat" in said) == (0, True)
    assert played.annotations["sluice.dev/review"].startswith("assistant-chat-a1 20")
    played.answer = {"outcome": "Limit", "message": "keep it from task nl2sql"}
    assert sluice("review", "assistant-chat-a1", "--wait")[1].endswith("Limit: keep it from task nl2sql")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"ended": "", "outcome": "Running"}, "is of an attempt that goes on: `sluice status` shows it"),
        ({"stable": {"backend": "new"}}, "are of one backend"),
        ({"rule": "gone"}, "RoutePolicy assistant has no rule gone any more"),
        ({"policy": "gone"}, "RoutePolicy gone is not in namespace demo"),
    ],
)
def test_a_review_that_makes_no_sense_is_not_asked_for(
    played: Played, spec: dict[str, Any], why: str
) -> None:
    played.records_ = [record(**spec)]
    code, said = sluice("review", "assistant-chat-a1")
    assert code == 1
    assert why in said
    assert played.annotations == {}


def test_an_evaluation_is_asked_for_and_waited_for(played: Played) -> None:
    played.policy_ = policy(rule(phase="Step"), evaluation={"suites": ["s"]})
    code, said = sluice("evaluate", "assistant")
    assert (code, "Suites s are asked of both arms of rule chat." in said) == (0, True)
    rate = {"task": "geo", "numSamples": 2, "numPassed": 1}
    played.policy_ = policy(rule(phase="Step"), evaluation={"suites": ["s"]})
    played.annotations.clear()
    played.answer = {"ended": "x", "candidate": [rate], "stable": [rate]}
    assert "geo 1/2 (stable 1/2)" in sluice("evaluate", "assistant", "--wait")[1]


def test_an_evaluation_that_nothing_would_come_of_is_not_asked_for(played: Played) -> None:
    assert "rule chat has no suites: add rollout.evaluation.suites" in sluice("evaluate", "assistant")[1]
    played.policy_ = policy(evaluation={"suites": ["s"]})
    assert "has no attempt under way (Stable): `sluice retry`" in sluice("evaluate", "assistant")[1]
    assert played.annotations == {}


def test_a_calibration_is_asked_for_and_waited_for(played: Played) -> None:
    played.answer = {"ok": True, "message": "one pod carries 6.75 requests/s"}
    code, said = sluice("calibrate", "new", "--policy", "assistant", "--output-tokens", "32", "--wait")
    assert (code, said.endswith("one pod carries 6.75 requests/s")) == (0, True)
    asked = json.loads(played.annotations["sluice.dev/calibrate"])
    assert {k: v for k, v in asked.items() if k != "at"} == {
        "policy": "assistant", "promptTokens": 256, "outputTokens": 32, "force": False,
    }  # fmt: skip
    played.answer = {"ok": False, "message": "new serves users"}
    assert sluice("calibrate", "new", "--policy", "assistant", "--wait") == (
        1,
        "Load on one pod of new rises; this takes minutes. error: new serves users",
    )
    assert sluice("calibrate", "new", "--policy", "none")[0] == 1
    assert sluice("calibrate", "new")[0] == 2


def test_nobody_waits_for_ever(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_REVIEW_S", -1.0)
    code, said = sluice("review", "assistant-chat-a1", "--wait")
    assert (code, "is the operator running?" in said) == (1, True)


@pytest.mark.parametrize("output", ["table", "json", "markdown"])
def test_a_record_of_another_policy_is_told_so(played: Played, output: str) -> None:
    code, told = sluice("ledger", "assistant-chat-a1", "--policy", "other", "-o", output)
    assert code == 1
    assert "assistant-chat-a1 is of RoutePolicy assistant, not of other" in told


def test_a_rollback_says_what_it_costs(played: Played) -> None:
    played.policy_ = policy(rule(phase="Step", weight=50, rollbackCost="old gets 10 requests/s more"))
    code, told = sluice("rollback", "assistant")
    assert code == 0
    assert "It costs: old gets 10 requests/s more" in told
    code, told = sluice("status")
    assert "a rollback would cost: old gets 10 requests/s more" in told


def test_history_of_a_rule_to_which_nothing_has_happened(played: Played) -> None:
    assert sluice("history", "assistant", "rest") == (0, "Nothing has happened yet.")
    code, told = sluice("history", "assistant", "none")
    assert (code, "has no rule none; it has chat, rest" in told) == (1, True)
