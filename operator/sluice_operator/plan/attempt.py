"""What makes a release attempt the same one, and what makes its evidence the same evidence.

An attempt is the hash of policy, rule, both arms' identities, what the candidate does differently, and
``rollout.attempt``. An identity that is unknown just now (a pod that restarts, an API error) is no change:
the one recorded for the same backend stands in. Without any, there is no attempt yet. Example: candidate
`b` recorded as sha256:1, now observed as "": same attempt; observed as sha256:2 (deleted and made anew):
another one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ..api.routepolicy import Rule
from ..api.rulestatus import ArmStatus


def resolve(observed: ArmStatus | None, recorded: ArmStatus, backend: str | None) -> ArmStatus | None:
    """The arm with the best identity known of it; None: unknown. `backend` is the spec's, for an arm
    that is gone."""
    if observed is None:
        return recorded if recorded.identity and recorded.backend == backend else None
    if observed.identity:
        return observed
    if recorded.identity and recorded.backend == observed.backend:
        return observed.model_copy(update={"identity": recorded.identity})
    return None


def attempt_hash(policy: str, rule: Rule, stable: ArmStatus, candidate: ArmStatus) -> str:
    """The attempt's name; `rule` must have a rollout."""
    if rule.rollout is None:
        raise ValueError(f"rule {rule.name} has no rollout")
    changes = rule.rollout.candidate.model_dump(mode="json", by_alias=True, exclude_none=True)
    return _digest(
        [
            policy,
            rule.name,
            stable.backend,
            stable.identity,
            candidate.backend,
            candidate.identity,
            changes,
            rule.rollout.attempt,
        ]
    )


def gates_hash(rule: Rule) -> str:
    """What evidence was gathered under; "" without a rollout.

    Besides guards and contract this is what both arms inherit from the rule, and for whom the steps are:
    changing it is no new candidate, but answers given before say little about those given after. Not the
    policy's `switches`, which change both arms at the same moment, so that the comparison stays fair; nor
    suites, approvals, the watch and what is told of the release, which change no answer; nor what a
    violation means.
    """
    rollout = rule.rollout
    if rollout is None:
        return ""
    listed = [*rollout.guards, *rollout.queries, *rollout.gains]
    return _digest(
        [
            [one.model_dump(mode="json") for one in listed],
            rollout.alpha,
            [[step.tenants, step.tasks] for step in rollout.steps if step.tenants or step.tasks],
            rule.contract.model_dump(mode="json", exclude={"checks": {"__all__": {"leak"}}}),
            rule.features.model_dump(mode="json"),
            rule.sampling.model_dump(mode="json"),
            rule.cache_scope,
        ]
    )


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
