"""What a refused spec takes from candidates is in force; nothing else of it is."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.api.rollout import CandidateArm, Exclusion, Rollout
from sluice_operator.api.routepolicy import Refusal, RoutePolicySpec, Rule, Target
from sluice_operator.plan.withdrawn import withdrawn
from unit.plan.rollout_world import rollout, rule, steps

QA, BANK = Exclusion(task="qa"), Exclusion(tenant="bank")


def spec(*rules: Rule) -> RoutePolicySpec:
    return RoutePolicySpec(model="m", rules=list(rules))


def taken(change: Rollout | None, **more: Any) -> tuple[Rule, tuple[str, ...]]:
    """Of a rule with a rollout that excludes tenant `bank`."""
    found, told = withdrawn(spec(rule(rollout(exclude=[BANK]))), spec(rule(change, **more)))
    return found.rules[0], told


@pytest.mark.parametrize("flag", ["abort", "paused"])
def test_abort_and_pause(flag: str) -> None:
    after, told = taken(rollout(exclude=[BANK], candidate=CandidateArm(backend="none"), **{flag: True}))
    assert told == (f"{flag} of rule all",)
    assert after == rule(rollout(exclude=[BANK], **{flag: True})), "and nothing else of it"


def test_exclusions_are_added_and_none_is_withdrawn() -> None:
    after, told = taken(rollout(exclude=[QA]))
    assert told == ("exclude of rule all",)
    assert after.rollout is not None
    assert after.rollout.exclude == [BANK, QA]


def test_a_removed_rollout_where_the_target_stays() -> None:
    assert taken(None) == (rule(None), ("the removed rollout of rule all",))
    before = rule(rollout(exclude=[BANK]))
    assert taken(None, target=Target(backend="new")) == (before, ()), "it may be a handover"


def test_a_refusal_for_everybody() -> None:
    closed = Target(refusal=Refusal(message="closed"))
    after, told = taken(rollout(), target=closed)
    assert (after.target, after.rollout, told) == (closed, None, ("the refusal of rule all",))


def test_what_would_give_a_candidate_more_is_not_in_force() -> None:
    more = rollout(steps=steps(90), attempt=2, candidate=CandidateArm(backend="newer"), alpha="0.4")
    assert taken(more) == (rule(rollout(exclude=[BANK])), ())


def test_rules_are_told_apart_by_name() -> None:
    accepted = spec(rule(rollout()), Rule(name="rest", target=Target(backend="old")))
    refused = spec(Rule(name="first", target=Target(backend="none")), rule(rollout(abort=True)))
    found, told = withdrawn(accepted, refused)
    assert told == ("abort of rule all",)
    assert [one.name for one in found.rules] == ["all", "rest"]
    assert withdrawn(accepted, spec(Rule(name="other", target=Target(backend="old")))) == (accepted, ())
