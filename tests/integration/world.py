"""The operator as a real process against a real API server and a real gateway; only the kubelet is played.

A played pod is a Pod object with the status that a kubelet would write, behind which the runtime's own
stand-in listens on loopback. Everything else (admission, server-side apply, watches, xDS, evidence) is the
real thing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from apiserver.server import ApiServer
from sluice_operator.kube import Kube
from sluice_operator.kube.client import BACKEND, POD, POLICY, SECRET, Kind
from sluice_operator.xds.local import free_port

ROOT = Path(__file__).parents[2]
SYSTEM = "sluice-system"
T = TypeVar("T")
Object = dict[str, Any]
PATIENCE_S = 240.0
"""What takes a second here may take many on a busy machine; who waits for what never comes fails then."""


async def until(what: str, probe: Callable[[], Awaitable[T]], *, seconds: float = PATIENCE_S) -> T:
    """The first true answer. Raises with what was last seen."""
    deadline = time.monotonic() + seconds
    while True:
        seen = await probe()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}; last seen: {seen!r}"
        await asyncio.sleep(0.03)


def condition(obj: Object, kind: str) -> Object:
    """A condition that speaks of the current generation, else empty."""
    generation = obj["metadata"].get("generation", 0)
    found = (c for c in (obj.get("status") or {}).get("conditions") or [] if c["type"] == kind)
    return next((c for c in found if c.get("observedGeneration", 0) >= generation), {})


@dataclass
class PlayedPod:
    """A stand-in process and its Pod."""

    name: str
    namespace: str
    backend: str
    api_port: int
    admin_port: int
    process: asyncio.subprocess.Process


@dataclass
class World:
    """Everything a test needs, in a namespace of its own."""

    server: ApiServer
    kube: Kube
    directory: Path
    namespace: str
    ads_port: int = field(default_factory=free_port)
    gateway_port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    feedback_port: int = field(default_factory=free_port)
    operator: asyncio.subprocess.Process | None = None
    operators: list[asyncio.subprocess.Process] = field(default_factory=list)
    """All that were ever started; ``operator`` is the last."""
    pods: list[PlayedPod] = field(default_factory=list)
    key: str = "key-of-demo"
    num_pods: int = 0
    kubeconfig: Path | None = None
    """Whose permissions the operator has; None: all."""

    # Processes

    async def start_operator(self, *, wait: bool = True, **other: int | str) -> asyncio.subprocess.Process:
        """``wait=False``: it may have to wait for the Lease. ``other``: flags, with underscores."""
        log = (self.directory / "operator.log").open("ab")
        flags: dict[str, int | str | float] = {
            "namespace": SYSTEM,
            "watch-namespaces": self.namespace,
            "xds-address": f"127.0.0.1:{self.ads_port}",
            "gateway-port": self.gateway_port,
            "http-address": f"127.0.0.1:{self.http_port}",
            "feedback-host": "127.0.0.1",
            "feedback-address": f"127.0.0.1:{self.feedback_port}",
            "start-seconds": 20,
            "drain-seconds": 3,
            "lease-name": f"operator-{self.namespace}",
            **{name.replace("_", "-"): value for name, value in other.items()},
        }
        self.operator = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sluice_operator",
            *(f"--{k}={v}" if v != "" else f"--{k}" for k, v in flags.items()),
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig or self.server.kubeconfig)},
            stdout=log,
            stderr=log,
        )
        self.operators.append(self.operator)

        async def ready() -> bool:
            assert self.operator is not None
            assert self.operator.returncode is None, self.log()[-3000:]
            return await self.probe("readyz", int(flags["http-address"].rpartition(":")[2])) == 200  # type: ignore[union-attr]

        if wait:
            await until("the operator is ready", ready)
        return self.operator

    async def probe(self, path: str, port: int | None = None) -> int:
        """Status of one of the operator's own endpoints; 0 where nobody listens."""
        with contextlib.suppress(aiohttp.ClientError):
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"http://127.0.0.1:{port or self.http_port}/{path}") as answer,
            ):
                return answer.status
        return 0

    async def kill_operator(self, number: int = signal.SIGKILL) -> int:
        assert self.operator is not None
        self.operator.send_signal(number)
        return await asyncio.wait_for(self.operator.wait(), PATIENCE_S)

    def log(self) -> str:
        return (self.directory / "operator.log").read_text()

    async def play_pod(self, backend: str, *, schema: str = "", **script: Any) -> PlayedPod:
        """A ready pod of the backend, as the Deployment's controller and a kubelet would make it. ``schema``:
        of its evidence, where it is of another version."""
        self.num_pods += 1
        name = f"{backend}-{self.num_pods}"
        config = self.directory / f"{name}.json"
        told = await self.kube.get(Kind("v1", "ConfigMap"), self.namespace, f"sluice-{backend}")
        config.write_text(told["data"]["backend.json"])
        secret = await self.kube.get(SECRET, self.namespace, "sluice-runtime")
        for key, value in secret["data"].items():
            (self.directory / key).write_bytes(base64.b64decode(value))
        ports = free_port(), free_port()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sluice_runtime.standin",
            "--config",
            str(config),
            "--host",
            "127.0.0.1",
            "--port",
            str(ports[0]),
            "--admin-port",
            str(ports[1]),
            "--admin-token-file",
            str(self.directory / "admin-token"),
            "--credential-file",
            str(self.directory / "gateway-credential"),
            "--script",
            json.dumps(script),
            *(["--schema", schema] if schema else []),
            stdout=(self.directory / f"{name}.log").open("wb"),
            stderr=asyncio.subprocess.STDOUT,
        )
        pod = PlayedPod(name, self.namespace, backend, ports[0], ports[1], process)
        self.pods.append(pod)
        await self.kube.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": {"sluice.dev/backend": backend},
                },
                "spec": {
                    "nodeName": "played",
                    "terminationGracePeriodSeconds": 0,
                    "containers": [
                        {
                            "name": "runtime",
                            "image": "played",
                            "ports": [
                                {"name": "api", "containerPort": ports[0]},
                                {"name": "admin", "containerPort": ports[1]},
                            ],
                        }
                    ],
                },
            }
        )

        async def up() -> bool:
            assert process.returncode is None, (self.directory / f"{name}.log").read_text()[-2000:]
            with contextlib.suppress(aiohttp.ClientError):
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(f"http://127.0.0.1:{ports[0]}/readyz") as answer,
                ):
                    return answer.status == 200
            return False

        await until(f"stand-in {name} is up", up)
        await self.pod_status(
            name,
            {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "podIPs": [{"ip": "127.0.0.1"}],
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "PodScheduled", "status": "True"},
                ],
            },
        )
        return pod

    async def bare_pod(self, backend: str, status: Object) -> str:
        """A Pod that never comes up, with a status that says why."""
        self.num_pods += 1
        name = f"{backend}-{self.num_pods}"
        await self.kube.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": {"sluice.dev/backend": backend},
                },
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "containers": [{"name": "runtime", "image": "played"}],
                },
            }
        )
        await self.pod_status(name, status)
        return name

    async def script(self, pod: PlayedPod, **script: Any) -> None:
        """Changes what the stand-in answers from now on."""
        token = (self.directory / "admin-token").read_text()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http:
            answer = await http.put(f"http://127.0.0.1:{pod.admin_port}/v1/script", json=script)
            assert answer.status == 200, await answer.text()

    @contextlib.contextmanager
    def server_stopped(self) -> Iterator[None]:
        """The API server answers nobody, as in a partition."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ours = f"--secure-port={self.server.url.rpartition(':')[2]}"  # tests/apiserver has another one
        [pid] = [int(c) for c in children if ours in Path(f"/proc/{c}/cmdline").read_text().split("\0")]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    async def pod_status(self, name: str, status: Object) -> None:
        await self.kube.patch_status(POD, self.namespace, name, status)

    async def stop(self) -> None:
        for process in [*(p.process for p in self.pods), *self.operators]:
            if process.returncode is None:
                process.kill()
                await process.wait()

    # Objects

    async def apply(self, obj: Object) -> Object:
        """As a user applies: another field manager than the operator."""
        obj = {**obj, "metadata": {**obj["metadata"], "namespace": self.namespace}}
        meta = obj["metadata"]
        return await self.kube._call(
            "PATCH",
            Kind(obj["apiVersion"], obj["kind"]).path(self.namespace, meta["name"]),
            body=obj,
            query=[("fieldManager", "user"), ("force", "true")],
            content_type="application/apply-patch+yaml",
        )

    async def get(self, kind: Kind, name: str) -> Object:
        return await self.kube.get(kind, self.namespace, name)

    async def gone(self, kind: Kind, name: str) -> bool:
        return await self.kube.find(kind, self.namespace, name) is None

    async def wait_condition(
        self, kind: Kind, name: str, type_: str, status: str = "True", seconds: float = PATIENCE_S
    ) -> Object:
        async def probe() -> Object | None:
            obj = await self.get(kind, name)
            found = condition(obj, type_)
            return found if found.get("status") == status else None

        try:
            return await until(f"{kind.kind} {name} {type_}={status}", probe, seconds=seconds)  # type: ignore[return-value]
        except AssertionError as error:
            raise AssertionError(
                f"{error}: {json.dumps((await self.get(kind, name)).get('status'), indent=1)}"
            ) from None

    async def rule(self, policy: str, name: str = "all") -> Object:
        rules = ((await self.get(POLICY, policy)).get("status") or {}).get("rules") or []
        return next((r for r in rules if r["name"] == name), {})

    async def tenant(self) -> None:
        await self.kube.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "demo-key", "namespace": self.namespace},
                "data": {"key": base64.b64encode(self.key.encode()).decode()},
            }
        )
        await self.apply(
            {
                "apiVersion": "sluice.dev/v1alpha1",
                "kind": "Tenant",
                "metadata": {"name": "demo"},
                "spec": {"apiKeys": [{"name": "demo-key"}], "tasks": ["chat", "nl2sql", "summary"]},
            }
        )

    async def serve(self, backend: str, **script: Any) -> PlayedPod:
        """A backend with one played pod, once the gateway reaches it."""
        await self.apply(backend_manifest(backend))

        async def applied() -> bool:
            return not await self.gone(Kind("apps/v1", "Deployment"), f"sluice-{backend}")

        await until(f"{backend}'s objects", applied)
        pod = await self.play_pod(backend, **script)
        await self.wait_condition(BACKEND, backend, "Ready")
        return pod

    async def chat(
        self, http: aiohttp.ClientSession, model: str, text: str = "capital?", *, task: str = ""
    ) -> tuple[int, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 16}
        claims = {"sluice-task": task} if task else {}
        async with http.post(
            f"http://127.0.0.1:{self.gateway_port}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {self.key}", **claims},
        ) as answer:
            return answer.status, await answer.json()

    async def stream(self, model: str, begun: asyncio.Queue[str]) -> str:
        """All of a streamed answer; ``begun`` gets what has come when it has its first token."""
        body = {"model": model, "messages": [{"role": "user", "content": "a story"}], "stream": True}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as http,
            http.post(
                f"http://127.0.0.1:{self.gateway_port}/v1/chat/completions",
                json={**body, "max_tokens": 500},
                headers={"Authorization": f"Bearer {self.key}"},
            ) as answer,
        ):
            assert answer.status == 200, await answer.text()
            text = ""
            while '"content":"' not in text:
                assert not answer.content.at_eof(), text
                text += (await answer.content.readany()).decode()
            begun.put_nowait(text)
            return text + (await answer.content.read()).decode()


def backend_manifest(name: str, **spec: Any) -> Object:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceBackend",
        "metadata": {"name": name},
        "spec": {
            "model": {"hostPath": {"path": "/var/tmp"}},
            "engine": {"maxNumSeqs": 64, "maxQueue": 256},
            "fitness": {"dataClasses": ["Public", "Internal", "Confidential", "Restricted"]},
            **spec,
        },
    }


def policy_manifest(name: str, stable: str, **rule: Any) -> Object:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "RoutePolicy",
        "metadata": {"name": name},
        "spec": {"model": name, "rules": [{"name": "all", "target": {"backend": stable}, **rule}]},
    }


def rollout(candidate: str, *weights: int, seconds: int = 1, samples: int = 3, **more: Any) -> Object:
    """Promoted right after the last step, unless ``watch`` says otherwise."""
    steps = [{"weight": w, "minSeconds": seconds, "minSamples": samples} for w in weights]
    return {"candidate": {"backend": candidate}, "steps": steps, "watch": {"seconds": 0}, **more}


class Load:
    """Requests at a steady rate through the gateway; ``failures`` are those that did not get a 200."""

    def __init__(self, world: World, model: str, rate: float = 20.0, tasks: Sequence[str] = ("",)) -> None:
        self._world, self._model, self._rate = world, model, rate
        self._tasks = itertools.cycle(tasks)
        self.statuses: list[int] = []
        self.failures: list[Any] = []
        self._open: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def drained(self) -> None:
        """Until what is on its way now has been answered."""
        await asyncio.wait({*self._open, asyncio.create_task(asyncio.sleep(0))})

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            while True:
                one = group.create_task(self._one(http))
                self._open.add(one)
                one.add_done_callback(self._open.discard)
                await asyncio.sleep(1 / self._rate)

    async def _one(self, http: aiohttp.ClientSession) -> None:
        try:
            status, body = await self._world.chat(http, self._model, task=next(self._tasks))
        except aiohttp.ClientError as error:
            status, body = 0, repr(error)
        self.statuses.append(status)
        if status != 200:
            self.failures.append((time.time(), status, body))
