"""The moments of one request that a person waits for, and the time that is neither the engine's nor theirs.

Three moments: the first of the answer that a client can see, the first of it that is known to keep the rule's
contract, and its end. Invariant: a moment that has come does not move.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Moments:
    """Moments in seconds of `time.monotonic`; None: it has not come. `arrived_at` is Unix seconds."""

    arrived: float
    arrived_at: float = field(default_factory=time.time)
    visible: float | None = None
    verified: float | None = None
    complete: float | None = None
    verify_s: float | None = None
    """Seconds spent on verdicts; None: nothing was judged."""
    stream_s: float | None = None
    """Seconds for which the connection made the answer wait, its last event aside; None: nothing was sent."""

    def show(self) -> None:
        """Something of the answer goes out."""
        if self.visible is None:
            self.visible = time.monotonic()

    def verify(self) -> None:
        """An answer has passed its contract."""
        if self.verified is None:
            self.verified = time.monotonic()

    def end(self) -> None:
        """The last of the answer goes out."""
        self.show()
        self.complete = time.monotonic()

    @contextlib.contextmanager
    def verifying(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.verify_s = (self.verify_s or 0.0) + time.monotonic() - began

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.stream_s = (self.stream_s or 0.0) + time.monotonic() - began

    @property
    def visible_s(self) -> float | None:
        """From the request's arrival, as are the next two."""
        return self._after(self.visible)

    @property
    def verified_s(self) -> float | None:
        return self._after(self.verified)

    @property
    def complete_s(self) -> float | None:
        return self._after(self.complete)

    def _after(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrived
