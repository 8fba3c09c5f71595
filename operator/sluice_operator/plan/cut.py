"""Whose requests pods must cut and refuse, where all others end in peace: a leak's or a revoked tenant's.

Invariant: the two are told together and as a whole, so what is told once more changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """docs/contracts/withdrawn.schema.json as a type."""

    attempts: frozenset[str] = frozenset()
    """Of their requests the candidates'."""
    tenants: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.attempts or self.tenants)

    @property
    def body(self) -> dict[str, list[str]]:
        """For the wire."""
        return {"attempts": sorted(self.attempts), "tenants": sorted(self.tenants)}
