"""What evidence is about, read out of a rule's status."""

from __future__ import annotations

from datetime import datetime

from ..api.rulestatus import Phase, RuleStatus

NO_TRAFFIC = (0, 0)


def key_of(status: RuleStatus) -> tuple[str, str, int]:
    """What evidence is about."""
    return status.attempt, status.gates, status.num_restarts


def stage_of(status: RuleStatus) -> tuple[object, ...]:
    """What feedback is about: it outlives the hourly restart of evidence, but no other traffic."""
    excluded = tuple((one.task, one.tenant) for one in status.excluded)
    return status.phase, status.step, traffic_of(status), excluded


def traffic_of(status: RuleStatus) -> tuple[int, int]:
    """Weight and shadow percent."""
    return status.weight, status.shadow_percent


def share_of(status: RuleStatus) -> float | None:
    """The candidate's fraction of all requests seen, in (0, 1); None where one arm has no traffic.

    A mirror is a copy: of 100 requests with 25 mirrored, 125 are seen and the candidate's share is 25/125.
    """
    if status.phase is Phase.SHADOWING and status.shadow_percent > 0:
        return status.shadow_percent / (100 + status.shadow_percent)
    if status.phase in (Phase.STEP, Phase.WATCHING) and 0 < status.weight < 100:
        return status.weight / 100
    return None


def unix(text: str) -> float:
    """Unix seconds of an RFC 3339 time; 0 where there is none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0
