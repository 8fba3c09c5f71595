"""What `python -m sluice_runtime` and its stand-in share: flags, secrets, signals, and how a failed start is

reported.

Invariant: a start that fails ends with exit code 3 and one JSON line, `{"reason": …, "message": …}`, in the
termination message file, never with a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.routing import BaseRoute

from sluice_runtime import logs
from sluice_runtime.admin import admin_app
from sluice_runtime.api.app import api_app
from sluice_runtime.backend import BackendInvalid, BackendSpec, digest, read_backend
from sluice_runtime.server import Load, bind, drain, listening, load_into
from sluice_runtime.state import Runtime, SecretFile, Settings

EXIT_LOAD_FAILED = 3
EXIT_RANK_LOST = 4
_SECRETS = "/etc/sluice/secrets"
_LAST_WORDS_S = 2.0
_POLL_S = 0.05


class StartFailed(Exception):
    """The pod can't serve. `reason` is CamelCase, fit for a condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Started:
    """What an entry point adds to the common server: how to load, more admin routes, and what must know the
    server before it serves.
    """

    load: Load
    admin_routes: Callable[[Runtime], list[BaseRoute]] = lambda runtime: []
    attach: Callable[[Runtime], None] = lambda runtime: None


def parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The flags that both entry points have."""
    p = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--config",
        type=Path,
        default=Path("/etc/sluice/backend.json"),
        metavar="FILE",
        help="what to load and how to run it (docs/contracts/backend.schema.json); default %(default)s",
    )
    p.add_argument("--host", default="0.0.0.0", help="address to listen on; default %(default)s")  # noqa: S104
    p.add_argument("--port", type=int, default=8000, help="OpenAI API, probes, metrics; default %(default)s")
    p.add_argument(
        "--admin-port",
        type=int,
        default=9000,
        help="configurations and evidence, for the operator; default %(default)s",
    )
    p.add_argument(
        "--credential-file",
        type=Path,
        default=Path(f"{_SECRETS}/gateway-credential"),
        metavar="FILE",
        help="requests must carry this file's content in x-sluice-credential; default %(default)s",
    )
    p.add_argument(
        "--admin-token-file",
        type=Path,
        default=Path(f"{_SECRETS}/admin-token"),
        metavar="FILE",
        help="bearer token of the admin port; default %(default)s",
    )
    p.add_argument(
        "--insecure-no-credential",
        action="store_true",
        help="for local use: answer anybody, on 127.0.0.1; without a token file the admin port stays shut",
    )
    p.add_argument(
        "--grace-seconds",
        type=float,
        default=115.0,
        metavar="S",
        help="after SIGTERM, how long streams may still run; default %(default)s",
    )
    p.add_argument(
        "--drain-seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="after SIGTERM, how long new requests are still served, while routes move away; "
        "default %(default)s",
    )
    p.add_argument(
        "--slow-reader-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="a client that takes nothing for so long is dropped; default %(default)s",
    )
    p.add_argument(
        "--body-limit",
        type=int,
        default=8 * 1024 * 1024,
        metavar="BYTES",
        help="larger requests get 413; default %(default)s",
    )
    p.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="JSON lines on stderr, never with anybody's text; default %(default)s",
    )
    return p


def runtime_digest(*packages: str) -> str:
    """Of the code that answers: this package's sources, its kernels as they were built, and the versions of
    what computes."""
    sources = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".c", ".h", ".so")):
        name = path.relative_to(root).as_posix().encode()
        for part in (name, path.read_bytes()):
            sources.update(len(part).to_bytes(8, "big") + part)
    versions = {name: importlib.metadata.version(name) for name in packages}
    return digest({"sources": sources.hexdigest(), "versions": versions})


def run(options: argparse.Namespace, prepare: Callable[[BackendSpec], Started]) -> int:
    """Serve until SIGTERM or SIGINT. The exit code of the process."""
    logs.setup(options.log_level)
    try:
        spec = read_backend(options.config)
        return asyncio.run(_serve(options, spec, prepare(spec)))
    except BackendInvalid as e:
        return _report(StartFailed(e.reason, str(e)))
    except StartFailed as e:
        return _report(e)


async def _serve(options: argparse.Namespace, spec: BackendSpec, started: Started) -> int:
    runtime = Runtime(_settings(options, spec))
    started.attach(runtime)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    host = "127.0.0.1" if options.insecure_no_credential else options.host
    try:
        api = (api_app(runtime), bind(host, options.port))
        admin = None
        if runtime.settings.admin_token is not None:
            admin = (admin_app(runtime, started.admin_routes(runtime)), bind(host, options.admin_port))
    except OSError as e:
        raise StartFailed("ListenFailed", f"can't listen on {host}: {e.strerror}") from None
    async with listening(api, admin) as ports:
        logs.event("listening", backend=spec.name, host=host, port=ports.api, admin_port=ports.admin)
        try:
            loaded = await load_into(runtime, started.load, stop)
        except Exception as e:
            raise _load_failure(e) from None
        if loaded:
            await stop.wait()
            await drain(runtime, options.drain_seconds, options.grace_seconds)
    if not loaded:
        sys.stderr.flush()
        os._exit(0)  # a thread is in the middle of loading and can't be asked to stop
    if runtime.engine is not None:
        await asyncio.to_thread(runtime.engine.stop)
    return 0


def _settings(options: argparse.Namespace, spec: BackendSpec) -> Settings:
    insecure = options.insecure_no_credential
    credential = None if insecure else _secret(options.credential_file, "--credential-file")
    token = None
    if not insecure or options.admin_token_file.exists():
        token = _secret(options.admin_token_file, "--admin-token-file")
    return Settings(
        name=spec.name,
        credential=credential,
        admin_token=token,
        body_limit=options.body_limit,
        slow_reader_s=options.slow_reader_seconds,
    )


def _secret(path: Path, flag: str) -> SecretFile:
    try:
        return SecretFile(path)
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is empty"
        hint = "For local use without a gateway there is --insecure-no-credential."
        raise StartFailed("SecretMissing", f"{flag} {path}: {why}. {hint}") from None


def _load_failure(error: Exception) -> StartFailed:
    """Name what went wrong as well as its own type lets us."""
    logs.failure("load failed", error)
    reason = getattr(error, "reason", None)
    if not isinstance(reason, str):
        out_of_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
        reason = (
            "OutOfMemory"
            if out_of_memory
            else "InvalidConfig"
            if isinstance(error, ValueError)
            else "LoadFailed"
        )
    return StartFailed(reason, str(error) or type(error).__name__)


class Ending:
    """Ends the process from any thread, because it can't compute any more, with a termination message.

    Requests that are answered just then are told so before, as far as that takes moments: a client can tell
    an answer that broke off from one that is complete, and it is counted as an error and not as lost.
    """

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._abandon: Callable[[str], None] | None = None

    def attach(self, runtime: Runtime) -> None:
        """Where requests are counted."""
        self._runtime = runtime

    def tell_first(self, abandon: Callable[[str], None]) -> None:
        """`abandon` ends all requests of an engine with an error, whatever its thread waits for."""
        self._abandon = abandon

    def __call__(self, reason: str, message: str) -> None:
        _report(StartFailed(reason, message), "ended")
        if self._abandon is not None and self._runtime is not None:
            self._abandon("the engine has lost a process")
            deadline = time.monotonic() + _LAST_WORDS_S
            while self._runtime.running and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            time.sleep(_POLL_S)  # what was written last is on its way, evidence too
        sys.stderr.flush()
        os._exit(EXIT_RANK_LOST)


def _report(failure: StartFailed, what: str = "start failed") -> int:
    line = json.dumps({"reason": failure.reason, "message": str(failure)[:2000]}, ensure_ascii=False)
    logs.log.error(what, extra={"fields": {"reason": failure.reason, "detail": str(failure)[:2000]}})
    path = Path(os.environ.get("SLUICE_TERMINATION_LOG", "/dev/termination-log"))
    try:
        path.write_text(line + "\n", encoding="utf-8")
    except OSError:
        logs.warning("termination message not written", path=str(path))
    return EXIT_LOAD_FAILED
