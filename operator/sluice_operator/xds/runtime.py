"""Weights and mirror shares as one runtime layer: the only thing that a rollback has to move.

Keys carry the attempt and the candidate's cluster and configuration, so that what was meant for one
candidate can never apply to the next. Without the layer (its TTL has run out) every route falls back to its
own weights: stable all.
"""

from __future__ import annotations

import hashlib

from envoy.service.runtime.v3 import rtds_pb2

from .clusters import arm_clusters
from .messages import Message, struct
from .state import GatewayState, Policy, Rule

LAYER = "sluice"
TOTAL = 10_000


def weight_prefix(policy: str, rule: Rule) -> str:
    """Prefix of the runtime keys of a rule's arms; Envoy appends ``.`` and the name of the arm's cluster."""
    return f"sluice.weight.{_key(policy, rule)}"


def mirror_key(policy: str, rule: Rule) -> str:
    """Runtime key of a rule's mirror share, in percent."""
    return f"sluice.mirror.{_key(policy, rule)}"


def build_runtime(desired: GatewayState, in_force: GatewayState) -> Message:
    """The layer for the routes in force, with the weights that are desired.

    The two differ while a policy's newest version is quarantined: its last good routes stay, and an attempt
    that the desired state no longer has gets nothing.
    """
    wanted = {
        _key(policy.name, rule): rule
        for policy in desired.policies
        for rule in policy.rules
        if rule.candidate
    }
    layer: dict[str, int] = {}
    for policy in in_force.policies:
        for rule in policy.rules:
            if rule.candidate is not None:
                layer.update(_entries(policy, rule, wanted.get(_key(policy.name, rule))))
    return rtds_pb2.Runtime(name=LAYER, layer=struct(layer))


def _entries(policy: Policy, rule: Rule, wanted: Rule | None) -> dict[str, int]:
    weight = wanted.weight if wanted else 0
    shadow = wanted.shadow_percent if wanted else 0
    stable, candidate = arm_clusters(rule)
    prefix = weight_prefix(policy.name, rule)
    entries = {
        f"{prefix}.{candidate}": weight * TOTAL // 100,
        f"{prefix}.{stable}": TOTAL - weight * TOTAL // 100,
    }
    if shadow:
        entries[mirror_key(policy.name, rule)] = shadow
    return entries


def _key(policy: str, rule: Rule) -> str:
    candidate = rule.candidate
    parts = (
        policy,
        rule.name,
        rule.attempt,
        candidate.cluster if candidate else "",
        candidate.config if candidate else "",
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
