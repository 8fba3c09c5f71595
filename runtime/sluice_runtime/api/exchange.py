"""One data request from its arrival to its record; exists so that whatever happens is counted exactly once.

Invariant: `finish` writes one final record, one metrics sample and one log line, whichever path calls it
first.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from sluice_runtime import logs
from sluice_runtime.caller import Caller
from sluice_runtime.contract import StreamJudge, Verdict
from sluice_runtime.engine.types import OutputChunk, RequestTiming
from sluice_runtime.evidence import Outcome, Running, Timing, Tokens
from sluice_runtime.podconfig import HeldConfig
from sluice_runtime.state import Runtime

CLIENT_LEFT = 499


def outcome_of(status: int) -> Outcome:
    return "error" if status >= 500 else "rejected"


@dataclass
class Exchange:
    """`id` is unique in this process; the gateway's request id is not: retries and mirrors carry it too."""

    runtime: Runtime
    caller: Caller
    arrived: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    held: HeldConfig | None = None
    judge: StreamJudge | None = None
    verdicts: tuple[Verdict, ...] | None = None
    num_prompt: int = 0
    num_output: int = 0
    finished: bool = False
    _submitted: float | None = None
    _first: float | None = None
    _last: float | None = None
    _timing: RequestTiming | None = None
    _running: Running = field(init=False)

    def __post_init__(self) -> None:
        self._running = Running(self.caller, self.arrived)
        self.runtime.running[self.id] = self._running

    def submitted(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self._submitted = time.monotonic()

    def saw(self, chunk: OutputChunk) -> None:
        """Take times and counts from a chunk of the engine."""
        if chunk.token_ids:
            self._last = time.monotonic()
            if self._first is None:
                self._first = self._last
                self._running.first_token = True
            self.num_output += len(chunk.token_ids)
        if chunk.timing is not None:
            self._timing = chunk.timing

    @property
    def tokens(self) -> Tokens:
        cached = self._timing.num_cached_tokens if self._timing is not None else 0
        return Tokens(self.num_prompt, cached, self.num_output)

    def timing(self) -> Timing:
        """The engine's own times where it gave them: how fast a client reads says nothing about the arm."""
        now = time.monotonic()
        if self._timing is not None and self._submitted is not None:
            lead, t = self._submitted - self.arrived, self._timing
            ttft = None if t.ttft_s is None else lead + t.ttft_s
            return Timing(t.queue_s, t.prefill_s, ttft, t.tpot_s, lead + t.total_s)
        if self._first is None or self._last is None:
            return Timing(None, None, None, None, now - self.arrived)
        tpot = (self._last - self._first) / (self.num_output - 1) if self.num_output > 1 else None
        return Timing(None, None, self._first - self.arrived, tpot, now - self.arrived)

    def warn(self, verdicts: list[Verdict]) -> None:
        """The early record of a hard violation, while the answer is still being generated."""
        if self.caller.routed:
            self.runtime.evidence.append(
                self.caller,
                outcome="ok" if self.caller.mirror else "error",  # a mirror goes on; a user's stream is cut
                status=200,
                timing=self.timing(),
                tokens=self.tokens,
                verdicts=tuple(verdicts),
                final=False,
            )

    def finish(self, outcome: Outcome, status: int, verdicts: tuple[Verdict, ...] | None = None) -> None:
        """End the request; later calls change nothing. Without `verdicts`, what was seen in the stream
        counts.
        """
        if self.finished:
            return
        self.finished = True
        self.runtime.running.pop(self.id, None)
        if verdicts is None:
            verdicts = self.judge.seen if self.judge is not None else ()
        timing, tokens = self.timing(), self.tokens
        if self.caller.routed:
            self.runtime.evidence.append(
                self.caller, outcome=outcome, status=status, timing=timing, tokens=tokens, verdicts=verdicts
            )
        self.runtime.metrics.observe(self.caller, self.held is not None, outcome, timing, tokens, verdicts)
        logs.event(
            "request",
            request_id=self.caller.request_id,
            outcome=outcome,
            status=status,
            policy=self.caller.policy,
            rule=self.caller.rule,
            arm=self.caller.arm,
            mirror=self.caller.mirror,
            failed=[v.check for v in verdicts if not v.ok],
            **timing.body(),
            tokens=tokens.body(),
        )
