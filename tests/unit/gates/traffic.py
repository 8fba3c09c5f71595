"""Simulated traffic for the gates: log-normal latencies, random assignment, several kinds of trouble.

Everything follows from a seed. Times are Unix seconds from `START`; observations come in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from sluice_operator.api.guards import Guard, default_guards
from sluice_operator.api.rollout import CandidateArm, Rollout, Step
from sluice_operator.api.routepolicy import Contract, Rule, Target
from sluice_operator.api.rulestatus import ArmStatus, Phase, RuleStatus
from sluice_operator.gates import ArmName, GateState, Observation, align

START = datetime(2026, 1, 1, tzinfo=UTC)
Array = NDArray[np.float64]
MAX_BEATS = 15
"""Seconds for which a running request is told of; by then it is past any limit here."""


def rule(guards: list[Guard] | None = None, contract: Contract | None = None) -> Rule:
    """A rule whose rollout has the default guards."""
    guards = default_guards() if guards is None else guards
    rollout = Rollout(
        candidate=CandidateArm(backend="new"),
        steps=[Step(weight=10), Step(weight=25), Step(weight=50)],
        guards=guards,
    )
    return Rule(name="all", target=Target(backend="old"), rollout=rollout, contract=contract or Contract())


def status(weight: int = 10, shadow_percent: int = 0, num_restarts: int = 0) -> RuleStatus:
    """A stage under way."""
    return RuleStatus(
        name="all",
        phase=Phase.SHADOWING if shadow_percent else Phase.STEP,
        weight=weight,
        shadow_percent=shadow_percent,
        attempt="a",
        gates="g",
        num_restarts=num_restarts,
        stable=ArmStatus(backend="old", identity="sha256:old"),
        candidate=ArmStatus(backend="new", identity="sha256:new"),
    )


def gate(
    weight: int = 10,
    shadow_percent: int = 0,
    guards: list[Guard] | None = None,
    contract: Contract | None = None,
    num_restarts: int = 0,
) -> GateState:
    """A gate in a stage that has just begun, at `START`."""
    return align(None, rule(guards, contract), status(weight, shadow_percent, num_restarts), START)


def at(seconds: float) -> datetime:
    """`seconds` after the start."""
    return START + timedelta(seconds=seconds)


@dataclass(frozen=True)
class Traffic:
    """What comes in and how the arms behave."""

    seconds: float = 180.0
    rate: float = 20.0
    weight: int = 10
    shadow_percent: int = 0
    sigma: float = 0.6
    slow: float = 1.0
    """Factor on the candidate's latencies."""
    slow_fraction: float = 1.0
    """Part of the candidate's requests that it applies to."""
    slow_from: float = 0.0
    """Seconds after the start."""
    errors_stable: float = 0.0
    errors_candidate: float = 0.0
    requests_per_unit: float = 1.0
    weather: Callable[[np.random.Generator, Array], Array] | None = None
    """Factor on both arms' latencies by time of arrival."""
    tasks: tuple[str, ...] = ("chat",)
    tenants: tuple[str, ...] = ("t",)
    slow_tasks: tuple[str, ...] = ()
    """Only at these does the candidate regress; empty: at all."""
    slow_tenants: tuple[str, ...] = ()
    hiccup_factor: float = 3.0
    hiccups: float = 0.0
    """Short stalls of the candidate alone, 2 s with latencies x 3, a minute."""


def bursts(rng: np.random.Generator, times: Array) -> Array:
    """Load that comes and goes: exp of an AR(1) series, by the second."""
    num = int(times[-1]) + 2 if len(times) else 1
    level = np.zeros(num)
    for second in range(1, num):
        level[second] = 0.95 * level[second - 1] + rng.normal(0.0, 0.25)
    factors: Array = np.exp(level[times.astype(int)])
    return factors


def stalls(rng: np.random.Generator, times: Array) -> Array:
    """About twice a minute both arms stand still for 3 s: everyone in it waits for its end and more."""
    factors = np.ones_like(times)
    for begin in rng.uniform(0.0, times[-1], size=max(1, int(times[-1] / 30.0))):
        factors[(times >= begin) & (times < begin + 3.0)] = 8.0
    return factors


