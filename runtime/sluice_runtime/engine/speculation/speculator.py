"""Speculation as the engine sees it: what to guess before a step, what came of it after. Exists so that the
engine's loop holds no more than two calls.

Invariant: a fault in guessing ends guessing, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from sluice_runtime.engine.plan import RequestState, SchedulerOutput, TokenEvent
from sluice_runtime.engine.sampler import SamplerState
from sluice_runtime.engine.speculation.controller import (
    Always,
    Controller,
    Judged,
    Phase,
    Progress,
    Stream,
)
from sluice_runtime.engine.speculation.proposer import Proposer, Wanted
from sluice_runtime.engine.types import SpeculationLoad

logger = logging.getLogger(__name__)


class Speculator:
    """The engine's thread owns it; `load` may be called by any."""

    def __init__(self, proposer: Proposer, controller: Controller | Always, num_tokens: int) -> None:
        self._proposer: Proposer | None = proposer
        self._controller = controller
        self._drafted = [0] * num_tokens
        self._right = [0] * num_tokens
        self._num_forwards = self._num_tokens = 0

    def propose(
        self, now: float, running: Iterable[RequestState], samplers: Mapping[str, SamplerState]
    ) -> dict[str, list[int]]:
        """Guesses for those of the running requests that lack one token and may have them."""
        if self._proposer is None:
            return {}
        streams = {s.request_id: s for s in running if s.num_lacking == 1 and s.request_id in samplers}
        counts = self._controller.plan(
            now, {i: Stream(s.tenant, s.request.task) for i, s in streams.items() if s.request.speculation}
        )
        wanted = []
        for request_id, num_tokens in counts.items():
            state, sampler = streams[request_id], samplers[request_id]
            # Once the answer is as long as it may be, nothing follows the last guess.
            num = min(num_tokens, state.request.sampling.max_tokens - state.num_output_tokens - 1)
            if num > 0:
                params = state.request.sampling
                wanted.append(Wanted(request_id, state.token_ids, num, params, sampler.uniform_ahead))
        if not wanted:
            return {}
        try:
            return self._proposer.propose(wanted)
        except Exception:
            logger.exception("guessing failed; there is none until the next start")
            self._proposer = None
            return {}

    def saw(self, now: float, seconds: float, plan: SchedulerOutput, events: Iterable[TokenEvent]) -> None:
        """A step has ended that took `seconds` to compute."""
        got = {event.request_id: len(event.token_ids) for event in events}
        progress: dict[str, Progress] = {}
        for chunk in plan.chunks:
            num_tokens = got.get(chunk.request_id, 0)
            if not chunk.is_stream or not num_tokens:
                continue
            # The end of an answer may hide that later guesses were right too; they count as wrong.
            progress[chunk.request_id] = Progress(num_tokens, chunk.num_drafted, num_tokens - 1)
            self._num_forwards += 1
            self._num_tokens += num_tokens
            for i in range(chunk.num_drafted):
                self._drafted[i] += 1
                self._right[i] += i < num_tokens - 1
        self._controller.saw(now, seconds, progress, prompts=len(progress) < len(plan.chunks))

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        if self._proposer is not None:
            self._proposer.forget(request_id)

    def load(self) -> SpeculationLoad:
        controller = self._controller
        return SpeculationLoad(
            tuple(self._drafted),
            tuple(self._right),
            self._num_forwards,
            self._num_tokens,
            controller.num_workloads(Phase.ON),
            controller.num_workloads(Phase.OFF),
        )

    def judged(self) -> list[Judged]:
        """What the controller holds, for measurements; call it while no step runs."""
        return self._controller.judged()

    @property
    def num_held(self) -> int:
        """Requests that something is kept of."""
        return 0 if self._proposer is None else self._proposer.num_held

    def check_integrity(self) -> None:
        if self._proposer is not None:
            self._proposer.check_integrity()
