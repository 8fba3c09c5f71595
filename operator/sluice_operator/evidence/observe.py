"""One line of a pod's stream, or one access record, as an observation for the gates.

The rule of the join: times and verdicts come from the pods' records, for both arms alike; the gateway adds
the failures that no pod lives to report. The gates merge both by request id. Invariant: a client's own
fault (4xx, leaving) is never a failure of an arm, except a pod's full queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..gates import ArmName, Observation
from ..xds.state import AccessRecord

_QUEUE_FULL = 429


@dataclass(frozen=True, slots=True)
class Observed:
    """An observation and the rule that it belongs to."""

    policy: str
    rule: str
    observation: Observation


def _arm(name: str) -> ArmName | None:
    return ArmName(name) if name in ("stable", "candidate") else None


def from_record(record: Mapping[str, Any], now: float) -> Observed | None:
    """A pod's record of a request that has ended, or of a hard violation in one that goes on."""
    arm = _arm(record["arm"])
    failed = record["outcome"] == "error" or (
        record["outcome"] == "rejected" and record["status"] == _QUEUE_FULL
    )
    if arm is None or not record["rule"] or (record["outcome"] == "rejected" and not failed):
        return None
    timing = record["timing"]
    observation = Observation(
        time=now,
        request_id=record["request_id"],
        arm=arm,
        age_s=timing["total_s"],
        attempt=record["attempt"],
        unit=record["unit"],
        tenant=record["tenant"],
        task=record["task"],
        mirror=record["mirror"],
        ttft_s=timing["ttft_s"],
        tpot_s=timing["tpot_s"],
        total_s=timing["total_s"] if record["final"] else None,
        failed=failed,
        cancelled=record["outcome"] == "cancelled",
        truncated=record["outcome"] == "truncated",
        censored=not record["final"],
        first_token=timing["ttft_s"] is not None,
        hard_violations=tuple(v["check"] for v in record["verdicts"] if v["hard"] and not v["ok"]),
    )
    return Observed(record["policy"], record["rule"], observation)


def from_running(entry: Mapping[str, Any], now: float) -> Observed | None:
    """A request that still runs, from a heartbeat."""
    arm = _arm(entry["arm"])
    if arm is None or not entry["rule"]:
        return None
    observation = Observation(
        time=now,
        request_id=entry["request_id"],
        arm=arm,
        age_s=entry["age_s"],
        attempt=entry["attempt"],
        unit=entry["unit"],
        tenant=entry["tenant"],
        task=entry["task"],
        mirror=entry["mirror"],
        censored=True,
        first_token=entry["first_token"],
    )
    return Observed(entry["policy"], entry["rule"], observation)


def from_access(record: AccessRecord, now: float) -> Observed | None:
    """A failure that the gateway saw; what went well is told by the pod."""
    arm = _arm(record.arm)
    full = record.kind == "attempt" and record.status == _QUEUE_FULL
    if arm is None or not record.rule or not record.final or not (record.outcome == "error" or full):
        return None
    age = record.total_s if record.total_s is not None else max(0.0, now - record.start)
    observation = Observation(
        time=now,
        request_id=record.request_id,
        arm=arm,
        age_s=age,
        attempt=record.attempt,
        unit=record.unit,
        tenant=record.tenant,
        task=record.task,
        mirror=record.mirror,
        failed=True,
    )
    return Observed(record.policy, record.rule, observation)
