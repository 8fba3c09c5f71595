"""Names and small pieces that routes, filters and the listener share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from envoy.config.route.v3 import route_components_pb2

from .messages import Message

IDENTITY = "x-sluice-identity"
LIMITED = "x-sluice-limited"
"""In an answer: the pod refused the request for its tenant's own cap."""
METADATA = "sluice"
OVERWRITE = 2
INVALID = "invalid_request_error"
ENDLESS = 1 << 62


def header(name: str, value: str) -> dict[str, Any]:
    """A header that replaces what is there."""
    # An empty value is kept: it says "no rollout", where an absent header would say nothing.
    return {
        "header": {"key": name, "value": value.replace("%", "%%")},
        "append_action": OVERWRITE,
        "keep_empty_value": True,
    }


def one_of(name: str, values: Iterable[str]) -> dict[str, Any]:
    """A header that has one of these values."""
    values = [str(value) for value in values]
    if len(values) == 1:
        return {"name": name, "string_match": {"exact": values[0]}}
    return {"name": name, "string_match": {"safe_regex": {"regex": "|".join(map(re.escape, values))}}}


def model_is(matcher: dict[str, Any]) -> dict[str, Any]:
    """A body whose ``model`` is so."""
    return {"filter": METADATA, "path": [{"key": "model"}], "value": {"string_match": matcher}}


def answer(name: str, match: dict[str, Any], status: int, body: str) -> Message:
    """A route that the gateway answers itself."""
    return route_components_pb2.Route(
        name=name, match=match, direct_response={"status": status, "body": {"inline_string": body}}
    )
