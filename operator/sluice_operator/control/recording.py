"""What a release record is made from, and what it looks like on the wire. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ..api import RuleStatus
from ..api.backend import InferenceBackend
from ..api.cachescope import CacheScopeSpec
from ..api.common import API_VERSION, Metadata
from ..api.releaserecord import ArmEvidence, Outcome, ReleaseRecordSpec
from ..api.routepolicy import Rule
from ..api.tuning import Switch
from ..plan import names
from .cache import Name


@dataclass(frozen=True)
class Subject:
    """What a record is of, beyond its status. Maps are those of the policy's namespace."""

    policy: Metadata
    model: str
    rule: Rule
    backends: Mapping[str, InferenceBackend]
    scopes: Mapping[str, CacheScopeSpec] = field(default_factory=dict)
    switches: tuple[Switch, ...] = ()

    @property
    def where(self) -> tuple[str, str, str]:
        """Namespace, the policy's uid, rule."""
        return (self.policy.namespace, self.policy.uid, self.rule.name)


Evidence = Callable[[], tuple[ArmEvidence, ArmEvidence]]
"""Stable's and the candidate's, as of now."""


def grown(before: ArmEvidence, now: ArmEvidence) -> ArmEvidence:
    """Evidence of one attempt only grows: less of it is what a restarted operator has seen for itself."""
    return now if now.num_requests >= before.num_requests else before


def made_from(subject: Subject, status: RuleStatus) -> tuple[object, ...]:
    """What makes a record news, beside evidence."""
    run = status.evaluation
    return (
        subject.rule,
        subject.model,
        status.phase,
        status.step,
        status.history,
        status.excluded,
        (run.stage, run.ended) if run is not None else None,
    )


def object_of(name: Name, spec: ReleaseRecordSpec) -> dict[str, Any]:
    """As the API server takes it. No owner reference: it outlives the policy."""
    return {
        "apiVersion": API_VERSION,
        "kind": "ReleaseRecord",
        "metadata": {
            "name": name[1],
            "namespace": name[0],
            "labels": {
                names.POLICY_LABEL: names.label(spec.policy),
                "app.kubernetes.io/managed-by": "sluice",
            },
        },
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def is_due(spec: ReleaseRecordSpec, now: datetime) -> bool:
    judged = spec.outcome in (Outcome.PROMOTED, Outcome.ROLLED_BACK)
    return judged and bool(spec.next_review) and datetime.fromisoformat(spec.next_review) <= now


def gap(spec: ReleaseRecordSpec) -> timedelta:
    """How long after the end, or after the newest review, the next was due."""
    since = spec.reviews[-1].time if spec.reviews else spec.ended or spec.started
    if not since or not spec.next_review:
        return timedelta(days=90)
    return datetime.fromisoformat(spec.next_review) - datetime.fromisoformat(since)


def text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
