"""One line of a pod's stream, or one access record, as an observation for the gates.

The rule of the join: times and verdicts come from the pods' records, for both arms alike; the gateway adds
the failures that no pod lives to report, and retries, which a pod can't know of. The gates merge both by
request id. Invariant: a client's own fault (4xx, leaving, a tenant's own cap) is never a failure of an arm,
except a pod's full queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..gates import ArmName, Observation
from ..xds.state import AccessRecord
from .answer_id import Answer

_QUEUE_FULL = 429


@dataclass(frozen=True, slots=True)
class Observed:
    """An observation and the rule that it belongs to."""

    policy: str
    rule: str
    observation: Observation


def _arm(name: str) -> ArmName | None:
    return ArmName(name) if name in ("stable", "candidate") else None


def from_record(
    record: Mapping[str, Any], now: float, price_per_hour: float | None = None
) -> Observed | None:
    """A pod's record of a request that has ended, or of a hard violation in one that goes on.

    ``price_per_hour``: of the pod that wrote it; None: its backend names none.
    """
    arm = _arm(record["arm"])
    failed = record["outcome"] == "error" or (
        record["outcome"] == "rejected" and record["status"] == _QUEUE_FULL
    )
    if arm is None or not record["rule"] or (record["outcome"] in ("rejected", "limited") and not failed):
        return None
    timing, tokens, flags = record["timing"], record["tokens"], record["flags"]
    busy, begun = timing["busy_s"], timing["ttft_s"] is not None
    broken = [v for v in record["verdicts"] if not v["ok"]]
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
        verified_s=timing["verified_s"],
        tpot_s=timing["tpot_s"],
        jitter_s=timing["jitter_s"],
        total_s=timing["total_s"] if record["final"] else None,
        busy_s=busy,
        cost=None if busy is None or price_per_hour is None else busy * price_per_hour / 3600,
        prompt_tokens=tokens["prompt"],
        cached_tokens=tokens["cached"],
        output_tokens=tokens["output"],
        guessed_tokens=tokens["guessed"],
        accepted_tokens=tokens["accepted"],
        failed=failed,
        cancelled=record["outcome"] == "cancelled",
        truncated=record["outcome"] == "truncated",
        refused=flags["refused"],
        repeated=flags["repeated"],
        # A form that its length cap cut off is not a broken one.
        schema_failed=record["outcome"] != "truncated" and any(v["kind"] == "JsonSchema" for v in broken),
        tool_failed=flags["tool_failed"],
        # In a stream only: there the status went out with the first byte.
        interrupted=record["outcome"] == "error" and record["status"] < 400 and begun,
        censored=not record["final"],
        first_token=begun,
        hard_violations=tuple(v["check"] for v in broken if v["hard"]),
        pair=record["pair"],
        digest=record["digest"],
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
    """A failure or a retry that the gateway saw; what went well is told by the pod.

    Of a retry that went well nothing but the retry is known, so it is told as if it were still running.
    """
    arm = _arm(record.arm)
    full = record.kind == "attempt" and record.status == _QUEUE_FULL and not record.limited
    failed = record.outcome == "error" or full
    if arm is None or not record.rule or not record.final or record.pair or not (failed or record.retried):
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
        failed=failed,
        interrupted=record.interrupted,
        retried=record.retried,
        censored=not failed,
        first_token=record.first_byte_s is not None,
    )
    return Observed(record.policy, record.rule, observation)


def from_feedback(answer: Answer, kind: str, now: float) -> Observed:
    """What a person said of an answer."""
    observation = Observation(
        time=now,
        request_id=answer.request_id,
        arm=ArmName(answer.arm),
        age_s=max(0.0, now - answer.time),
        attempt=answer.attempt,
        unit=answer.unit,
        tenant=answer.tenant,
        task=answer.task,
        feedback=kind,
    )
    return Observed(answer.policy, answer.rule, observation)
