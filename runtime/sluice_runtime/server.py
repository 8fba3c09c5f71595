"""Two HTTP ports in one event loop, from before the model is loaded until the last stream has ended.

Invariant: the ports listen before loading starts, so that probes and the operator see a pod that loads;
after `stop` nothing in flight is cut before the grace period is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sluice_runtime import logs
from sluice_runtime.api.errors import bad_request
from sluice_runtime.api.reply import ABORT
from sluice_runtime.state import EnginePort, Identity, Runtime

# Longer than a gateway keeps idle connections: the side that sends requests must be the one that closes.
_KEEP_ALIVE_S = 3900
_POLL_S = 0.05


class _Protocol(H11Protocol):
    """uvicorn's protocol, plus a way for the app to drop a connection, and refusals in our error shape."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        app = self.app

        async def with_abort(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("extensions", {})[ABORT] = self.transport.abort
            await app(scope, receive, send)

        self.app = with_abort

    def send_400_response(self, msg: str) -> None:
        body = bytes(bad_request("The request is not valid HTTP.", code="invalid_http").response().body)
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, which has two servers to stop in its own order."""
        yield


@dataclass
class _Port:
    server: _Server
    socket: socket.socket
    task: asyncio.Task[None]

    @property
    def number(self) -> int:
        return int(self.socket.getsockname()[1])


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; OSError if the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, each token after the
    # first would wait for the client's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


async def _open(app: ASGIApp, listening: socket.socket) -> _Port:
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        if task.done():
            await task
            raise RuntimeError("the HTTP server ended while it started")
        await asyncio.sleep(0.005)
    return _Port(server, listening, task)


@dataclass(frozen=True)
class Ports:
    """Where a running pod listens."""

    api: int
    admin: int | None


@contextlib.asynccontextmanager
async def listening(
    api: tuple[ASGIApp, socket.socket], admin: tuple[ASGIApp, socket.socket] | None
) -> AsyncIterator[Ports]:
    """Serve both ports while the block runs."""
    opened: list[_Port] = []
    try:
        for pair in (api, admin):
            if pair is not None:
                opened.append(await _open(*pair))
        yield Ports(opened[0].number, opened[1].number if admin is not None else None)
    finally:
        for port in opened:
            port.server.should_exit = True
        await asyncio.gather(*(port.task for port in opened), return_exceptions=True)


Load = Callable[[], tuple[EnginePort, Identity]]


async def load_into(runtime: Runtime, load: Load, stop: asyncio.Event) -> bool:
    """Load in a thread and become ready; False if asked to stop before that. Raises what `load` raises."""
    began = time.monotonic()
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if not loading.done():
        return False
    engine, identity = loading.result()
    runtime.become_ready(engine, identity)
    logs.event("ready", identity=identity.digest, after_s=round(time.monotonic() - began, 3))
    return True


async def drain(runtime: Runtime, delay_s: float, grace_s: float) -> None:
    """Stop being ready, serve on until routes have moved away and nothing runs, at most for `grace_s`."""
    runtime.draining = True
    began = time.monotonic()
    logs.event("draining", running=len(runtime.running), grace_s=grace_s)
    while True:
        elapsed = time.monotonic() - began
        if elapsed >= grace_s or (elapsed >= delay_s and not runtime.running):
            break
        await asyncio.sleep(_POLL_S)
    logs.event("drained", running=len(runtime.running), after_s=round(time.monotonic() - began, 3))
