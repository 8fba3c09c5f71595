"""``python -m sluice_operator``: the operator as a process.

It waits for the Lease before it does anything, and lets go of it when told to stop, after the last decision
and write. It exits non-zero when anything that should not end ends, so that Kubernetes starts it again; the
gateway keeps serving meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from . import handlers
from .control import metrics
from .control.app import App
from .control.context import Settings
from .kube import Kube, KubeError
from .kube.lease import Lease, LeaseLost
from .kube.letgo import let_go
from .plan.names import RUNTIME_SECRET
from .plan.pod import Defaults
from .xds.bootstrap import TlsFiles

log = logging.getLogger("sluice_operator")
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line; ``extra`` fields become fields."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= {
            k: v
            for k, v in vars(record).items()
            if k not in _STANDARD and not k.startswith("k8s_") and k != "settings"
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Flags; each has an environment variable of the same name, SLUICE_ in front."""

    def env(name: str, default: str = "") -> str:
        return os.environ.get(f"SLUICE_{name}", default)

    parser = argparse.ArgumentParser(
        prog="python -m sluice_operator",
        description=__doc__,
        epilog="Each flag can be given as an environment variable: --runtime-image as SLUICE_RUNTIME_IMAGE.",
    )
    add = parser.add_argument
    add(
        "--namespace",
        default=env("NAMESPACE", "sluice-system"),
        help="the operator's own namespace, with the Secret shared with gateway and pods "
        "(default: %(default)s)",
    )
    add(
        "--watch-namespaces",
        default=env("WATCH_NAMESPACES"),
        help="comma-separated namespaces to watch; empty: all",
    )
    add(
        "--runtime-image",
        default=env("RUNTIME_IMAGE", "sluice-runtime:latest"),
        help="image of backends that name none (default: %(default)s)",
    )
    add(
        "--image-pull-policy",
        default=env("IMAGE_PULL_POLICY", "IfNotPresent"),
        help="pull policy of backends' pods (default: %(default)s)",
    )
    add(
        "--runtime-secret",
        default=env("RUNTIME_SECRET", RUNTIME_SECRET),
        help="name of the Secret with keys admin-token and gateway-credential, made where absent "
        "(default: %(default)s)",
    )
    add(
        "--lease-name",
        default=env("LEASE_NAME", "sluice-operator"),
        help="Lease in the operator's own namespace whose holder alone decides and writes "
        "(default: %(default)s)",
    )
    add(
        "--lease-seconds",
        type=int,
        default=int(env("LEASE_SECONDS", "5")),
        help="after so long without renewal another process may take the Lease (default: %(default)s)",
    )
    add(
        "--xds-address",
        default=env("XDS_ADDRESS", "0.0.0.0:18000"),
        help="where gateways connect for ADS and access logs (default: %(default)s)",
    )
    add(
        "--xds-tls-dir",
        default=env("XDS_TLS_DIR"),
        help="directory with tls.crt, tls.key and ca.crt for mutual TLS with gateways; empty: plain text",
    )
    add(
        "--gateway-port",
        type=int,
        default=int(env("GATEWAY_PORT", "8080")),
        help="port on which the gateway listens for clients (default: %(default)s)",
    )
    add(
        "--http-address",
        default=env("HTTP_ADDRESS", "0.0.0.0:8081"),
        help="where /healthz, /readyz and /metrics are served (default: %(default)s)",
    )
    add(
        "--resync-seconds",
        type=float,
        default=float(env("RESYNC_SECONDS", "300")),
        help="how often the cache is compared with full lists (default: %(default)s)",
    )
    add(
        "--start-seconds",
        type=float,
        default=float(env("START_SECONDS", "60")),
        help="longest wait for pods to tell what they are before the first push (default: %(default)s)",
    )
    add(
        "--drain-seconds",
        type=float,
        default=float(env("DRAIN_SECONDS", "10")),
        help="longest wait of a deleted backend for routes to leave it (default: %(default)s)",
    )
    add(
        "--feedback-host",
        default=env("FEEDBACK_HOST"),
        help="host name at which the gateway reaches this process with feedback; empty: none is taken",
    )
    add(
        "--feedback-address",
        default=env("FEEDBACK_ADDRESS", "0.0.0.0:8082"),
        help="where that is listened for; the port is the host's too (default: %(default)s)",
    )
    add(
        "--prometheus-url",
        default=env("PROMETHEUS_URL"),
        help="Prometheus that queries of RoutePolicies are asked; empty: such policies are refused",
    )
    add(
        "--prometheus-token-file",
        default=env("PROMETHEUS_TOKEN_FILE"),
        help="file with a bearer token for it, read anew each time; empty: none",
    )
    add(
        "--ledger-keep",
        type=int,
        default=int(env("LEDGER_KEEP", "50")),
        help="ReleaseRecords kept of each policy (default: %(default)s)",
    )
    add(
        "--ledger-days",
        type=int,
        default=int(env("LEDGER_DAYS", "400")),
        help="age in days at which a ReleaseRecord goes (default: %(default)s)",
    )
    add(
        "--let-go",
        action="store_true",
        help="only take the operator's finalizer from all InferenceBackends, and end: for when it has been "
        "uninstalled",
    )
    add(
        "--log-level",
        default=env("LOG_LEVEL", "INFO"),
        help="DEBUG, INFO, WARNING or ERROR (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host or "0.0.0.0", int(port)  # noqa: S104


def _tls(directory: str) -> TlsFiles | None:
    if not directory:
        return None
    root = Path(directory)
    return TlsFiles(certificate=root / "tls.crt", key=root / "tls.key", authority=root / "ca.crt")


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        namespace=args.namespace,
        namespaces=tuple(n for n in args.watch_namespaces.split(",") if n),
        defaults=Defaults(
            image=args.runtime_image,
            runtime_secret=args.runtime_secret,
            image_pull_policy=args.image_pull_policy,
        ),
        resync_seconds=args.resync_seconds,
        start_seconds=args.start_seconds,
        drain_seconds=args.drain_seconds,
        feedback_host=args.feedback_host,
        feedback_address=_address(args.feedback_address),
        prometheus_url=args.prometheus_url,
        prometheus_token_file=args.prometheus_token_file,
        ledger_keep=args.ledger_keep,
        ledger_days=args.ledger_days,
    )


