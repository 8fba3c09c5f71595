"""Weights and mirror shares as one runtime layer: the only thing that a rollback has to move.

Keys carry the attempt, the candidate's cluster and configuration and the scope, so that what was meant for
one candidate can never apply to the next, nor to requests that it must not get. Without the layer (its TTL
has run out) every route falls back to its own weights: stable all, or as the rule says (``Rule.alone``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from envoy.service.runtime.v3 import rtds_pb2

from .clusters import arm_clusters
from .messages import Message, struct
from .state import GatewayState, Rule

LAYER = "sluice"
TOTAL = 10_000


def weight_prefix(policy: str, rule: Rule) -> str:
    """Prefix of the runtime keys of a rule's arms; Envoy appends ``.`` and the name of the arm's cluster."""
    return f"sluice.weight.{_key(policy, rule)}"


def mirror_key(policy: str, rule: Rule) -> str:
    """Runtime key of a rule's mirror share, in percent."""
    return f"sluice.mirror.{_key(policy, rule)}"


def pair_key(policy: str, rule: Rule) -> str:
    """Runtime key of the share that is answered greedily to be compared, in percent."""
    return f"sluice.pair.{_key(policy, rule)}"


def review_key(policy: str, rule: Rule) -> str:
    """Runtime key of a review's share, in percent."""
    review = rule.review
    told = (review.attempt, repr(review.stable), repr(review.candidate)) if review else ()
    return f"sluice.review.{_hash(policy, rule.name, *told)}"


def build_runtime(desired: GatewayState, in_force: GatewayState, leaving: bool = False) -> Message:
    """The layer for the routes in force, with the weights that are desired.

    The two differ while a policy's newest version is quarantined: its last good routes stay, and an attempt
    that the desired state no longer has gets nothing; nor does one whose routes still let through what it
    shall no longer have. ``leaving``: such routes are about to be replaced, so until then they just get no
    more than they had.
    """
    wanted = {
        (policy.name, rule.name): rule
        for policy in desired.policies
        for rule in policy.rules
        if rule.candidate or rule.review
    }
    layer: dict[str, int] = {}
    for policy in in_force.policies:
        for rule in policy.rules:
            meant = wanted.get((policy.name, rule.name))
            if rule.candidate is not None:
                layer.update(_entries(policy.name, rule, *_shares(rule, meant, leaving)))
            if rule.review is not None and meant is not None and meant.review is not None:
                key = review_key(policy.name, rule)
                if key == review_key(policy.name, meant):
                    layer[key] = meant.review.percent
    return rtds_pb2.Runtime(name=LAYER, layer=struct({key: layer[key] for key in sorted(layer)}))


def _shares(rule: Rule, wanted: Rule | None, leaving: bool) -> tuple[int, int, int]:
    """Weight, mirror share and share of pairs of the routes of ``rule``, in percent."""
    if wanted is None or (wanted.candidate, wanted.attempt) != (rule.candidate, rule.attempt):
        return 0, 0, 0
    shares = (wanted.weight, wanted.shadow_percent, wanted.pair_percent)
    if rule.scope.within(wanted.scope):
        return shares
    if not leaving:
        return 0, 0, 0
    had = (rule.weight, rule.shadow_percent, rule.pair_percent)
    weight, shadow, pair = map(min, shares, had)
    return weight, shadow, pair


def _entries(policy: str, rule: Rule, weight: int, shadow: int, pair: int) -> Iterator[tuple[str, int]]:
    stable, candidate = arm_clusters(rule)
    prefix = weight_prefix(policy, rule)
    yield f"{prefix}.{candidate}", weight * TOTAL // 100
    yield f"{prefix}.{stable}", TOTAL - weight * TOTAL // 100
    if shadow:
        yield mirror_key(policy, rule), shadow
    if pair:
        yield pair_key(policy, rule), pair


def _key(policy: str, rule: Rule) -> str:
    candidate, scope = rule.candidate, rule.scope
    return _hash(
        policy,
        rule.name,
        rule.attempt,
        candidate.cluster if candidate else "",
        candidate.config if candidate else "",
        repr(scope),
    )


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
