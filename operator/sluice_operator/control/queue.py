"""A queue of keys to reconcile.

Invariant: a key waits at most once and is never worked on twice at the same time; what becomes dirty while
it is being worked on is worked on again. So a burst of events costs one reconcile, and no event is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

Key = tuple[str, str, str]
"""Kind, namespace, name."""

log = logging.getLogger(__name__)
_BACKOFF_S = (0.2, 30.0)


class Queue:
    """Feeds ``work`` with dirty keys. A failure is logged and tried again with growing delay."""

    def __init__(
        self, work: Callable[[Key], Awaitable[float | None]], *, failed: Callable[[Key], None]
    ) -> None:
        self._work = work
        self._failed = failed
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._delays: dict[Key, float] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Marks ``key`` dirty, at once or after ``delay`` seconds (the earliest of several delays counts)."""
        if delay > 0:
            loop = asyncio.get_running_loop()
            timer = self._timers.get(key)
            if timer is None or timer.when() > loop.time() + delay:
                if timer is not None:
                    timer.cancel()
                self._timers[key] = loop.call_later(delay, self._fire, key)
        elif key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    @property
    def depth(self) -> int:
        return len(self._waiting) + len(self._busy)

    async def run(self, num_workers: int = 8) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            key = await self._ready.get()
            self._waiting.discard(key)
            self._busy.add(key)
            try:
                delay = await self._work(key)
                self._delays.pop(key, None)
            except Exception as error:
                delay = min(self._delays.get(key, _BACKOFF_S[0] / 2) * 2, _BACKOFF_S[1])
                self._delays[key] = delay
                self._failed(key)
                log.warning(
                    "reconcile failed, will be tried again",
                    exc_info=not _expected(error),
                    extra={
                        "key": "/".join(key),
                        "error": f"{type(error).__name__}: {error}",
                        "retry_s": delay,
                    },
                )
            finally:
                self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            if delay:
                self.add(key, delay)


def _expected(error: Exception) -> bool:
    """The API server's refusals and absences are news, not bugs: no traceback for them."""
    return type(error).__module__.startswith("sluice_operator.kube")
