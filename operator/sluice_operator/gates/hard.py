"""Hard gates: one violation by the candidate ends its rollout, live or mirrored, without statistics.

They must not be a weapon. An answer that was cut off has not broken its form. What a prompt can provoke, a
forbidden pattern or an answer that a verifier rejects, is held against the candidate only where stable has
not shown the same for that tenant; for a mirrored request the verdict waits for stable's answer to the very
same request, up to 10 s. Checks that a contract does not name count only if their name holds a "/" (the
runtime's own: leaks, permissions); any other is a check that has been edited away.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..api.routepolicy import Contract, Severity
from .observation import Observation

PROVOKED_S = 3600.0
"""How long what stable has shown excuses the candidate, seconds."""
PATIENCE_S = 10.0
"""How long a mirrored violation waits for stable's answer to the same request, seconds."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken hard check."""

    check: str
    tenant: str
    request_id: str
    mirror: bool
    time: float
    """When the operator learnt of it, Unix seconds."""


class HardGates:
    """Violations of one attempt."""

    __slots__ = ("_form", "_pending", "_provocable", "_shown", "broken")

    def __init__(self, contract: Contract) -> None:
        hard = [check for check in contract.checks if check.severity is Severity.HARD]
        self._provocable = frozenset(
            check.name for check in hard if check.must_not_match is not None or check.verifier is not None
        )
        self._form = frozenset(check.name for check in hard) - self._provocable
        self._shown: dict[tuple[str, str], float] = {}
        self._pending: dict[str, Violation] = {}
        self.broken: dict[str, Violation] = {}
        """The first violation that counts, by check."""

    def take_stable(self, seen: Observation) -> None:
        """What stable does itself can't be held against the candidate."""
        for check in seen.hard_violations:
            if check in self._provocable:
                self._shown[(check, seen.tenant)] = seen.time
        waiting = self._pending.get(seen.request_id)
        if waiting is None or (seen.censored and not seen.hard_violations):
            return
        del self._pending[seen.request_id]
        if not self._provoked(waiting.check, waiting.tenant, seen.time):
            self.broken.setdefault(waiting.check, waiting)

    def take_candidate(self, seen: Observation, stable_answered: bool) -> None:
        """`stable_answered`: stable's answer to the same request is known already."""
        for check in seen.hard_violations:
            violation = Violation(check, seen.tenant, seen.request_id, seen.mirror, seen.time)
            if check in self._provocable:
                if self._provoked(check, seen.tenant, seen.time):
                    continue
                if seen.mirror and not stable_answered:
                    self._pending.setdefault(seen.request_id, violation)
                    continue
            elif check in self._form:
                if seen.truncated or seen.cancelled:
                    continue
            elif "/" not in check:
                continue
            self.broken.setdefault(check, violation)

    @property
    def waiting(self) -> bool:
        """Whether a violation waits for stable's answer."""
        return bool(self._pending)

    def take_hard_guard(self, guard: str, seen: Observation) -> None:
        """An event of a rate that its guard, in mode Hard, allows the candidate none of."""
        violation = Violation(guard, seen.tenant, seen.request_id, seen.mirror, seen.time)
        self.broken.setdefault(guard, violation)

    def violation(self, time: float, leaks: Collection[str] = ()) -> Violation | None:
        """The violation that ends the rollout, as of `time`, one of the checks `leaks` before any other;
        None: none."""
        overdue = (
            waiting
            for waiting in self._pending.values()
            if time - waiting.time > PATIENCE_S and not self._provoked(waiting.check, waiting.tenant, time)
        )
        return min((*self.broken.values(), *overdue), key=lambda one: one.check not in leaks, default=None)

    def _provoked(self, check: str, tenant: str, time: float) -> bool:
        shown = self._shown.get((check, tenant))
        return shown is not None and time - shown <= PROVOKED_S
