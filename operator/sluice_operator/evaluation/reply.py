"""An answer as the checkers see it, and what may be told of one that is wrong.

Invariant: neither ``repr`` of a Reply nor the text of a Failure holds words of the answer; ``detail`` alone,
which a user's own checker wrote, may, and is for the person who runs the suite.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..api.evalsuite import Sample


@dataclass(frozen=True)
class Call:
    """A tool call that the answer makes; ``arguments`` is the JSON text as it came."""

    name: str = field(repr=False)
    arguments: str = field(default="", repr=False)


@dataclass(frozen=True)
class Reply:
    """One whole answer, or why there is none."""

    text: str = field(default="", repr=False)
    tool_calls: tuple[Call, ...] = ()
    finish_reason: str = "stop"
    seconds: float = 0.0
    """Until the answer was complete."""
    status: int = 200
    """Of HTTP; 0: none came."""
    error: str = ""
    """Why there is no answer, in our words; empty: there is one."""
    refused: bool = False
    """The service refused in so many words: a refusal of the route, ``message.refusal``, a content filter. A
    refusal in prose is recognised from the text."""
    out_of_reach: bool = False
    """Nobody could be asked (no connection, 429, 503), so that nothing is known of the answer."""


@dataclass(frozen=True)
class Failure:
    """An expectation that does not hold: its field in the sample, and why in words."""

    expectation: str
    why: str
    detail: str = field(default="", repr=False)

    def text(self) -> str:
        """One line for people, without words of the answer."""
        return f"{self.expectation}: {self.why}"


@dataclass(frozen=True)
class Outcome:
    """What a checker of the user's said. ``why`` is in our words, ``detail`` in its own."""

    ok: bool
    why: str = ""
    detail: str = field(default="", repr=False)


@dataclass(frozen=True)
class SampleResult:
    """A sample, what was answered, and which expectations do not hold."""

    sample: Sample
    reply: Reply
    failures: tuple[Failure, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every expectation holds."""
        return not self.failures
