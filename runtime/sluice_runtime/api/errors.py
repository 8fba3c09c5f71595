"""Every refusal in OpenAI's error shape, in one place, so that no path can answer in another.

Invariant: a message says what the caller can do about it and never holds model output, stack traces or
internals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from sluice_runtime.evidence import Outcome

INVALID = "invalid_request_error"
LIMITED_HEADER = "x-sluice-limited"
WITHHELD = {"x-envoy-ratelimited": "true"}
"""Envoy never retries an answer with this header, whatever its status: what was judged is not generated
again, while a 502 of something broken on the way is tried elsewhere. The gateway takes it off."""


@dataclass
class ApiError(Exception):
    """A refusal with its HTTP status. `param` names the body's offending field, `code` is for programs.
    `outcome` is what evidence says of it, where that does not follow from the status."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    outcome: Outcome | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.status, self.body(), self.headers)


def json_response(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """UTF-8 as it is, and never `NaN`: an answer is always valid JSON."""
    content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return Response(content, status, dict(headers or {}), "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, INVALID, param, code)


def not_supported(what: str, param: str) -> ApiError:
    return ApiError(400, f"{what} is not supported yet.", INVALID, param, "unsupported_parameter")


def bad_credential() -> ApiError:
    return ApiError(
        401,
        "This address serves the Sluice gateway only: call the gateway with your API key.",
        "authentication_error",
        code="invalid_credential",
    )


def model_not_found(model: str) -> ApiError:
    name = model if len(model) <= 200 else model[:200] + "…"
    message = f"The model `{name}` does not exist or you do not have access to it."
    return ApiError(404, message, INVALID, "model", "model_not_found")


def config_unknown(version: str) -> ApiError:
    named = f"configuration {version[:80]!r}" if version else "no configuration"
    message = f"The route names {named}, which this pod does not hold (yet)."
    return ApiError(503, message, "server_error", code="config_unknown", headers={"retry-after": "1"})


def withdrawn() -> ApiError:
    """As if the client had left: nobody is to blame a second time. Who asks anew meets another arm, but a
    retry by the gateway would not."""
    message = "What was answering, or the access of who asked, has been withdrawn."
    return ApiError(503, message, "server_error", code="withdrawn", headers=WITHHELD, outcome="cancelled")


def loading() -> ApiError:
    message = "The model is still being loaded. Try again shortly."
    return ApiError(503, message, "server_error", code="loading", headers={"retry-after": "5"})


def queue_full(num_waiting: int) -> ApiError:
    return ApiError(
        429,
        f"The queue is full ({num_waiting} requests waiting). Try again shortly.",
        "rate_limit_error",
        code="queue_full",
        headers={"retry-after": "1"},
    )


def displaced() -> ApiError:
    """For a request that was queued: the same as had the queue been full when it came."""
    return ApiError(
        429,
        "The queue is full and this request's tenant had the largest part of it. Try again shortly.",
        "rate_limit_error",
        code="queue_full",
        headers={"retry-after": "1"},
    )


def tenant_limited(limit: int) -> ApiError:
    """The header tells the gateway's access records that this is no full queue."""
    return ApiError(
        429,
        f"At most {limit} requests of yours are taken at once. Try again when one has ended.",
        "rate_limit_error",
        code="tenant_limit",
        headers={"retry-after": "1", LIMITED_HEADER: "tenant"},
        outcome="limited",
    )


def body_too_large(limit: int) -> ApiError:
    message = f"The request body is larger than {limit} bytes."
    return ApiError(413, message, INVALID, code="request_too_large", headers={"connection": "close"})


def body_too_slow() -> ApiError:
    message = "The request body did not arrive in time."
    return ApiError(408, message, INVALID, code="request_timeout", headers={"connection": "close"})


def contract_violation(checks: list[str]) -> ApiError:
    message = f"The model's answer broke its contract ({', '.join(checks)}) and was withheld."
    return ApiError(502, message, "server_error", code="contract_violation", headers=WITHHELD)


def verifier_unavailable(checks: list[str]) -> ApiError:
    message = f"There is no verdict on the model's answer ({', '.join(checks)}), so it was withheld."
    return ApiError(502, message, "server_error", code="verifier_unavailable", headers=WITHHELD)


def answer_incomplete(checks: list[str], param: str) -> ApiError:
    """The client's own limit or the route's: no failure of the model, and not to be tried again elsewhere."""
    message = (
        f"The answer hit its length limit before it could pass ({', '.join(checks)}), so it was withheld. "
        f"Please try again with higher {param}."
    )
    return ApiError(400, message, INVALID, param, "answer_incomplete", outcome="truncated")


def form_broken() -> ApiError:
    message = "The model's answer is not of the form that response_format asks for, and was withheld."
    param, code = "response_format", "response_format_violation"
    return ApiError(502, message, "server_error", param, code, headers=WITHHELD)


def engine_error(message: str = "The engine failed on this request.") -> ApiError:
    return ApiError(500, message, "server_error", code="engine_error")


def engine_unavailable() -> ApiError:
    message = "The engine is not running."
    return ApiError(503, message, "server_error", code="engine_unavailable", headers={"retry-after": "1"})


def deadline_exceeded() -> ApiError:
    return ApiError(
        504,
        "The request's deadline passed before its answer was complete.",
        "server_error",
        code="deadline_exceeded",
    )


def patience_over() -> ApiError:
    """As if the client had left. OpenAI's own clients would else try a 408 again, with as little time."""
    return ApiError(
        408,
        "The time that sluice-timeout allows was over before the answer was complete.",
        INVALID,
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
        outcome="cancelled",
    )


def internal() -> ApiError:
    return ApiError(500, "The server failed on this request.", "server_error", code="internal_error")
