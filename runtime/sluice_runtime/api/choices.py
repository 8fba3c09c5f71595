"""The answers to one request while they are generated: `n` sequences of the engine, merged into one stream.

The prompt is computed once: the further sequences are submitted when the first has its first token, and find
the prompt's blocks in the prefix cache. Where that is switched off, they share under a key that only this
request has. Invariant: nothing is shown before all sequences have their place in the queue, so a request is
refused as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from sluice_runtime.api.responses import Answer
from sluice_runtime.api.tools import Piece, ToolDelta, ToolReader
from sluice_runtime.contract import Judgement, StreamJudge
from sluice_runtime.engine.types import EngineRequest, FinishReason, OutputChunk, PositionLogprobs

Submit = Callable[[EngineRequest], AsyncIterator[OutputChunk]]
_UNANSWERED = frozenset(FinishReason) - {FinishReason.STOP, FinishReason.LENGTH}


@dataclass
class Choice:
    """One answer: what has come of it so far."""

    index: int
    judge: StreamJudge
    reader: ToolReader | None
    logprobs: list[PositionLogprobs] | None
    texts: list[str] = field(default_factory=list)
    reason: FinishReason | None = None
    judgement: Judgement = field(default_factory=Judgement)

    @property
    def text(self) -> str:
        """All that the model wrote."""
        return "".join(self.texts)

    @property
    def content(self) -> str:
        """Of it, what is no tool call."""
        return self.text if self.reader is None else self.reader.content

    def take(self, chunk: OutputChunk) -> list[Piece]:
        """Note a chunk; what of it can be shown."""
        self.texts.append(chunk.text)
        if self.logprobs is not None and chunk.logprobs:
            self.logprobs.extend(chunk.logprobs)
        self.reason = chunk.finish_reason
        if self.reader is None:
            return [chunk.text] if chunk.text else []
        pieces = self.reader.push(chunk.text)
        if self.reason is None:
            return pieces
        return [*pieces, *self.reader.flush(cut=self.reason is FinishReason.LENGTH)]

    @property
    def pieces(self) -> list[Piece]:
        """All that can be shown, when it has ended: content, then calls, each in one piece."""
        calls = () if self.reader is None else self.reader.calls
        return [self.content, *(ToolDelta(i, call.arguments, call) for i, call in enumerate(calls))]

    @property
    def finish_reason(self) -> str:
        assert self.reason is not None
        if self.reason is FinishReason.STOP and self.reader is not None and self.reader.calls:
            return "tool_calls"
        return self.reason.value

    def answer(self) -> Answer:
        calls = () if self.reader is None else tuple(self.reader.calls)
        return Answer(self.content, self.finish_reason, self.logprobs, calls)


def sequences(request: EngineRequest, num_choices: int) -> list[EngineRequest]:
    """One engine request for each choice. The first is what a single one would be; a seeded request's others
    have seeds that follow from its own. When these come the first has its token, so they are refused at once
    or not at all."""
    if num_choices == 1:
        return [request]
    if not request.prefix_cache:
        request = replace(request, prefix_cache=True, scope=f"request:{request.request_id}")
    others = []
    for i in range(1, num_choices):
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=_seed(sampling.seed, i))
        request_id = f"{request.request_id}-{i}"
        others.append(replace(request, request_id=request_id, sampling=sampling, keeps_place=True))
    return [request, *others]


def _seed(seed: int, index: int) -> int:
    digest = hashlib.sha256(f"sluice-choice\0{seed}\0{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Merged:
    """Chunks of several sequences as they come, each with its choice's number."""

    def __init__(self, first: AsyncIterator[OutputChunk], later: list[EngineRequest], submit: Submit) -> None:
        """`first` is submitted already."""
        self._streams = [first]
        self._later = later
        self._submit = submit
        self._reading: dict[asyncio.Task[OutputChunk], int] = {}

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutputChunk]]:
        if not self._later:
            async for chunk in self._streams[0]:
                yield 0, chunk
            return
        opening = await anext(self._streams[0])
        if opening.finish_reason in _UNANSWERED:
            yield 0, opening
            return
        self._streams += [self._submit(request) for request in self._later]
        yield 0, opening
        ended = opening.finish_reason is not None
        reading = self._reading
        for index in range(1 if ended else 0, len(self._streams)):
            reading[self._next(index)] = index
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda t: reading[t]):
                index, chunk = reading.pop(task), task.result()
                if chunk.finish_reason is None:
                    reading[self._next(index)] = index
                yield index, chunk

    def _next(self, index: int) -> asyncio.Task[OutputChunk]:
        return asyncio.ensure_future(_chunk(self._streams[index]))

    async def aclose(self) -> None:
        """End the engine's streams now rather than when they are collected as garbage."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        for stream in self._streams:
            aclose = getattr(stream, "aclose", None)
            if aclose is not None:
                await aclose()


async def _chunk(stream: AsyncIterator[OutputChunk]) -> OutputChunk:
    return await anext(stream)
