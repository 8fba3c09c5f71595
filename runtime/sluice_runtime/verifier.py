"""Asks a user's own HTTP service whether an answer may be given; exists so that business facts can be part of
a contract.

Invariant: what is not a verdict is none, so that the answer is withheld: no answer in time, no connection, a
status that is not 200 (redirects are not followed), a body that is not what docs/contracts/README.md,
"Verifiers", says. At most `MAX_CALLS` calls to one service are open, the others wait within their own time.
No proxy, no compression, one connection a call: a connection that was kept could die under an answer.
Of the user's request nothing but its trace goes along.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import h11
from pydantic import ConfigDict, Field, ValidationError

from sluice_runtime.access import Access, public
from sluice_runtime.contract import MAX_TEXT_BYTES, Finding
from sluice_runtime.podconfig import StrictModel, VerifierSpec
from sluice_runtime.tracing import TraceHeaders

MAX_CALLS = 32
MAX_REPLY_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024

TIMED_OUT = Finding(None, ("sluice/timed-out",))
UNREACHABLE = Finding(None, ("sluice/unreachable",))
BAD_STATUS = Finding(None, ("sluice/bad-status",))
BAD_REPLY = Finding(None, ("sluice/bad-reply",))
TOO_LARGE = Finding(None, ("sluice/too-large",))
NO_TOKEN = Finding(None, ("sluice/no-token",))
NO_AUTHORITY = Finding(None, ("sluice/no-authority",))

Reason = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class _Reply(StrictModel):
    """`reasons` are names, not sentences: they end in evidence, where no text may be. Other fields are
    nobody's business."""

    model_config = ConfigDict(extra="ignore")

    passed: bool = Field(alias="pass")
    reasons: Annotated[tuple[Reason, ...], Field(max_length=8)] = ()


@dataclass(frozen=True)
class Question:
    """What a verifier is told of an answer. `form`: the type of its `response_format`."""

    request_id: str
    policy: str
    rule: str
    task: str
    check: str
    form: str
    truncated: bool
    answer: str

    def body(self) -> bytes:
        return json.dumps(vars(self), ensure_ascii=False).encode("utf-8", "replace")


@dataclass
class Verifiers:
    """The calls of one pod. Belongs to the event loop."""

    _slots: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)

    async def ask(
        self, verifier: VerifierSpec, question: Question, access: Access, trace: TraceHeaders = ()
    ) -> Finding:
        """Its verdict, within `timeout_seconds`. Never raises but when cancelled, which ends the call."""
        if len(question.answer.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
            return TOO_LARGE
        if verifier.token is not None and verifier.token not in access.tokens:
            return NO_TOKEN
        if verifier.authority is not None and verifier.authority not in access.authorities:
            return NO_AUTHORITY
        slot = self._slots.setdefault(verifier.url, asyncio.Semaphore(MAX_CALLS))
        try:
            async with asyncio.timeout(verifier.timeout_seconds), slot:
                return await _post(verifier, question, access, trace)
        except TimeoutError:
            return TIMED_OUT
        except (OSError, UnicodeError):  # an IDNA name that is none is a UnicodeError
            return UNREACHABLE
        except h11.RemoteProtocolError:
            return BAD_REPLY


async def _post(verifier: VerifierSpec, question: Question, access: Access, trace: TraceHeaders) -> Finding:
    parts, body = urlsplit(verifier.url), question.body()
    trusted = public() if verifier.authority is None else access.authorities[verifier.authority]
    is_tls = parts.scheme == "https"
    assert parts.hostname is not None
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if is_tls else 80),
        ssl=trusted if is_tls else None,
        limit=_READ_BYTES,
    )
    try:
        client = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_REPLY_BYTES)
        headers = [
            ("host", parts.netloc),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("accept", "application/json"),
            ("connection", "close"),
            ("user-agent", "sluice-runtime"),
            ("x-request-id", question.request_id),
            *trace,
        ]
        if verifier.token is not None:
            headers.append(("authorization", f"Bearer {access.tokens[verifier.token]}"))
        for event in (
            h11.Request(method="POST", target=parts.path or "/", headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            writer.write(client.send(event) or b"")
        await writer.drain()
        return await _finding(client, reader)
    finally:
        writer.transport.abort()


async def _finding(client: h11.Connection, reader: asyncio.StreamReader) -> Finding:
    reply = bytearray()
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            if event.status_code != 200:
                return BAD_STATUS
        elif isinstance(event, h11.Data):
            reply += event.data
            if len(reply) > MAX_REPLY_BYTES:
                return BAD_REPLY
        elif isinstance(event, h11.EndOfMessage):
            return _parsed(bytes(reply))
        elif not isinstance(event, h11.InformationalResponse):
            return BAD_REPLY


def _parsed(reply: bytes) -> Finding:
    try:
        told = _Reply.model_validate_json(reply)
    except ValidationError:
        return BAD_REPLY
    return Finding(told.passed, told.reasons)
