"""What comes out of the engine, on its way from the engine's thread to the asyncio loops of the callers.

Invariant: the engine's side holds an active request's sink, never its stream, so that a stream which nobody
can read any more is collected, and by that cancels its request.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from sluice_runtime.engine.request import ActiveRequest
from sluice_runtime.engine.types import OutputChunk


class OutputStream(AsyncIterator[OutputChunk]):
    """The chunks of one request, ending after the one with a `finish_reason`. For one consumer."""

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        """`cancel` may be called with the request's id by any thread, also where that thread holds locks."""
        self._request_id = request_id
        self._cancel = cancel
        self._chunks: asyncio.Queue[OutputChunk] = asyncio.Queue()
        self._ended = False

    @property
    def sink(self) -> Callable[[OutputChunk], None]:
        """Where chunks go in, on the asyncio loop only. Who holds it does not keep the stream alive."""
        return self._chunks.put_nowait

    async def __anext__(self) -> OutputChunk:
        if self._ended:
            raise StopAsyncIteration
        chunk = await self._chunks.get()
        self._ended = chunk.finish_reason is not None
        return chunk

    async def aclose(self) -> None:
        """Stop reading; cancels the request if it still runs."""
        self._end()

    def __del__(self) -> None:
        # A stream that nobody can read any more must not keep KV.
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._cancel(self._request_id)


class Outbox:
    """The chunks of one step, delivered by one call into each asyncio loop. For one thread."""

    def __init__(self, handover_s: float = 0.0) -> None:
        """`handover_s`: `flush` waits so long at most until the readers have run. They need the interpreter's
        lock, which the engine's thread would else keep until the next forward begins, and then a core, of
        which the forward's threads leave none."""
        self._handover_s = handover_s
        self._deliveries: defaultdict[asyncio.AbstractEventLoop, list[tuple[ActiveRequest, OutputChunk]]]
        self._deliveries = defaultdict(list)

    def put(self, active: ActiveRequest, chunk: OutputChunk) -> None:
        self._deliveries[active.loop].append((active, chunk))

    def flush(self) -> list[ActiveRequest]:
        """Deliver everything. Returns the requests whose loop is closed: nobody reads these any more."""
        unread: list[ActiveRequest] = []
        for loop, deliveries in self._deliveries.items():
            delivery = _Delivery(loop, deliveries)
            try:
                loop.call_soon_threadsafe(delivery)
            except RuntimeError:
                unread += [active for active, _ in deliveries]
            else:
                delivery.wait(self._handover_s)
        self._deliveries.clear()
        return unread


class _Delivery:
    """Chunks on their way into one loop, which calls this."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliveries: list[tuple[ActiveRequest, OutputChunk]]
    ) -> None:
        self._loop = loop
        self._deliveries = deliveries
        self._read = threading.Lock()
        self._read.acquire()

    def __call__(self) -> None:
        for active, chunk in self._deliveries:
            active.deliver_to(chunk)
        # Behind the readers, which these chunks have put in line.
        self._loop.call_soon(self._read.release)

    def wait(self, timeout_s: float) -> None:
        """Until the readers have run, but no longer than that."""
        if timeout_s > 0:
            self._read.acquire(timeout=timeout_s)