def observations(traffic: Traffic, seed: int) -> list[Observation]:
    """The evidence, in order of arrival at the operator."""
    rng = np.random.default_rng(seed)
    num = rng.poisson(traffic.rate * traffic.seconds)
    times = np.sort(rng.uniform(0.0, traffic.seconds, num))
    factors = traffic.weather(rng, times) if traffic.weather is not None else np.ones(num)
    num_units = max(1, int(num / traffic.requests_per_unit))
    units = np.arange(num) if traffic.requests_per_unit <= 1.0 else rng.integers(0, num_units, num)
    live = rng.random(max(num, num_units)) < traffic.weight / 100.0
    mirrored = rng.random(num) < traffic.shadow_percent / 100.0
    shared = np.exp(rng.normal(0.0, traffic.sigma * 0.7, num)) * factors  # what the request itself costs
    stalled = _candidate_stalls(rng, traffic, times)
    task, tenant = rng.integers(0, len(traffic.tasks), num), rng.integers(0, len(traffic.tenants), num)
    beat = rng.random(num)
    seen: list[Observation] = []
    for index in range(num):
        candidate = bool(live[units[index]])
        told = traffic.tasks[task[index]], traffic.tenants[tenant[index]]
        hit = _hit(traffic, *told)
        arms = [(candidate, False)] if not mirrored[index] else [(False, False), (True, True)]
        for is_candidate, mirror in arms:
            worse = 1.0
            if is_candidate:
                regressed = times[index] >= traffic.slow_from and rng.random() < traffic.slow_fraction
                worse = (traffic.slow if regressed and hit else 1.0) * stalled[index]
            noise = np.exp(rng.normal(0.0, traffic.sigma * 0.714, 3)) * worse
            ttft, tpot = 0.2 * float(shared[index] * noise[0]), 0.02 * float(shared[index] * noise[1])
            broken = is_candidate and hit and times[index] >= traffic.slow_from
            error_rate = traffic.errors_candidate if broken else traffic.errors_stable
            failed = bool(rng.random() < error_rate)
            total = ttft if failed else ttft + 20 * tpot
            begin = START.timestamp() + float(times[index])
            common = {
                "request_id": f"r{index}",
                "attempt": "a",
                "unit": f"u{int(units[index])}",
                "mirror": mirror,
                "task": told[0],
                "tenant": told[1],
                "arm": ArmName.CANDIDATE if is_candidate else ArmName.STABLE,
            }
            first_beat = float(beat[index])
            for nth in range(min(MAX_BEATS, int(np.ceil(max(0.0, total - first_beat))))):
                age = first_beat + nth
                seen.append(
                    Observation(
                        time=begin + age,
                        age_s=age,
                        censored=True,
                        first_token=age >= ttft,
                        **common,
                    )
                )
            seen.append(
                Observation(
                    time=begin + total,
                    age_s=total,
                    failed=failed,
                    **common,
                    ttft_s=None if failed else ttft,
                    tpot_s=None if failed else tpot,
                    total_s=total,
                    jitter_s=None if failed else 0.01 * float(shared[index] * noise[2]),
                    cost=total / 1000.0,
                )
            )
    return sorted(seen, key=lambda one: one.time)


def _hit(traffic: Traffic, task: str, tenant: str) -> bool:
    return task in (traffic.slow_tasks or traffic.tasks) and tenant in (
        traffic.slow_tenants or traffic.tenants
    )


def _candidate_stalls(rng: np.random.Generator, traffic: Traffic, times: Array) -> Array:
    factors = np.ones_like(times)
    num = rng.poisson(traffic.hiccups * traffic.seconds / 60.0)
    for begin in rng.uniform(0.0, traffic.seconds, size=num):
        factors[(times >= begin) & (times < begin + 2.0)] = traffic.hiccup_factor
    return factors


def until_fired(state: GateState, seen: list[Observation], bad_from: float = 0.0) -> int | None:
    """Candidate requests that began after `bad_from` and were told of when the guards fired; None: they did
    not."""
    state.take_all(seen)
    if state.fired_time is None:
        return None
    begin = START.timestamp() + bad_from
    told = {
        one.request_id
        for one in seen
        if one.time <= state.fired_time and one.arm is ArmName.CANDIDATE and one.time - one.age_s >= begin
    }
    return len(told)


def warm(state: GateState) -> GateState:
    """The gate with stable's windows filled, as they are when an attempt begins with traffic already
    there."""
    rng = np.random.default_rng(7)
    shared = np.exp(rng.normal(0.0, 0.6, (500, 2)))
    seen = []
    for index, (ttft, tpot) in enumerate(shared):
        total = 0.2 * float(ttft) + 0.4 * float(tpot)
        seen.append(
            Observation(
                time=START.timestamp() - 250.0 + index / 2,
                request_id=f"w{index}",
                age_s=total,
                task="chat",
                arm=ArmName.STABLE,
                ttft_s=0.2 * float(ttft),
                tpot_s=0.02 * float(tpot),
                total_s=total,
            )
        )
    state.take_all(seen)
    return state


def seeds(num: int) -> Iterator[int]:
    """The same ones each time."""
    return iter(range(1000, 1000 + num))
