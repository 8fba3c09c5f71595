"""Skeleton; the implementation follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ..api.routepolicy import Rule, RuleStatus
from .observation import Observation


class GateState:
    """Evidence of one rule in memory. Mutable and owned by one caller; only `fold` and `align` change it."""


@dataclass(frozen=True)
class Verdict:
    """What the evidence says."""

    reason: str
    """Empty: nothing fired. Else HardGateBroken or GuardFired."""
    message: str


def align(gate: GateState | None, rule: Rule, status: RuleStatus, now: datetime) -> GateState:
    """The gate that belongs to `status`: the same one where it still fits, else one rebuilt from the checkpoint in it."""
    raise NotImplementedError


def fold(gate: GateState, observations: Iterable[Observation]) -> GateState:
    """Takes observations in, in order of arrival. Returns the same gate."""
    raise NotImplementedError


def verdict(gate: GateState, now: datetime) -> Verdict:
    """What the evidence says now. Changes nothing."""
    raise NotImplementedError


def checkpoint(gate: GateState, status: RuleStatus) -> RuleStatus:
    """`status` with the gate's evidence in it, if the gate belongs to it; else `status` unchanged."""
    raise NotImplementedError
