"""Requests made up from our own description of the API: whatever comes, an answer of a known shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from unit.runtime.conformance.conftest import Server

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
GENERATING = ("/v1/chat/completions", "/v1/completions")


def _cases(server: Server, path: str, mode: GenerationMode) -> Any:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    method = "POST" if path in GENERATING else "GET"
    return schema[path][method].as_strategy(generation_mode=mode)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", GENERATING)
def test_whatever_is_sent(server: Server, path: str, mode: GenerationMode) -> None:
    statuses = set()

    @given(case=_cases(server, path, mode))
    @settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            # A long answer of random text is no test of anything.
            for name in ("max_tokens", "max_completion_tokens"):
                if isinstance(case.body.get(name), int):
                    case.body[name] = min(case.body[name], 4)
            if mode is GenerationMode.POSITIVE and path == GENERATING[0]:
                case.body.setdefault("max_completion_tokens", case.body.get("max_tokens") or 4)
        response = case.call(timeout=120)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    run()
    assert 400 in statuses
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    assert server.engine.healthy()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}"])
def test_models(server: Server, path: str) -> None:
    @given(case=_cases(server, path, GenerationMode.POSITIVE))
    @settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
    def run(case: Any) -> None:
        case.validate_response(case.call(timeout=120), checks=CHECKS)

    run()