async def _serve_http(app: App, where: tuple[str, int]) -> web.AppRunner:
    async def healthz(_: web.Request) -> web.Response:
        return (
            web.Response(text="ok")
            if app.healthy
            else web.Response(status=503, text="the decision loop is late")
        )

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if app.ready else web.Response(status=503, text="starting")

    async def told(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(metrics.REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    http = web.Application()
    http.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", told)])
    runner = web.AppRunner(http, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, *where).start()
    return runner


async def run(args: argparse.Namespace) -> int:
    """Runs until told to stop (0), or until something breaks or the Lease is lost (1)."""
    host, port = _address(args.xds_address)
    stop = asyncio.Event()
    _stop_on_signals(stop)
    kube = await Kube.connect()
    # A container that starts again in its pod is the same holder: its predecessor is dead for certain.
    identity = f"{socket.gethostname()}_{os.getpid()}"
    lease = Lease(kube, args.namespace, args.lease_name, identity, duration_s=args.lease_seconds)
    kube.may_write = lambda: lease.held
    app = App(
        _settings(args),
        kube,
        {
            "host": host,
            "port": port,
            "tls": _tls(args.xds_tls_dir),
            "gateway_address": ("0.0.0.0", args.gateway_port),  # noqa: S104
        },
    )
    runner = await _serve_http(app, _address(args.http_address))
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        acquiring = asyncio.create_task(lease.acquire(), name="lease")
        await asyncio.wait({stopping, acquiring}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await _end(acquiring)
            await lease.release()
            return 0
        acquiring.result()
        return await _work(app, lease, stop, stopping)
    finally:
        await _end(stopping)
        await runner.cleanup()
        await kube.close()


async def _work(app: App, lease: Lease, stop: asyncio.Event, stopping: asyncio.Task[Any]) -> int:
    """What the holder of the Lease does, until something ends; the Lease is let go last."""
    keeping = asyncio.create_task(lease.keep(), name="lease")
    registry = kopf.get_default_registry()
    handlers.register(registry, app)
    namespaces = list(app.ctx.settings.namespaces)
    watching = asyncio.Event()
    ours = asyncio.create_task(app.run(), name="sluice")
    theirs = asyncio.create_task(
        kopf.operator(
            registry=registry,
            settings=handlers.settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            ready_flag=watching,
            stop_flag=stop,
        ),
        name="kopf",
    )
    signals = asyncio.create_task(_take_signals_back(watching, stop), name="signals")
    try:
        done, _ = await asyncio.wait({ours, theirs, keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, LeaseLost):
                log.error("the operator ends", extra={"error": str(error)})
                return 1
            if error is not None:
                log.error("the operator ends", exc_info=error)
                return 1
        return 0 if stopping in done or theirs in done else 1
    finally:
        await _end(signals)
        if await _end(ours):
            await _end(keeping)
            await lease.release()
        await _end(keeping)
        await _end(theirs)


async def _let_go(args: argparse.Namespace) -> int:
    kube = await Kube.connect()
    try:
        freed = await let_go(kube, [n for n in args.watch_namespaces.split(",") if n])
        log.info("let go", extra={"backends": freed})
        return 0
    except KubeError as error:
        log.error("can't let go of the backends", extra={"error": str(error)})
        return 1
    finally:
        await kube.close()


async def _end(task: asyncio.Task[Any]) -> bool:
    """Cancels, and waits for a while. Returns whether it has ended."""
    task.cancel()
    await asyncio.wait({task}, timeout=3)
    return task.done()


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _take_signals_back(watching: asyncio.Event, stop: asyncio.Event) -> None:
    """kopf takes SIGTERM for itself as it starts, and would first spend seconds on its own ending."""
    await watching.wait()
    await asyncio.sleep(0.1)
    _stop_on_signals(stop)


def main() -> None:
    args = parse()
    # The API server takes JSON 10,000 levels deep: one such object must not end every list and watch.
    sys.setrecursionlimit(60_000)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp", "kubernetes"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    code = asyncio.run(_let_go(args) if args.let_go else run(args))
    # Threads of gRPC must not keep a process alive that has ended.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
