"""Hard gates: at once, and no weapon."""

from __future__ import annotations

import pytest

from sluice_operator.api.routepolicy import Check, Contract, Severity, Verifier
from sluice_operator.gates import GateState, align, verdict
from unit.gates.test_gate import seen
from unit.gates.traffic import at, gate, rule, status

CONTRACT = Contract(
    checks=[
        Check(name="json", json_schema={"type": "object"}),
        Check(name="polite", must_match="please"),
        Check(name="no-secret", must_not_match="secret", leak=True),
        Check(name="facts", verifier=Verifier(url="http://facts/v1")),
        Check(name="watched", must_match="x", severity=Severity.WATCH),
    ]
)


def live() -> GateState:
    return gate(contract=CONTRACT)


def shadow() -> GateState:
    return gate(weight=0, shadow_percent=100, contract=CONTRACT)


@pytest.mark.parametrize("check", ["json", "polite", "no-secret", "facts", "sluice/leak"])
def test_one_violation_is_enough(check: str) -> None:
    state = live()
    state.take(seen(10, hard_violations=(check,)))
    assert verdict(state, at(10)).reason == "HardGateBroken"
    assert check in verdict(state, at(10)).message


def test_an_early_record_of_a_running_stream_counts() -> None:
    state = live()
    state.take(seen(10, hard_violations=("json",), censored=True))
    assert verdict(state, at(10)).reason == "HardGateBroken"


def test_a_violation_counts_even_if_it_began_before_the_evidence() -> None:
    state = live()
    state.take(seen(10, age_s=60.0, hard_violations=("json",)))
    assert verdict(state, at(10)).reason == "HardGateBroken"


@pytest.mark.parametrize("check", ["json", "polite"])
@pytest.mark.parametrize("cut", ["truncated", "cancelled"])
def test_an_answer_cut_off_has_not_broken_its_form(check: str, cut: str) -> None:
    state = live()
    state.take(seen(10, hard_violations=(check,), **{cut: True}))
    assert verdict(state, at(60)).reason == ""


def test_a_forbidden_pattern_in_an_answer_cut_off_was_said_all_the_same() -> None:
    state = live()
    state.take(seen(10, hard_violations=("no-secret",), truncated=True))
    assert verdict(state, at(10)).reason == "HardGateBroken"


def test_stables_own_violations_never_count() -> None:
    state = live()
    state.take(seen(10, candidate=False, hard_violations=("json", "sluice/leak")))
    assert verdict(state, at(60)).reason == ""


@pytest.mark.parametrize("check", ["no-secret", "facts"])
def test_what_a_prompt_provokes_from_stable_too_is_no_weapon(check: str) -> None:
    state = live()
    state.take(seen(10, candidate=False, tenant="mallory", hard_violations=(check,)))
    state.take(seen(11, tenant="mallory", hard_violations=(check,)))
    assert verdict(state, at(60)).reason == ""
    state.take(seen(12, tenant="alice", hard_violations=(check,)))
    assert verdict(state, at(60)).reason == "HardGateBroken"


def test_an_excuse_expires() -> None:
    state = live()
    state.take(seen(10, candidate=False, tenant="t", hard_violations=("no-secret",)))
    state.take(seen(4000, tenant="t", hard_violations=("no-secret",)))
    assert verdict(state, at(4000)).reason == "HardGateBroken"


@pytest.mark.parametrize(("stable_too", "reason"), [(True, ""), (False, "HardGateBroken")])
def test_a_mirrored_pattern_waits_for_stables_answer(stable_too: bool, reason: str) -> None:
    state = shadow()
    state.take(seen(10, request_id="r", mirror=True, hard_violations=("no-secret",)))
    assert verdict(state, at(10)).reason == ""
    shown = ("no-secret",) if stable_too else ()
    state.take(seen(11, candidate=False, request_id="r", hard_violations=shown))
    assert verdict(state, at(60)).reason == reason


def test_the_wait_for_stable_ends() -> None:
    state = shadow()
    state.take(seen(10, request_id="r", mirror=True, hard_violations=("no-secret",)))
    assert verdict(state, at(19)).reason == ""
    assert verdict(state, at(21)).reason == "HardGateBroken"


def test_stable_answered_first() -> None:
    state = shadow()
    state.take(seen(10, candidate=False, request_id="r"))
    state.take(seen(11, request_id="r", mirror=True, hard_violations=("no-secret",)))
    assert verdict(state, at(11)).reason == "HardGateBroken"


@pytest.mark.parametrize("check", ["watched", "edited-away"])
def test_checks_that_are_not_hard_in_the_contract_do_not_count(check: str) -> None:
    state = live()
    state.take(seen(10, hard_violations=(check,)))
    assert verdict(state, at(60)).reason == ""


def test_a_violation_outlives_a_restart_of_evidence() -> None:
    state = live()
    state.take(seen(10, hard_violations=("json",)))
    state = align(state, rule(contract=CONTRACT), status(num_restarts=1), at(11))
    assert verdict(state, at(11)).reason == "HardGateBroken"


def test_a_leak_is_told_as_one_also_after_another_violation() -> None:
    state = live()
    state.take(seen(10, request_id="r1", hard_violations=("json", "polite")))
    said = verdict(state, at(10))
    assert (said.reason, said.leak) == ("HardGateBroken", False)
    assert "check json" in said.message, "the first"
    state.take(seen(11, request_id="r2", hard_violations=("no-secret",)))
    said = verdict(state, at(11))
    assert (said.reason, said.leak) == ("HardGateBroken", True)
    assert "check no-secret failed in request r2" in said.message


def test_what_stable_lets_out_too_is_no_leak_of_the_candidate() -> None:
    state = live()
    state.take(seen(9, candidate=False, hard_violations=("no-secret",)))
    state.take(seen(10, hard_violations=("no-secret",)))
    assert verdict(state, at(10)).reason == ""
