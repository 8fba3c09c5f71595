"""Reads request bodies within limits. Invariant: never holds more than the limit of a body that is too large,
and nothing of one is made into objects before they are counted.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import Receive

from sluice_runtime.api import errors

MAX_VALUES = 2**18
"""Of a body, counting each item of its lists and objects: what reading them costs holds up all streams."""
# To the end where it has none, so that no quote in it is tried as a beginning.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)


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


def refuse_many_values(data: bytes) -> None:
    """413 as an ApiError for JSON that has more than `MAX_VALUES`."""
    if has_too_many_values(data):
        message = f"The request body has more than {MAX_VALUES} values."
        raise errors.ApiError(413, message, code="request_too_large")


def has_too_many_values(data: bytes) -> bool:
    """Whether JSON has more than `MAX_VALUES`, told without reading it; what is none is told about later."""
    if len(data) <= MAX_VALUES or _num_marks(data) <= MAX_VALUES:
        return False
    # A value has four quotes at most, its name's included; some of those that look escaped may not be.
    if data.count(b'"') - data.count(b'\\"') > 4 * MAX_VALUES + 2:
        return True
    return _num_marks(_STRING.sub(b"", data)) > MAX_VALUES


def _num_marks(data: bytes) -> int:
    """Each value but the first has one before it; those in strings count too."""
    return sum(data.count(mark) for mark in (b",", b"[", b"{"))
