"""What the commands' edits are: each tests what it was decided on, and touches nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.api.routepolicy import Match
from sluice_operator.cli.edit import (
    EditError,
    abort_patch,
    approve_patch,
    awaited_step,
    exclude_patch,
    retry_patch,
    rule_with_rollout,
)
from unit.cli.test_render import policy, rule

SAME_RULE = {"op": "test", "path": "/spec/rules/0/name", "value": "chat"}


def test_the_only_rollout_is_found_and_others_are_explained() -> None:
    assert rule_with_rollout(policy(), "") == 0
    assert rule_with_rollout(policy(), "chat") == 0
    with pytest.raises(EditError, match="rule rest has no rollout"):
        rule_with_rollout(policy(), "rest")
    with pytest.raises(EditError, match="it has chat, rest"):
        rule_with_rollout(policy(), "none")


def test_an_abort_hits_the_rule_that_was_meant_or_nothing() -> None:
    set_ = {"op": "add", "path": "/spec/rules/0/rollout/abort", "value": True}
    assert abort_patch(policy(), 0) == [SAME_RULE, set_]


def test_a_retry_is_another_attempt_and_no_abort() -> None:
    aborted = policy(rule(phase="Aborted"), abort=True, attempt=3)
    assert [(o["path"], o["value"]) for o in retry_patch(aborted, 0)[1:]] == [
        ("/spec/rules/0/rollout/attempt", 4),
        ("/spec/rules/0/rollout/abort", False),
    ]
    for phase in ("Evaluating", "Shadowing", "Step", "Watching"):
        with pytest.raises(EditError, match=f"under way \\({phase}\\)"):
            retry_patch(policy(rule(phase=phase)), 0)


@pytest.mark.parametrize(
    ("status", "step"),
    [
        ({"phase": "Shadowing", "stageSince": "2026-03-01T11:00:00Z"}, 0),
        ({"phase": "Evaluating"}, 0),
        ({"phase": "Step", "step": 0}, 0),
        ({"phase": "Step", "step": 0, "stageSince": "2026-03-01T11:00:00Z"}, 1),
        ({"phase": "Step", "step": 1, "stageSince": "2026-03-01T11:00:00Z"}, 2),
        ({"phase": "Watching", "step": 1}, 2),
    ],
)
def test_the_step_that_waits(status: dict[str, Any], step: int) -> None:
    """A stage that has not begun waits for itself, else the next one does; after the last, the promotion."""
    waiting = policy(rule(held="AwaitingApproval", attempt="a1", **status))
    assert awaited_step(waiting, 0) == step
    assert approve_patch(waiting, 0) == [
        SAME_RULE,
        {"op": "test", "path": "/status/rules/0/attempt", "value": "a1"},
        {"op": "add", "path": "/spec/rules/0/rollout/approval", "value": {"attempt": "a1", "step": step}},
    ]


def test_what_does_not_wait_is_not_approved() -> None:
    with pytest.raises(EditError, match=r"waits for no approval; it is at Step \(NoEvidence\)"):
        approve_patch(policy(rule(phase="Step", held="NoEvidence")), 0)
    with pytest.raises(EditError, match=r"it is at Stable$"):
        approve_patch(policy(), 0)


def test_the_attempt_is_tested_where_it_stands_in_the_status() -> None:
    waiting = rule(phase="Step", held="AwaitingApproval", attempt="a1")
    waiting["rules"].insert(0, {"name": "rest"})
    assert approve_patch(policy(waiting), 0)[1]["path"] == "/status/rules/1/attempt"


def test_an_exclusion_is_added_to_what_is_there() -> None:
    path = "/spec/rules/0/rollout/exclude"
    assert exclude_patch(policy(), 0, "nl2sql", "") == [
        SAME_RULE,
        {"op": "add", "path": path, "value": [{"task": "nl2sql"}]},
    ]
    known = [{"task": "nl2sql"}]
    assert exclude_patch(policy(exclude=known), 0, "nl2sql", "shop") == [
        SAME_RULE,
        {"op": "test", "path": path, "value": known},
        {"op": "add", "path": path, "value": [*known, {"task": "nl2sql", "tenant": "shop"}]},
    ]
    with pytest.raises(EditError, match="excludes task nl2sql already"):
        exclude_patch(policy(exclude=known), 0, "nl2sql", "")
    with pytest.raises(EditError, match="--task, --tenant, or both"):
        exclude_patch(policy(), 0, "", "")


@pytest.mark.parametrize(("task", "tenant"), [("合同审核", ""), ("", "Bank_1"), ("x" * 64, ""), ("a b", "c")])
def test_what_can_be_no_name_is_not_excluded(task: str, tenant: str) -> None:
    with pytest.raises(EditError, match="no task is named so" if task else "no tenant is named so"):
        exclude_patch(policy(), 0, task, tenant)


def test_a_misspelt_exclusion_is_not_told_as_done() -> None:
    """The operator would refuse the whole edit."""
    found = policy()
    rule_ = found.spec.rules[0].model_copy(update={"match": Match(tasks=["nl2sql"], tenants=["shop"])})
    found = found.model_copy(update={"spec": found.spec.model_copy(update={"rules": [rule_]})})
    assert exclude_patch(found, 0, "nl2sql", "shop")
    with pytest.raises(EditError, match=r"requests of task nl2sql, and none of nl2sq$"):
        exclude_patch(found, 0, "nl2sq", "")
    with pytest.raises(EditError, match=r"requests of tenant shop, and none of bank$"):
        exclude_patch(found, 0, "", "bank")


def test_a_retry_takes_nothing_that_is_promoted_out_of_service() -> None:
    with pytest.raises(EditError, match="has promoted its candidate"):
        retry_patch(policy(rule(phase="Promoted")), 0)
    assert retry_patch(policy(rule(phase="Promoted"), abort=True), 0)
