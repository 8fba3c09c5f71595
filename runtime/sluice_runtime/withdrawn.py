"""Whose requests this pod must cut and refuse, where all others end in peace.

Invariant: the set is replaced as a whole. What is cut is told by who asked and which release attempt answers,
never by a configuration: an arm may share that with stable.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sluice_runtime.caller import Caller
from sluice_runtime.podconfig import Name, StrictModel

MAX_WITHDRAWN = 20_000
_Names = Annotated[frozenset[Name], Field(max_length=MAX_WITHDRAWN)]


class Withdrawn(StrictModel):
    """docs/contracts/withdrawn.schema.json as a type."""

    attempts: _Names
    """Release attempts that have leaked; of their requests stable's have let nothing out."""
    tenants: _Names
    """Tenants that were revoked."""

    def covers(self, caller: Caller) -> bool:
        """Whether a request may not go on. What a suite asks is the operator's, whoever it asks as."""
        leaked = caller.arm == "candidate" and caller.attempt in self.attempts
        return leaked or (caller.tenant in self.tenants and not caller.evaluation)


NOTHING = Withdrawn(attempts=frozenset(), tenants=frozenset())
