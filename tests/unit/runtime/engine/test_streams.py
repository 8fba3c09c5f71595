"""From the engine's thread to the readers: what is handed over when, and who does not read any more."""

from __future__ import annotations

import asyncio

from sluice_runtime.engine.detokenizer import Detokenizer
from sluice_runtime.engine.request import ActiveRequest
from sluice_runtime.engine.streams import Outbox, OutputStream
from sluice_runtime.engine.types import EngineRequest, OutputChunk, SamplingParams

_LONG_S = 60.0


def _stream(loop: asyncio.AbstractEventLoop) -> tuple[OutputStream, ActiveRequest]:
    stream = OutputStream("r", lambda request_id: None)
    request = EngineRequest("r", (1,), SamplingParams(max_tokens=4), "s")
    return stream, ActiveRequest(request, Detokenizer(lambda i: b""), loop, stream.sink, 0.0)


async def test_all_readers_have_run_when_a_step_is_handed_over() -> None:
    loop, happened = asyncio.get_running_loop(), list[str]()
    streams = [_stream(loop) for _ in range(50)]

    async def read(stream: OutputStream) -> None:
        for _ in range(4):
            happened.append((await anext(stream)).text)

    def steps() -> None:
        outbox = Outbox(handover_s=_LONG_S)
        for step in range(4):
            for _, active in streams:
                outbox.put(active, OutputChunk(f"{step}", (1,)))
            assert outbox.flush() == []
            happened.append("flushed")

    readers = [asyncio.create_task(read(stream)) for stream, _ in streams]
    await asyncio.to_thread(steps)
    await asyncio.gather(*readers)
    assert happened == [text for step in range(4) for text in (*[f"{step}"] * 50, "flushed")]


def test_a_loop_that_does_not_run_is_waited_for_no_longer_than_allowed() -> None:
    loop = asyncio.new_event_loop()
    try:
        stream, active = _stream(loop)
        outbox = Outbox(handover_s=0.001)
        outbox.put(active, OutputChunk("late", (1,)))
        assert outbox.flush() == []
        assert loop.run_until_complete(anext(stream)).text == "late", "it was delivered all the same"
    finally:
        loop.close()


def test_who_can_read_no_more_is_told_and_waited_for_by_nobody() -> None:
    loop = asyncio.new_event_loop()
    _, active = _stream(loop)
    loop.close()
    outbox = Outbox(handover_s=_LONG_S)
    outbox.put(active, OutputChunk("lost", (1,)))
    assert outbox.flush() == [active]
    assert outbox.flush() == [], "once"
