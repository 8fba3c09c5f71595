"""The engine as its callers see it: submit, cancel, load, health. Exists to keep threads out of everything else.

Invariant: one thread, started by `start`, owns scheduler, runner and KV; every other thread only puts things into a
queue or reads a snapshot. No exception of a request ends that thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from sluice_runtime.engine.types import EngineConfig, EngineLoad, EngineRequest, OutputChunk, RunningAge

if TYPE_CHECKING:
    from sluice_runtime.engine.tokenizer import Tokenizer
    from sluice_runtime.models import LoadedModel


class Engine:
    """Continuous batching over one loaded model."""

    max_model_len: int
    tokenizer: Tokenizer

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the loop's thread and run a warm-up forward; returns when the engine is ready for requests."""
        raise NotImplementedError

    def stop(self) -> None:
        """Cancel what runs, end the thread and wait for it."""
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> AsyncIterator[OutputChunk]:
        """Queue a request and return its chunks; call within a running asyncio loop.

        A plain function: `InvalidRequest`, `RequestTooLong`, `QueueFull` and `EngineStopped` are raised here, before
        anything is queued. The first chunk arrives with the first token; the last has a `finish_reason`. The caller
        calls `cancel` when it stops reading early (in a `finally`; it is idempotent).
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """End a request at the next step and return its KV. Idempotent; unknown ids are ignored; any thread."""
        raise NotImplementedError

    def load(self) -> EngineLoad:
        """What the engine carries now."""
        raise NotImplementedError

    def running_ages(self) -> list[RunningAge]:
        """All requests that have not ended, waiting ones included, oldest first."""
        raise NotImplementedError

    def last_step_age(self) -> float:
        """Seconds since the loop last came round; it comes round when idle too."""
        raise NotImplementedError

    def healthy(self) -> bool:
        """Whether the loop is alive and has come round within the last 30 seconds."""
        raise NotImplementedError
