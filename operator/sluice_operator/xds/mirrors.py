"""Copies of live traffic whose answers nobody sees: for a candidate, for pairs, for a review.

Envoy decides about each by the same random number of the stream, so mirrors of equal shares copy the same
requests, and those of a smaller share are among those of a larger one. Shares travel in the runtime layer
like weights: without it nothing is mirrored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .parts import header
from .runtime import mirror_key, pair_key, review_key
from .state import Arm, Rule

PLAIN, PAIR = "1", "pair"
"""Values of ``x-sluice-mirror``."""


def mirrors(policy: str, rule: Rule, stable: str, candidate: str) -> list[dict[str, Any]]:
    """All mirror policies of a rule; ``stable`` and ``candidate`` are Envoy's names of their clusters."""
    found: list[dict[str, Any]] = []
    if rule.candidate is not None and rule.stable is not None:
        ours = arm_headers("stable", rule.stable, rule.attempt)
        theirs = arm_headers("candidate", rule.candidate, rule.attempt)
        pair = pair_key(policy, rule)
        found = [
            _mirror(candidate, mirror_key(policy, rule), PLAIN, theirs),
            _mirror(candidate, pair, PAIR, theirs),
            _mirror(stable, pair, PAIR, ours),
            _mirror(stable, pair, PAIR, ours),
        ]
    if rule.review is not None:
        review = rule.review
        key = review_key(policy, rule)
        found += [
            _mirror(arm.cluster, key, PLAIN, arm_headers(name, arm, review.attempt))
            for name, arm in (("stable", review.stable), ("candidate", review.candidate))
        ]
    return found


def arm_headers(name: str, arm: Arm, attempt: str) -> tuple[tuple[str, str], ...]:
    """What tells the arm of a try."""
    return ("x-sluice-arm", name), ("x-sluice-config", arm.config), ("x-sluice-attempt", attempt)


def _mirror(cluster: str, key: str, kind: str, headers: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "runtime_fraction": {"default_value": {"numerator": 0, "denominator": 0}, "runtime_key": key},
        "trace_sampled": {"value": False},
        "disable_shadow_host_suffix_append": True,
        "request_headers_mutations": [
            {"append": header(name, value)} for name, value in (("x-sluice-mirror", kind), *headers)
        ],
    }
