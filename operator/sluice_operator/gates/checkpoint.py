"""Evidence as the status keeps it, and back.

Invariant: what a checkpoint can't hold is lost evidence, never gained. Of the rule all tests with events are
kept; of each slice the `MAX_KEPT` with the most evidence. The others come back with nothing in play and only
the capital that had not been bet, which is less than they had.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ..api.rulestatus import GainStatus, GuardStatus, RuleStatus, SliceStatus
from .bank import MAX_WEALTH
from .battery import Kind
from .evidence import Evidence
from .sequential import NUM_ALTERNATIVES, waiting
from .slices import NUM_SLOTS, RULE

MAX_KEPT = 4
JUMP = "/jump"
"""Suffix of a guard's name for its clusters; their numbers are `Jump.saved`."""
_LEAST = -700.0


def guards_of(evidence: Evidence) -> list[GuardStatus]:
    """Of the rule as a whole: all tests that have seen something."""
    tests = evidence.battery.tests
    found = [
        _guard(evidence, RULE, index)
        for index, test in enumerate(tests)
        if test.kind is not Kind.GAIN and evidence.touched(RULE, index)
    ]
    found += [
        GuardStatus.model_construct(
            name=f"{tests[index].name}{JUMP}",
            log_wealth=jump.saved(),
            num_bad_stable=0,
            num_bad_candidate=0,
        )
        for index, jump in evidence.jumps.items()
        if jump.touched
    ]
    return found


def slices_of(evidence: Evidence) -> list[SliceStatus]:
    """Of the slices, in order of appearance, each with its strongest tests."""
    bank, tests = evidence.bank, evidence.battery.tests
    strength = bank.e_values().reshape(NUM_SLOTS, bank.num_tests)
    guards = np.array([test.kind is not Kind.GAIN for test in tests], bool)
    found = []
    for slot, task, tenant in evidence.slices.order():
        strong = np.flatnonzero((strength[slot] > 1.0) & guards)
        strong = strong[np.argsort(-strength[slot][strong], kind="stable")][:MAX_KEPT]
        kept = [_guard(evidence, slot, int(index)) for index in np.sort(strong)]
        found.append(
            SliceStatus.model_construct(
                task=task,
                tenant=tenant,
                num_samples=int(evidence.samples[slot, 1]),
                guards=kept,
            )
        )
    return found


def gains_of(evidence: Evidence, shown: frozenset[str]) -> list[GainStatus]:
    """Of the expected gains."""
    found = []
    for index, test in enumerate(evidence.battery.tests):
        if test.kind is Kind.GAIN:
            bad = evidence.bad(RULE, index)
            found.append(
                GainStatus.model_construct(
                    name=test.name,
                    log_wealth=_logs(evidence, RULE, index),
                    num_bad_stable=bad[0],
                    num_bad_candidate=bad[1],
                    shown=test.name in shown,
                )
            )
    return found


def restore(evidence: Evidence, status: RuleStatus, elapsed: float) -> None:
    """Puts a checkpoint back. `elapsed`: seconds since the evidence in it began."""
    index = {test.name: at for at, test in enumerate(evidence.battery.tests) if test.kind is not Kind.GAIN}
    gains = {test.name: at for at, test in enumerate(evidence.battery.tests) if test.kind is Kind.GAIN}
    _put(evidence, RULE, index, status.guards)
    _put(evidence, RULE, gains, status.gains)
    clusters = {f"{evidence.battery.tests[at].name}{JUMP}": jump for at, jump in evidence.jumps.items()}
    for jump in clusters.values():
        jump.num_known = status.num_restarts  # if they were lost, no more is left than so many restarts left
    for one in status.guards:
        if one.name in clusters:
            clusters[one.name].restore(one.log_wealth)
    bank = evidence.bank
    slots = {(task, tenant): slot for slot, task, tenant in evidence.slices.order()}
    for part in status.slices:
        slot = slots.get((part.task, part.tenant))
        if slot is None:
            continue
        evidence.samples[slot, 1] = evidence.ended[slot, 1] = part.num_samples
        here = slice(slot * bank.num_tests, (slot + 1) * bank.num_tests)
        bank.wealth[here] = 0.0
        many = np.full(bank.num_tests, np.inf)  # as if all had joined that events can make join
        bank.unbet[here] = waiting(many, np.full(bank.num_tests, elapsed), bank.hazard[here])
        _put(evidence, slot, index, part.guards)
    bank.refresh()


def _put(
    evidence: Evidence, slot: int, index: dict[str, int], saved: Iterable[GuardStatus | GainStatus]
) -> None:
    bank = evidence.bank
    for one in saved:
        test = index.get(one.name)
        if test is None or len(one.log_wealth) != NUM_ALTERNATIVES + 1:
            continue
        process = slot * bank.num_tests + test
        values = np.minimum(np.exp([float(text) for text in one.log_wealth]), MAX_WEALTH)
        bank.wealth[process], bank.unbet[process] = values[:-1], values[-1]
        evidence.set_bad(slot, test, one.num_bad_stable, one.num_bad_candidate)


def _guard(evidence: Evidence, slot: int, test: int) -> GuardStatus:
    bad = evidence.bad(slot, test)
    return GuardStatus.model_construct(
        name=evidence.battery.tests[test].name,
        log_wealth=_logs(evidence, slot, test),
        num_bad_stable=bad[0],
        num_bad_candidate=bad[1],
    )


def _logs(evidence: Evidence, slot: int, test: int) -> list[str]:
    process = slot * evidence.bank.num_tests + test
    values = [*evidence.bank.wealth[process].tolist(), float(evidence.bank.unbet[process])]
    return [f"{math.log(value) if value > 1e-300 else _LEAST:.9g}" for value in values]
