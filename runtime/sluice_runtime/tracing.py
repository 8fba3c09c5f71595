"""The trace that a request belongs to (W3C Trace Context, level 2), so that a verifier's part is found in it.

The pod makes no spans of its own, so both headers are passed on as they came. Invariant: what is passed on is
of their form; a `traceparent` of another is left out, as the standard asks, and refuses no request.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers

MAX_STATE_CHARS = 512
MAX_MEMBERS = 32
_VERSION_0 = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LATER = re.compile(
    r"(?!ff|00)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?"
)
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")

TraceHeaders = tuple[tuple[str, str], ...]


def trace_context(headers: Headers) -> TraceHeaders:
    """`traceparent`, and `tracestate` where there is one, as they are to be passed on; empty: no trace."""
    parents = headers.getlist("traceparent")
    if len(parents) != 1 or not (_VERSION_0.fullmatch(parents[0]) or _LATER.fullmatch(parents[0])):
        return ()
    state = _state(",".join(headers.getlist("tracestate")))
    return ("traceparent", parents[0]), *([("tracestate", state)] if state else [])


def _state(value: str) -> str:
    """The first members that there is room for; nothing where one is not of the form."""
    members = [member for part in value.split(",") if (member := part.strip(" \t"))]
    if len(members) > MAX_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return ""
    while len(kept := ",".join(members)) > MAX_STATE_CHARS:
        members.pop()
    return kept
