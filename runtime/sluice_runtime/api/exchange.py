"""One data request from its arrival to its record; exists so that whatever happens is counted exactly once.

Invariant: `finish` writes one final record, one metrics sample and one log line, whichever path calls it
first.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from sluice_runtime import logs, pair
from sluice_runtime.access import Access
from sluice_runtime.api.moments import Moments
from sluice_runtime.caller import Caller
from sluice_runtime.contract import Contract, Finding, StreamJudge, Verdict
from sluice_runtime.engine.types import OutputChunk, RequestTiming
from sluice_runtime.evidence import Flags, Outcome, Running, Timing, Tokens
from sluice_runtime.limits import Deadline
from sluice_runtime.podconfig import HeldConfig, Streaming
from sluice_runtime.refusal import is_refusal
from sluice_runtime.repetition import ends_in_loop
from sluice_runtime.state import Runtime

CLIENT_LEFT = 499
_NO_CONTRACT = Contract([])


def worst(judged: Sequence[tuple[Verdict, ...]]) -> tuple[Verdict, ...]:
    """One verdict a check, of all the answers to one request: the worst."""
    found: dict[str, Verdict] = {}
    for verdict in (v for verdicts in judged for v in verdicts):
        known = found.get(verdict.check)
        if known is None or (known.ok, not known.hard) > (verdict.ok, not verdict.hard):
            found[verdict.check] = verdict
    return tuple(found.values())


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
    deadline: Deadline | None = None
    judges: list[StreamJudge] = field(default_factory=list)
    verdicts: tuple[Verdict, ...] | None = None
    flags: Flags = field(default_factory=Flags)
    digest: str = ""
    num_prompt: int = 0
    num_output: int = 0
    finished: bool = False
    _submitted: float | None = None
    _first: float | None = None
    _last: float | None = None
    _timings: dict[int, RequestTiming] = field(default_factory=dict)
    _running: Running = field(init=False)
    moments: Moments = field(init=False)
    _began_with: Access = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._began_with = self.runtime.access.current()
        self.moments = Moments(self.arrived)
        self._running = Running(self.caller, self.arrived)
        self.runtime.running[self.id] = self._running

    @property
    def cut(self) -> asyncio.Event:
        """Set where the request may not go on."""
        return self._running.cut

    @property
    def contract(self) -> Contract:
        """What the answer is judged by; a pair's is compared, and counts for nothing else."""
        assert self.held is not None
        return _NO_CONTRACT if self.caller.pair else self.held.contract

    @property
    def access(self) -> Access:
        """What verifiers are reached with: as it stands now, or else as it stood when the request came. Its
        configuration may have left since, and what that named with it."""
        return self.runtime.access.current().over(self._began_with)

    @property
    def streaming(self) -> Streaming:
        """When the answer may be shown, and says that it may."""
        assert self.held is not None
        if self.caller.pair:
            return "Immediate"
        asked = self.held.spec.streaming
        # Without a hard check there is nothing to pass: such an answer is held too, but verified it is not.
        return "Verified" if not self._direct and self.contract.can_fail else asked

    @property
    def withholds(self) -> bool:
        """Whether all of the answer is judged before a byte of it is shown."""
        return self.streaming == "Verified" or not self._direct

    @property
    def _direct(self) -> bool:
        assert self.held is not None
        return self.held.spec.features_for(self.caller.task, self.caller.tenant).direct_streaming

    def submitted(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self._submitted = time.monotonic()

    def saw(self, chunk: OutputChunk, choice: int = 0) -> None:
        """Take times and counts from a chunk of the engine. `choice`: of which of the answers asked for."""
        if chunk.token_ids:
            self._last = time.monotonic()
            if self._first is None:
                self._first = self._last
                self._running.first_token = True
            self.num_output += len(chunk.token_ids)
        if chunk.timing is not None:
            self._timings[choice] = chunk.timing

    @property
    def tokens(self) -> Tokens:
        """The prompt counts once, however many answers to it were asked for."""
        cached = self._timings[0].num_cached_tokens if 0 in self._timings else 0
        return Tokens(
            self.num_prompt,
            cached,
            self.num_output,
            sum(t.num_guessed_tokens for t in self._timings.values()),
            sum(t.num_accepted_tokens for t in self._timings.values()),
        )

    def timing(self) -> Timing:
        """All stages, as far as they have come."""
        told, moments = self.caller.reported, self.moments
        decodes = [t.total_s - t.ttft_s for t in self._timings.values() if t.ttft_s is not None]
        return replace(
            self._generating(),
            decode_s=max(decodes, default=None),
            gateway_s=told.gateway_s(moments.arrived_at),
            user_s=told.user_s(moments.arrived_at),
            verify_s=moments.verify_s,
            stream_s=moments.stream_s,
            application=told.stages,
            visible_s=moments.visible_s,
            verified_s=moments.verified_s,
            complete_s=moments.complete_s,
        )

    def _generating(self) -> Timing:
        """The engine's own times where it gave them: how fast a client reads says nothing about the arm. Of
        several answers: the first one's way to its first token, the mean time a token, the worst jitter, all
        of the replica's time that they used."""
        now = time.monotonic()
        first, timings = self._timings.get(0), list(self._timings.values())
        if first is not None and self._submitted is not None:
            lead = self._submitted - self.arrived
            ttft = None if first.ttft_s is None else lead + first.ttft_s
            total = lead + first.total_s if len(timings) == 1 else now - self.arrived
            tpots = [t.tpot_s for t in timings if t.tpot_s is not None]
            jitters = [t.jitter_s for t in timings if t.jitter_s is not None]
            busy = [t.busy_s for t in timings if t.busy_s is not None]
            return Timing(
                first.queue_s,
                first.prefill_s,
                ttft,
                sum(tpots) / len(tpots) if tpots else None,
                total,
                max(jitters, default=None),
                sum(busy) if busy else None,
            )
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
                status=200 if self.caller.mirror or self.moments.visible is not None else 502,
                timing=self.timing(),
                tokens=self.tokens,
                verdicts=tuple(verdicts),
                final=False,
            )

    def verifiers_said(self, findings: Iterable[Finding]) -> None:
        """Count their answers; verdicts tell the rest."""
        model = None if self.held is None else self.held.spec.model
        for finding in findings:
            self.runtime.metrics.verifier(self.caller, model, finding.result)

    def answered(self, text: str, tool_failed: bool = False) -> None:
        """Take what evidence says of a whole answer, so that its text can be dropped. What is so of one of
        several answers is so of the request."""
        self.flags = Flags(
            refused=self.flags.refused or is_refusal(text),
            repeated=self.flags.repeated or ends_in_loop(text),
            tool_failed=self.flags.tool_failed or tool_failed,
        )
        token = self.runtime.settings.admin_token
        if self.caller.pair and token is not None:
            self.digest = pair.digest(token.current(), self.caller.attempt, text)

    def finish(self, outcome: Outcome, status: int, verdicts: tuple[Verdict, ...] | None = None) -> None:
        """End the request; later calls change nothing. Without `verdicts`, what was seen in the stream
        counts.
        """
        if self.finished:
            return
        self.finished = True
        if status == 200 and outcome in ("ok", "truncated"):
            self.moments.end()
        self.runtime.running.pop(self.id, None)
        if verdicts is None:
            verdicts = worst([judge.seen for judge in self.judges])
        timing, tokens = self.timing(), self.tokens
        if self.caller.routed:
            self.runtime.evidence.append(
                self.caller,
                outcome=outcome,
                status=status,
                timing=timing,
                tokens=tokens,
                verdicts=verdicts,
                flags=self.flags,
                digest=self.digest,
            )
        model = None if self.held is None else self.held.spec.model
        self.runtime.metrics.observe(self.caller, model, outcome, timing, tokens, verdicts, self.flags)
        logs.event(
            "request",
            request_id=self.caller.request_id,
            outcome=outcome,
            status=status,
            policy=self.caller.policy,
            rule=self.caller.rule,
            arm=self.caller.arm,
            mirror=self.caller.mirror,
            pair=self.caller.pair,
            failed=[v.check for v in verdicts if not v.ok],
            **timing.body(),
            tokens=tokens.body(),
        )
