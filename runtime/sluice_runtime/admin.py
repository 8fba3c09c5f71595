"""The admin port, on which the operator sends configurations and listens to evidence.

Invariant: every path wants the admin token; a reader that is too slow costs its own connection, never
memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from sluice_runtime import logs
from sluice_runtime.api import errors
from sluice_runtime.api.app import HANDLERS
from sluice_runtime.api.body import ClientLeft, read_body
from sluice_runtime.api.errors import ApiError, json_response
from sluice_runtime.api.reply import ABORT
from sluice_runtime.podconfig import MAX_CONFIGS, invalid
from sluice_runtime.state import Runtime
from sluice_runtime.withdrawn import NOTHING, Withdrawn

BODY_LIMIT = 8 * 1024 * 1024
_FIELDS = {"configs", "limits", "access", "withdrawn"}

Handler = Callable[[Request], Awaitable[Response]]


def authorize(runtime: Runtime, headers: Headers) -> None:
    """ApiError unless the request carries the admin token."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    secret = runtime.settings.admin_token
    if secret is None or scheme.lower() != "bearer" or not secret.equals(token.strip()):
        raise ApiError(
            401,
            "This port needs `Authorization: Bearer <admin token>`.",
            "authentication_error",
            code="invalid_token",
            headers={"www-authenticate": "Bearer"},
        )


async def json_body(request: Request) -> Any:
    """A request's JSON, or an ApiError."""
    try:
        data = await read_body(request.receive, request.headers, BODY_LIMIT)
        return json.loads(data)
    except ClientLeft:
        raise errors.bad_request("The request body is incomplete.") from None
    except (ValueError, RecursionError):
        raise errors.bad_request("The request body is not valid JSON.", code="invalid_json") from None


def _withdrawn(body: dict[str, Any]) -> Withdrawn:
    """Nothing where the set does not speak of it."""
    if "withdrawn" not in body:
        return NOTHING
    try:
        return Withdrawn.model_validate_json(json.dumps(body["withdrawn"]))
    except ValidationError as e:
        wrong = invalid(body["withdrawn"], e, "withdrawn")
        raise errors.bad_request(f"{wrong.message}.", wrong.field) from None


class _Admin:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def identity(self, request: Request) -> Response:
        authorize(self._runtime, request.headers)
        if self._runtime.identity is None:
            raise errors.loading()
        return json_response(200, self._runtime.identity.body())

    async def configs(self, request: Request) -> Response:
        authorize(self._runtime, request.headers)
        body = await json_body(request)
        raws = body.get("configs") if isinstance(body, dict) else None
        unknown = sorted(body.keys() - _FIELDS) if isinstance(body, dict) else []
        if not isinstance(raws, list) or unknown:
            raise errors.bad_request(
                'The body must be {"configs": [PodConfig, …], "limits": LimitSet, "access": AccessSet,'
                ' "withdrawn": Withdrawn}; all but configs may be absent.',
                unknown[0][:64] if unknown else "configs",
            )
        if len(raws) > MAX_CONFIGS:
            raise errors.bad_request(f"At most {MAX_CONFIGS} configurations can be held.", "configs")
        # First of all: what has leaked must not go on while a contract is compiled.
        self._runtime.withdraw(_withdrawn(body))
        # Configurations last: no request may find its own here, and its tenant's caps or a token not yet.
        runtime = self._runtime
        wrong = [
            runtime.limits.replace(body["limits"]) if "limits" in body else None,
            runtime.access.replace(body["access"]) if "access" in body else None,
        ]
        rejected = await runtime.configs.replace(raws)
        runtime.access.take_away(runtime.configs.named())
        rejected += [one for one in wrong if one is not None]
        versions, limits, access = runtime.configs.versions, runtime.limits.version, runtime.access.version
        logs.event(
            "configurations",
            held=len(versions),
            limits=limits,
            access=access,
            withdrawn=[len(runtime.withdrawn.attempts), len(runtime.withdrawn.tenants)],
            rejected=[[r.version, r.field] for r in rejected],
        )
        told = {"versions": versions, "limits": limits, "access": access}
        return json_response(200, {**told, "rejected": [r.body() for r in rejected]})


class EvidenceStream:
    """`GET /v1/stream` as a raw ASGI app: it has to know how fast its reader is, and when it leaves."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            authorize(self._runtime, Headers(scope=scope))
            since, boot = _position(QueryParams(scope["query_string"]))
            if self._runtime.identity is None:
                raise errors.loading()
        except ApiError as e:
            await e.response()(scope, receive, send)
            return
        writing = asyncio.create_task(self._write(scope, send, since, boot))
        leaving = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write(self, scope: Scope, send: Send, since: int, boot: str) -> None:
        runtime = self._runtime
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lines = runtime.evidence.follow(since, boot, runtime.hello, runtime.heartbeat)
        try:
            async for chunk in lines:
                async with asyncio.timeout(runtime.settings.slow_reader_s):
                    await send({"type": "http.response.body", "body": chunk.encode(), "more_body": True})
        except TimeoutError:
            logs.warning("evidence reader too slow", after_s=runtime.settings.slow_reader_s)
            abort = scope.get("extensions", {}).get(ABORT)
            if abort is not None:
                abort()
        finally:
            await lines.aclose()


def _position(query: QueryParams) -> tuple[int, str]:
    since = query.get("since", "0") or "0"
    if not (since.isascii() and since.isdecimal() and len(since) < 19):
        raise errors.bad_request("since must be a sequence number.", "since")
    return int(since), query.get("boot", "")


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def admin_app(runtime: Runtime, extra: list[BaseRoute] | None = None) -> Starlette:
    """The ASGI app of port 9000. `extra` routes must call `authorize` themselves."""
    admin = _Admin(runtime)
    routes: list[BaseRoute] = [
        Route("/v1/identity", admin.identity, methods=["GET"]),
        Route("/v1/configs", admin.configs, methods=["PUT"]),
        Route("/v1/stream", EvidenceStream(runtime), methods=["GET"]),
        *(extra or []),
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    return app
