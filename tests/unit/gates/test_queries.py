"""PromQL guards: in a row, and no value is neither good nor bad."""

from __future__ import annotations

import math

import pytest

from sluice_operator.api.guards import Query
from sluice_operator.api.rollout import CandidateArm, Rollout, Step
from sluice_operator.api.routepolicy import Rule, Target
from sluice_operator.gates import GateState, align, checkpoint, take_query, verdict
from unit.gates.traffic import START, at, status


def state(**query: object) -> GateState:
    found = Query.model_validate({"name": "q", "query": "up", "max": "0.5", **query})
    rollout = Rollout(candidate=CandidateArm(backend="new"), steps=[Step(weight=10)], queries=[found])
    return align(None, Rule(name="all", target=Target(backend="old"), rollout=rollout), status(), START)


def give(gate: GateState, *values: float | None, stable: float | None = None) -> str:
    for second, value in enumerate(values):
        take_query(gate, "q", value, stable, at(second), "" if value is not None else "no series")
    return verdict(gate, at(60)).reason


def test_three_in_a_row_fire() -> None:
    assert give(state(), 0.6, 0.6) == ""
    assert give(state(), 0.6, 0.6, 0.6) == "QueryFired"
    assert give(state(), 0.6, 0.6, 0.4, 0.6) == ""


def test_no_value_is_neither_good_nor_bad() -> None:
    gate = state()
    assert give(gate, 0.6, 0.6, None, math.nan) == ""
    assert checkpoint(gate, status()).queries[0].error
    assert give(gate, 0.6) == "QueryFired"
    assert checkpoint(gate, status()).queries[0].error == ""


def test_hard_fires_at_the_first_and_watch_never() -> None:
    assert give(state(mode="Hard"), 0.6) == "QueryFired"
    assert give(state(mode="Watch"), *[0.6] * 20) == ""


def test_compared_with_stable() -> None:
    compared = {"max": None, "query": "x{arm='$arm'}", "maxIncreasePercent": 20}
    assert give(state(**compared), 1.1, 1.1, 1.1, stable=1.0) == ""
    assert give(state(**compared), 1.3, 1.3, 1.3, stable=1.0) == "QueryFired"
    assert give(state(**compared), 1.3, 1.3, 1.3, stable=None) == ""


def test_a_restart_keeps_the_count() -> None:
    gate = state()
    give(gate, 0.6, 0.6)
    saved = checkpoint(gate, status())
    other = align(None, gate.rule, saved, at(10))
    assert give(other, 0.6) == "QueryFired"
    assert "0.6" in verdict(other, at(20)).message


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match=r"rollout\.queries"):
        take_query(state(), "other", 1.0, None, START)
