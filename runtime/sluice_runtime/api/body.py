"""Reads request bodies within a limit. Invariant: never holds more than the limit of a body that is too

large.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Receive

from sluice_runtime.api import errors


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The JSON body's bytes; 413 or 415 as an ApiError."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise errors.ApiError(
            415, "The content type must be application/json.", code="unsupported_media_type", headers=_CLOSE
        )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise errors.body_too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit:
            raise errors.body_too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


_CLOSE = {"connection": "close"}
