"""What a policy refers to, as it is found around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..api.backend import Fitness


@dataclass(frozen=True)
class Surroundings:
    """What a policy refers to, in its own namespace, and who else publishes models."""

    backends: Mapping[str, Fitness] = field(default_factory=dict)
    scopes: frozenset[str] = frozenset()
    suites: frozenset[str] = frozenset()
    tenants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tasks that each Tenant's callers may claim."""
    models_taken: Mapping[str, str] = field(default_factory=dict)
    """Model names that older policies publish, with the policy's namespace/name."""
    prometheus: bool = False
    """Whether the operator was installed with one to ask."""
