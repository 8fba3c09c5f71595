"""The API's own description at `/openapi.json`, from the types that parse requests, so that it can't lag.

Invariant: it is the same for everybody and names no model, tenant or limit of a route.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic.json_schema import models_json_schema

from sluice_runtime.api.schemas import ChatRequest, CompletionRequest

_ERROR: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "additionalProperties": False,
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE: dict[str, Any] = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer", "minimum": 1},
        "completion_tokens": {"type": "integer", "minimum": 0},
        "total_tokens": {"type": "integer", "minimum": 1},
        "prompt_tokens_details": {"type": "object"},
        "completion_tokens_details": {"type": "object"},
    },
}
_LOGPROBS = {"type": ["object", "null"]}
_TOOL_CALL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "refusal": {"type": "null"},
        "tool_calls": {"type": "array", "minItems": 1, "items": _TOOL_CALL},
    },
}
_MODEL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}
_STATUSES = {
    400: "Something in the request is odd: `param` names it",
    401: "No credential, or a wrong one",
    404: "No such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "The queue is full",
    500: "The engine failed on this request",
    502: "The answer broke its contract, or the form that was asked for, or could not be verified: withheld",
    503: "Not ready",
    504: "The deadline passed",
}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    shared = {
        "index": {"type": "integer", "minimum": 0},
        "logprobs": _LOGPROBS,
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    }
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": [*shared, *choice],
                    "properties": {**shared, **choice},
                },
            },
            "usage": _USAGE,
        },
    }


def _responses(body: dict[str, Any], streams: bool, statuses: tuple[int, ...]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": body}}
    if streams:
        # Without a schema: OpenAPI 3.1 has none for a stream's events, and some readers take one for theirs.
        content["text/event-stream"] = {}
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    return found | {str(s): {"description": _STATUSES[s], "content": failed} for s in statuses}


def _generating(summary: str, request: str, body: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{request}"}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": _responses(body, True, tuple(_STATUSES)),
        }
    }


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, defined = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    models = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
    }
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice runtime", "version": "1"},
        "paths": {
            "/v1/chat/completions": _generating(
                "Answer a chat", "ChatRequest", _answer("chat.completion", {"message": _MESSAGE})
            ),
            "/v1/completions": _generating(
                "Go on with a text",
                "CompletionRequest",
                _answer("text_completion", {"text": {"type": "string"}}),
            ),
            "/v1/models": {
                "get": {
                    "summary": "The model of the caller's route",
                    "responses": _responses(models, False, (400, 401, 503)),
                }
            },
            "/v1/models/{name}": {
                "get": {
                    "summary": "One model",
                    "parameters": [name],
                    "responses": _responses(_MODEL, False, (400, 401, 404, 503)),
                }
            },
        },
        "components": {"schemas": {"Error": _ERROR, **defined["$defs"]}},
    }
