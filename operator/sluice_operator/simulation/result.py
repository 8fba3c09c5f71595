"""How one simulated rollout ended, whichever tool judged it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Result:
    """How one rollout ended."""

    outcome: str
    """promoted, rolled-back, narrowed (a task or tenant went back alone), or unfinished."""
    seconds: float
    """From the start to that."""
    reason: str = ""
    message: str = ""
    num_exposed: int = 0
    """Requests sent to the candidate from the regression's beginning on."""
    num_told: int = 0
    """Of these, the ones that the operator had heard of when it decided."""
    num_violations: int = 0
    """Of these, the ones that broke a hard check."""
    num_candidate: int = 0
    """Requests sent to the candidate in all."""
    stages: tuple[tuple[float, str], ...] = ()
    """When each stage began: seconds and name, such as Step 1."""
    held: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what held it up."""

    @property
    def stopped(self) -> bool:
        """Whether the candidate, or a part of its traffic, was taken back."""
        return self.outcome in ("rolled-back", "narrowed")
