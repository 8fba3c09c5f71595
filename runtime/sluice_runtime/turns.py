"""Who is next at the few threads that a request passes before it is queued: to be tokenised, to have its form
compiled. Exists so that long prompts and odd schemas of one caller make another wait for one of them at most.

Invariant: each caller has at most one job in the threads or in line for them, and the line is first come,
first served; a caller's further jobs wait behind its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Turns:
    """`num_threads` threads for the jobs of all callers. Belongs to one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(num_threads)
        self._own: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def run(self, caller: Hashable, job: Callable[[], T], timeout_s: float | None = None) -> T:
        """What `job` returns or raises, when it is the caller's turn. TimeoutError if it then takes longer
        than that: waiting for the others is not its fault. A job that has begun goes on, and keeps its place,
        where nobody waits for it any more: no thread can be stopped."""
        own = self._own.setdefault(caller, asyncio.Lock())
        await own.acquire()
        try:
            await self._free.acquire()
        except BaseException:
            own.release()
            raise
        running = asyncio.get_running_loop().run_in_executor(self._threads, job)

        def ended(done: asyncio.Future[T]) -> None:
            self._free.release()
            own.release()
            if not done.cancelled():
                done.exception()  # or asyncio complains where nobody waited for it

        running.add_done_callback(ended)
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(running)
