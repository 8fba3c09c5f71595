"""What a proposer is given and gives. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice_runtime.engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Wanted:
    """Up to `num_tokens` guesses for one request. `token_ids`: all its confirmed tokens; only ever grows.
    `uniform(i)`: the random number that the i-th token from here will be drawn with."""

    request_id: str
    token_ids: Sequence[int]
    num_tokens: int
    sampling: SamplingParams
    uniform: Callable[[int], float]


class Proposer(Protocol):
    """Guesses for requests. Owned by the engine's thread. What it says of one request depends on that
    request alone."""

    def propose(self, wanted: Sequence[Wanted]) -> dict[str, list[int]]:
        """Guesses by request, at most as many as wanted; none for requests that are left out."""

    def forget(self, request_id: str) -> None:
        """The request has ended: drop what is kept of it. Unknown ids are ignored."""

    @property
    def num_held(self) -> int:
        """Requests that something is kept of."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is kept adds up."""
