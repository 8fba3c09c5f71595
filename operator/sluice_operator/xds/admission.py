"""Which objects are let through to the gateways: what is known to be bad stays behind, all else goes on.

Envoy refuses a whole resource and names no object, so the culprit among the objects that changed since the
last acceptance is found by halving: a trial holds half of them back, each verdict shrinks the rest. What
was once accepted is never a suspect, and an object in quarantine is tried again only when it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .messages import CDS, ECDS, EDS, LDS, RDS
from .state import GatewayState
from .validate import problems

Key = tuple[str, str]
"""Kind (``cluster``, ``policy``, ``tenant``) and name."""

SUSPECTS = {
    CDS: ("cluster", "policy"),
    EDS: ("cluster",),
    ECDS: ("tenant",),
    LDS: ("tenant",),
    RDS: ("policy", "tenant"),
}


@dataclass
class Admission:
    """What is wanted, what was accepted last, and what is known to be bad."""

    desired: GatewayState = field(default_factory=GatewayState)
    accepted: GatewayState = field(default_factory=GatewayState)
    invalid: dict[Key, str] = field(default_factory=dict)
    """Found before Envoy saw it; depends on the other objects, so it is decided anew each time."""
    quarantine: dict[Key, tuple[Any, str]] = field(default_factory=dict)
    """Refused by Envoy."""
    held: list[Key] = field(default_factory=list)

    def want(self, state: GatewayState) -> list[tuple[Key, str]]:
        """Take a new desired state; returns what was found bad at once."""
        self.desired = state
        self.held = []
        objects = dict(_objects(state))
        self.quarantine = {k: v for k, v in self.quarantine.items() if objects.get(k) == v[0]}
        known = self.invalid
        self.invalid = {(kind, name): message for kind, name, message in problems(state, self.accepted)}
        return [item for item in self.invalid.items() if item not in known.items()]

    @property
    def held_back(self) -> dict[Key, str]:
        """Every object known to be bad, with the reason."""
        return {**self.invalid, **{key: message for key, (_, message) in self.quarantine.items()}}

    def admitted(self) -> GatewayState:
        """The desired state with last accepted objects, or none, in place of those held back."""
        old = dict(_objects(self.accepted))
        new: dict[str, list[Any]] = {"cluster": [], "policy": [], "tenant": []}
        taken: set[Key] = set()
        for key, item in _objects(self.desired):
            if key in taken:
                continue
            taken.add(key)
            if key in self.invalid or key in self.quarantine or key in self.held:
                item = old.get(key)
            if item is not None:
                new[key[0]].append(item)
        return replace(
            self.desired,
            clusters=tuple(new["cluster"]),
            policies=tuple(new["policy"]),
            tenants=tuple(new["tenant"]),
        )

    def accept(self, state: GatewayState) -> None:
        """A gateway has taken this state."""
        self.accepted = state
        self._release()

    def refuse(self, state: GatewayState, type_url: str, message: str) -> Key | None:
        """A gateway has refused this state; returns the culprit once it is certain."""
        suspects = self.changed(state, SUSPECTS.get(type_url, ()))
        if not suspects:
            return None
        if len(suspects) > 1:
            self.held.extend(suspects[len(suspects) // 2 :])
            return None
        self.quarantine[suspects[0]] = (dict(_objects(state))[suspects[0]], message)
        self._release()
        return suspects[0]

    def changed(self, state: GatewayState, kinds: Iterable[str]) -> list[Key]:
        """What differs from the last acceptance."""
        old = dict(_objects(self.accepted))
        return [key for key, item in _objects(state) if key[0] in kinds and old.get(key) != item]

    def _release(self) -> None:
        self.held = self.held[(len(self.held) + 1) // 2 :]


def _objects(state: GatewayState) -> Iterator[tuple[Key, Any]]:
    for kind, items in (("cluster", state.clusters), ("policy", state.policies), ("tenant", state.tenants)):
        for item in items:
            yield (kind, item.name), item
