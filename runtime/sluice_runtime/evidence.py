"""What the pod tells the operator about its requests: a bounded ring of records, followed by cursors.

Invariant: memory depends on the ring's capacity alone. A follower holds one number, its cursor; one that is
too slow finds a gap in `seq` instead of making anything grow. No text, user or conversation is ever in
here.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sluice_runtime.caller import Caller
from sluice_runtime.contract import Verdict

SCHEMA = "874ec1622f27f740"
"""Digest of docs/contracts/evidence.schema.json, by which an operator knows at once whether it can read what
is told here; README there, "Versions"."""
CAPACITY = 10_000
HEARTBEAT_SECONDS = 1.0
_BATCH = 256

Outcome = Literal["ok", "truncated", "cancelled", "error", "rejected", "limited"]
"""`limited`: refused for the tenant's own cap, which says nothing of who would have answered."""


@dataclass(frozen=True)
class Timing:
    """Seconds; None for a stage that was not reached."""

    queue_s: float | None
    prefill_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    jitter_s: float | None = None
    busy_s: float | None = None
    decode_s: float | None = None
    gateway_s: float | None = None
    user_s: float | None = None
    verify_s: float | None = None
    stream_s: float | None = None
    visible_s: float | None = None
    verified_s: float | None = None
    complete_s: float | None = None
    application: Mapping[str, float] = field(default_factory=dict)

    @property
    def user_ttft_s(self) -> float | None:
        """From the user's asking to the first visible token."""
        return None if self.user_s is None or self.visible_s is None else self.user_s + self.visible_s

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by name of the stage, the application's own among them. Sending overlaps decoding."""
        found = {
            "gateway": self.gateway_s,
            "queue": self.queue_s,
            "prefill": self.prefill_s,
            "decode": self.decode_s,
            "verification": self.verify_s,
            "stream": self.stream_s,
        }
        return {**{k: s for k, s in found.items() if s is not None}, **self.application}

    def body(self) -> dict[str, Any]:
        stages = {
            "gateway_s": self.gateway_s,
            "user_s": self.user_s,
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "jitter_s": self.jitter_s,
            "busy_s": self.busy_s,
            "decode_s": self.decode_s,
            "verify_s": self.verify_s,
            "stream_s": self.stream_s,
            "visible_s": self.visible_s,
            "verified_s": self.verified_s,
            "complete_s": self.complete_s,
        }
        return {
            **{k: None if v is None else round(v, 6) for k, v in stages.items()},
            "total_s": round(self.total_s, 6),
            "application": {k: round(v, 6) for k, v in self.application.items()},
        }


@dataclass(frozen=True)
class Flags:
    """What a whole answer looks like, whatever its contract says."""

    refused: bool = False
    repeated: bool = False
    tool_failed: bool = False

    def body(self) -> dict[str, bool]:
        return {"refused": self.refused, "repeated": self.repeated, "tool_failed": self.tool_failed}


@dataclass(frozen=True)
class Tokens:
    """Of a request. `guessed`: by speculative decoding, and put to the test; `accepted`: of these, right."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    guessed: int = 0
    accepted: int = 0

    def body(self) -> dict[str, int]:
        return asdict(self)


def _route(caller: Caller) -> dict[str, Any]:
    return {
        "request_id": caller.request_id,
        "policy": caller.policy,
        "rule": caller.rule,
        "arm": caller.arm,
        "attempt": caller.attempt,
        "tenant": caller.tenant,
        "task": caller.task,
        "unit": caller.unit,
        "mirror": caller.mirror,
    }


@dataclass
class Running:
    """A request that has not ended. `started` is in seconds of `time.monotonic`; `cut` is set where it may
    not go on."""

    caller: Caller
    started: float
    first_token: bool = False
    cut: asyncio.Event = field(default_factory=asyncio.Event)

    def body(self, now: float) -> dict[str, Any]:
        return {**_route(self.caller), "age_s": round(now - self.started, 6), "first_token": self.first_token}


@dataclass
class EvidenceLog:
    """Records of this process. Belongs to the event loop: append and follow from there only."""

    capacity: int = CAPACITY
    boot: str = field(default_factory=lambda: uuid.uuid4().hex)
    schema: str = SCHEMA
    seq: int = 0
    _ring: deque[str] = field(default_factory=deque)
    _followers: set[asyncio.Event] = field(default_factory=set)

    @property
    def oldest(self) -> int:
        """`seq` of the oldest record still held; one more than `seq` where none is."""
        return self.seq - len(self._ring) + 1

    def append(
        self,
        caller: Caller,
        *,
        outcome: Outcome,
        status: int,
        timing: Timing,
        tokens: Tokens,
        verdicts: tuple[Verdict, ...] = (),
        flags: Flags = Flags(),
        digest: str = "",
        final: bool = True,
    ) -> None:
        """Add a record and wake all followers. `digest` is of a pair's answer."""
        self.seq += 1
        record = {
            "type": "record",
            "seq": self.seq,
            "time": round(time.time(), 6),
            **_route(caller),
            "config": caller.config,
            "outcome": outcome,
            "status": status,
            "final": final,
            "timing": timing.body(),
            "tokens": tokens.body(),
            "flags": flags.body(),
            "pair": caller.pair,
            "digest": digest,
            "verdicts": [verdict.body() for verdict in verdicts],
        }
        self._ring.append(_line(record))
        if len(self._ring) > self.capacity:
            self._ring.popleft()
        for follower in self._followers:
            follower.set()

    def after(self, cursor: int, limit: int = _BATCH) -> tuple[int, list[str]]:
        """Up to `limit` held lines with `seq` > `cursor`, and the cursor after them."""
        first = max(cursor + 1, self.oldest)
        last = min(self.seq, first + limit - 1)
        offset = self.oldest
        lines = [self._ring[i - offset] for i in range(first, last + 1)]
        return max(cursor, last), lines

    async def follow(
        self,
        since: int,
        boot: str,
        hello: Callable[[], Mapping[str, Any]],
        heartbeat: Callable[[], Mapping[str, Any]],
        heartbeat_s: float = HEARTBEAT_SECONDS,
    ) -> AsyncGenerator[str, None]:
        """Chunks of whole lines: hello, what is held after `since` (all of it if `boot` is not this one),
        then as it comes.

        `hello` and `heartbeat` give what this log does not know: versions, identity, load and what is
        running.
        """
        cursor = since if boot == self.boot else 0
        wake = asyncio.Event()
        self._followers.add(wake)
        try:
            yield _line(
                {
                    "type": "hello",
                    "schema": self.schema,
                    "boot": self.boot,
                    "seq": self.seq,
                    "oldest": min(self.oldest, self.seq),
                    **hello(),
                }
            )
            beat_at = time.monotonic()
            while True:
                wake.clear()
                cursor, lines = self.after(cursor)
                if time.monotonic() >= beat_at:
                    lines.append(
                        _line({"type": "heartbeat", "time": time.time(), "seq": self.seq, **heartbeat()})
                    )
                    beat_at = time.monotonic() + heartbeat_s
                if lines:
                    yield "".join(lines)
                if cursor >= self.seq:
                    await _wait(wake, beat_at - time.monotonic())
        finally:
            self._followers.discard(wake)


async def _wait(wake: asyncio.Event, seconds: float) -> None:
    if seconds <= 0:
        return
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        pass


def _line(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False) + "\n"
