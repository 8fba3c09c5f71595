"""Writes one response; exists so that the header waits for the first token wherever an answer comes from.

Invariant: a client that takes nothing for `slow_reader_s` raises `SlowReader`; nothing is buffered for it
beyond that.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Scope, Send

from sluice_runtime.api import errors
from sluice_runtime.api.errors import ApiError
from sluice_runtime.api.exchange import Exchange, outcome_of
from sluice_runtime.api.responses import Format, sse

ABORT = "sluice.abort"  # in scope["extensions"]: drops the connection without waiting for its reader


class SlowReader(Exception):
    """A client that did not take what was sent within the time allowed."""


class Reply:
    """The response being written: nothing, a whole one, or a stream that was started."""

    def __init__(self, exchange: Exchange, scope: Scope, send: Send) -> None:
        self._exchange = exchange
        self._scope = scope
        self._asgi_send = send
        self._started = False
        self._style: Format | None = None

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            with self._exchange.moments.sending():
                async with asyncio.timeout(self._exchange.runtime.settings.slow_reader_s):
                    await self._asgi_send(message)
        except TimeoutError:
            raise SlowReader from None

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._started = True
        if status == 200:
            self._exchange.moments.show()
        headers["x-request-id"] = self._exchange.caller.request_id
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def event(self, data: bytes, style: Format, last: bool) -> None:
        """Send events; the first call, made when there is a first token, sends the header too."""
        if not self._started:
            kind = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            self._style = style
            await self._start(200, kind | style.headers)
            data = style.opening() + data
        if data or last:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def json(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        content = errors.json_response(status, body).body
        sent = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
        await self._start(status, sent)
        await self._send({"type": "http.response.body", "body": bytes(content)})

    async def fail(self, error: ApiError) -> None:
        """End with an error: as an HTTP status while nothing is sent, else as an event after which nothing
        comes.
        """
        started = self._started
        self._exchange.finish(
            error.outcome or outcome_of(error.status),
            200 if started else error.status,
            self._exchange.verdicts,
        )
        try:
            if not started:
                await self.json(error.status, error.body(), dict(error.headers))
                return
            mark = {} if self._style is None or self._style.mark is None else self._style.mark.body()
            data = sse({**error.body(), **mark, "incomplete": True})
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        except SlowReader:
            self.abort()

    def abort(self) -> None:
        abort = self._scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()
