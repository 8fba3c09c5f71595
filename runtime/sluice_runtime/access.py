"""What a pod needs to reach users' verifiers: bearer tokens, and the authorities that prove who answers.

Kept apart from configurations, which name these and hold none of them: a configuration's version must not
move because a token was rotated, and may be logged. Invariant: the held set is replaced as a whole, and no
text that this module makes, representations and errors included, holds a token.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, ValidationError

from sluice_runtime.podconfig import RETAIN_S, Name, Rejected, StrictModel, invalid

MAX_VALUES = 1000

Token = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=8192)]
Certificates = Annotated[str, Field(min_length=1, max_length=512 * 1024)]


class AccessSet(StrictModel):
    """docs/contracts/access.schema.json as a type."""

    version: Annotated[str, Field(max_length=512)]
    """Empty where there is nothing to reach anybody with, as in a pod that has just begun."""
    tokens: Annotated[dict[Name, Token], Field(max_length=MAX_VALUES, repr=False)]
    authorities: Annotated[dict[Name, Certificates], Field(max_length=MAX_VALUES)]


@dataclass(frozen=True)
class Access:
    """One set, by the names that configurations use. `authorities`: contexts that trust nobody else."""

    tokens: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    authorities: Mapping[str, ssl.SSLContext] = field(default_factory=lambda: MappingProxyType({}))

    def over(self, older: Access) -> Access:
        """This, and what only `older` has."""
        return Access({**older.tokens, **self.tokens}, {**older.authorities, **self.authorities})

    def without(self, names: Collection[str]) -> Access:
        """All but these."""
        return Access(
            {name: token for name, token in self.tokens.items() if name not in names},
            {name: context for name, context in self.authorities.items() if name not in names},
        )


class AccessStore:
    """The held set. Belongs to the event loop.

    What left the set is honoured for as long as configurations that left theirs are: requests that mean those
    may be on their way. It is not where a held configuration still names it: then somebody took it away.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.version = ""
        self._held = Access()
        self._left: list[tuple[float, Access]] = []
        """Latest first, each with the moment until which it is honoured."""
        self._clock = clock

    def current(self) -> Access:
        """What verifiers are reached with now."""
        found, now = self._held, self._clock()
        for until, left in self._left:
            if now < until:
                found = found.over(left)
        return found

    def take_away(self, named: Collection[str]) -> None:
        """`named`: all that held configurations name. What of it is not held is honoured no longer."""
        self._left = [(until, left.without(named)) for until, left in self._left]

    def replace(self, raw: Any) -> Rejected | None:
        """Hold this set from now on; if it is wrong, what was held stays. Certificates that can't be read are
        left out: who needs them finds none."""
        try:
            told = AccessSet.model_validate(raw)
        except ValidationError as e:
            return invalid(raw, e, "access")
        if told.version == self.version:
            return None
        contexts = {name: trusting(pem) for name, pem in told.authorities.items()}
        now = self._clock()
        self._left = [(now + RETAIN_S, self._held), *(one for one in self._left if one[0] > now)]
        self.version = told.version
        self._held = Access(told.tokens, {name: c for name, c in contexts.items() if c is not None})
        return None


@lru_cache(maxsize=64)
def trusting(pem: str) -> ssl.SSLContext | None:
    """A client's context that trusts these authorities alone; None: they can't be read."""
    try:
        return ssl.create_default_context(cadata=pem)
    except (ssl.SSLError, ValueError, TypeError):
        return None


@lru_cache(maxsize=1)
def public() -> ssl.SSLContext:
    """One that trusts the image's authorities."""
    return ssl.create_default_context()
