"""Where each arm goes now: it stays where it is until pods that hold what it moves to are there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..xds import state as gateway
from .backend_status import PodState
from .routed import ArmKey

Fit = Mapping[str, list[PodState]]
"""By cluster: pods at the digest on record."""


@dataclass(frozen=True)
class Settling:
    """What decides whether an arm moves."""

    fit: Fit
    before: Mapping[ArmKey, gateway.Arm]
    """Arms as they were last routed."""
    overdue: Collection[ArmKey]
    """Arms that have waited long enough for the last pods."""
    aborted: Collection[tuple[str, str]]
    """Policy and rule of the rollouts that a person has aborted."""

    def settle(
        self, wanted: Mapping[ArmKey, gateway.Arm]
    ) -> tuple[dict[ArmKey, gateway.Arm], dict[ArmKey, str]]:
        """Where each arm goes now, and why it is not yet where it shall be."""
        arms: dict[ArmKey, gateway.Arm] = {}
        waiting: dict[ArmKey, str] = {}
        for key, arm in wanted.items():
            before = self.before.get(key)
            reason = self._not_yet(key, arm, before)
            stays = bool(reason) and before is not None and self._stays(key, before, arm)
            arms[key] = before if stays and before is not None else arm
            if reason:
                waiting[key] = reason
        return arms, waiting

    def _stays(self, key: ArmKey, before: gateway.Arm, wanted: gateway.Arm) -> bool:
        """Whether an arm that can't move yet keeps its old place, or goes where nobody is home instead."""
        if "/svc:" in before.cluster:
            return True
        if before.cluster not in self.fit:
            return False
        there = self.fit.get(wanted.cluster, [])
        if not self.fit[before.cluster] and any(wanted.config in p.stream.versions for p in there):
            return False
        # Who aborts wants the candidate out, also where it was promoted and the old target has no pods.
        return before.cluster == wanted.cluster or bool(there) or key[:2] not in self.aborted

    def _not_yet(self, key: ArmKey, arm: gateway.Arm, before: gateway.Arm | None) -> str:
        """Why ``arm`` can't be arrived at now; empty where it can."""
        reason = missing(self.fit, arm)
        if not reason or arm.cluster not in self.fit:
            return reason
        holding = any(arm.config in p.stream.versions for p in self.fit[arm.cluster])
        return "" if holding and (key in self.overdue or arm == before) else reason


def missing(fit: Fit, arm: gateway.Arm) -> str:
    """What is missing until all pods of the arm serve it; empty where nothing is."""
    if arm.cluster not in fit:
        return "" if "/svc:" in arm.cluster else f"backend {arm.cluster} does not exist"
    pods = fit[arm.cluster]
    if not pods:
        return f"backend {arm.cluster} has no ready pod"
    holding = [p for p in pods if arm.config in p.stream.versions]
    if len(holding) == len(pods):
        return ""
    for state in pods:
        if arm.config in state.stream.rejected:
            return f"pod {state.pod.name} refused the configuration: {state.stream.rejected[arm.config]}"
        if state.stream.refused and arm.config not in state.stream.versions:
            return f"pod {state.pod.name} refused the configuration: {state.stream.refused}"
    return f"{len(holding)} of {len(pods)} pods of {arm.cluster} hold the configuration"
