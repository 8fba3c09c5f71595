"""The data port: OpenAI's API, probes and metrics. Invariant: every answer that is not a success has OpenAI's

error shape.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice_runtime import logs
from sluice_runtime.api import errors
from sluice_runtime.api.data import DataEndpoint, admit, config_for
from sluice_runtime.api.errors import ApiError, json_response
from sluice_runtime.api.openapi import document
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest
from sluice_runtime.state import Runtime


async def on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return ApiError(
            404, f"Unknown URL ({request.method} {request.url.path[:200]}).", code="unknown_url"
        ).response()
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = f"{request.method} is not allowed here; use {headers.get('Allow', 'another method')}."
        return ApiError(405, message, code="method_not_allowed", headers=headers).response()
    return ApiError(error.status_code, "The request could not be served.", headers=headers).response()


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_failure(request: Request, error: Exception) -> Response:
    logs.failure("handler failed", error, path=request.url.path[:200])
    return errors.internal().response()


HANDLERS = {HTTPException: on_http_exception, ApiError: on_api_error, Exception: on_failure}


class _Probes:
    """What Kubernetes and Prometheus ask."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def healthz(self, request: Request) -> Response:
        healthy = self._runtime.healthy
        return json_response(200 if healthy else 503, {"healthy": healthy})

    async def readyz(self, request: Request) -> Response:
        runtime = self._runtime
        why = "ready"
        if not runtime.ready:
            why = "draining" if runtime.draining else "loading" if runtime.engine is None else "unhealthy"
        return json_response(200 if runtime.ready else 503, {"ready": runtime.ready, "reason": why})

    async def metrics(self, request: Request) -> Response:
        return Response(self._runtime.metrics.render(), media_type="text/plain; version=0.0.4")


class _Models:
    """`/v1/models`: the one model that the caller's route is about."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def _name(self, headers: Headers) -> str:
        caller = admit(self._runtime, headers)
        return config_for(self._runtime, caller).spec.model

    def _body(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._runtime.started, "owned_by": "sluice"}

    async def all(self, request: Request) -> Response:
        return json_response(200, {"object": "list", "data": [self._body(self._name(request.headers))]})

    async def one(self, request: Request) -> Response:
        name, asked = self._name(request.headers), request.path_params["name"]
        if asked != name:
            raise errors.model_not_found(asked)
        return json_response(200, self._body(name))


async def described(request: Request) -> Response:
    return json_response(200, document())


def api_app(runtime: Runtime) -> Starlette:
    """The ASGI app of port 8000."""
    probes, models = _Probes(runtime), _Models(runtime)
    routes = [
        Route("/v1/chat/completions", DataEndpoint(runtime, ChatRequest), methods=["POST"]),
        Route("/v1/completions", DataEndpoint(runtime, CompletionRequest), methods=["POST"]),
        Route("/v1/models", models.all, methods=["GET"]),
        Route("/v1/models/{name:path}", models.one, methods=["GET"]),
        Route("/openapi.json", described, methods=["GET"]),
        Route("/healthz", probes.healthz, methods=["GET"]),
        Route("/readyz", probes.readyz, methods=["GET"]),
        Route("/metrics", probes.metrics, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    return app
