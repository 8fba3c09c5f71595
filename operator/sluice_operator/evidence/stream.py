"""The long-lived stream from one pod's admin port, and the configurations that the pod shall hold.

Invariant: what is known of a pod is known of the process that runs now: a new boot, or a restart while
nobody was listening, makes it unknown until the pod has told again. Of a pod whose evidence is of another
schema nothing but its hello is read: half of a record would be judged as if it were all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from ..plan.cut import Cut
from ..plan.observed import PodView, StreamView

log = logging.getLogger(__name__)
SCHEMA = "874ec1622f27f740"
"""Digest of docs/contracts/evidence.schema.json, which a pod must name in its hello; README there,
"Versions"."""
_SILENCE_S = 5.0
_BACKOFF_S = (0.1, 2.0)
_MAX_LINE = 1 << 20
_NOT_READ = (400, 413)
"""Statuses of a pod that did not even look at what it was sent."""


class _Beside(NamedTuple):
    """Versions of what a pod holds beside configurations."""

    limits: str
    access: str


@dataclass(frozen=True)
class _Wanted:
    configs: Mapping[str, Mapping[str, Any]]
    limits: Mapping[str, Any]
    access: Mapping[str, Any] = field(repr=False)
    cut: Cut

    @property
    def beside(self) -> _Beside:
        return _Beside(self.limits["version"], self.access["version"])

    @property
    def versions(self) -> tuple[frozenset[str], _Beside, Cut]:
        return frozenset(self.configs), self.beside, self.cut

    @property
    def body(self) -> dict[str, Any]:
        """Nothing of what is withdrawn where nothing is: an older pod knows no such field."""
        told = {"configs": list(self.configs.values()), "limits": self.limits, "access": self.access}
        return {**told, "withdrawn": self.cut.body} if self.cut else told


class PodStream:
    """One pod. ``on_line`` gets records and heartbeats, ``on_change`` is called when what is known of the
    pod changes, ``on_unread`` for each record of another schema."""

    def __init__(
        self,
        pod: PodView,
        session: aiohttp.ClientSession,
        token: Callable[[], str],
        *,
        on_line: Callable[[PodView, Mapping[str, Any]], None],
        on_change: Callable[[PodView], None],
        on_gap: Callable[[PodView, int], None],
        on_unread: Callable[[PodView], None],
    ) -> None:
        self.pod = pod
        self._session = session
        self._token = token
        self._on_line, self._on_change, self._on_gap = on_line, on_change, on_gap
        self._on_unread = on_unread
        self._connected = False
        self._unreadable = ""
        self._identity = ""
        self._versions: frozenset[str] = frozenset()
        self._rejected: dict[str, str] = {}
        self._refused = ""
        self._kv_percent = 0
        self._boot, self._seq = "", 0
        self._past = 0
        """Records up to here were made before this operator listened: counted by its predecessor, as the
        checkpoint shows. Of those only hard violations are told again, which does no harm."""
        self._restarts = pod.restarts
        self._beside = _Beside("", "")
        self._cut: Cut | None = None
        """As this process of the pod took it last, which it does not tell; None: an operator before this one
        may have told it."""
        self._wanted: _Wanted | None = None
        self._wake = asyncio.Event()

    @property
    def view(self) -> StreamView:
        if self._connected:
            self._restarts = self.pod.restarts
        elif self.pod.restarts != self._restarts:
            return StreamView()
        beside = self._wanted.beside if self._wanted is not None else ()
        return StreamView(
            self._connected,
            self._identity,
            self._versions,
            dict(self._rejected),
            self._kv_percent,
            self._unreadable,
            self._refused,
            next((self._rejected[version] for version in beside if version in self._rejected), ""),
        )

    def configure(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        limits: Mapping[str, Any],
        access: Mapping[str, Any],
        cut: Cut,
    ) -> None:
        """What the pod shall hold from now on: configurations by version, limits, what verifiers are reached
        with, and whose requests it shall cut."""
        wanted = _Wanted(dict(configs), limits, access, cut)
        if self._wanted is None or self._wanted.versions != wanted.versions:
            self._wanted = wanted
            self._wake.set()

    def _url(self, path: str) -> str:
        host = f"[{self.pod.ip}]" if ":" in self.pod.ip else self.pod.ip
        return f"http://{host}:{self.pod.admin_port}{path}"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token()}"}

    async def run(self) -> None:
        """Listens and configures until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._configure())

    async def _listen(self) -> None:
        delay = _BACKOFF_S[0]
        while True:
            try:
                await self._read()
                delay = _BACKOFF_S[0]
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
                if self._connected:
                    log.info(
                        "lost a pod's stream",
                        extra={"pod": self.pod.name, "error": f"{type(error).__name__}: {error}"},
                    )
                    delay = _BACKOFF_S[0]
            if self._connected:
                self._connected = False
                self._on_change(self.pod)
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, _BACKOFF_S[1])

    async def _read(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=3.0, sock_read=_SILENCE_S)
        query = {"since": str(self._seq), "boot": self._boot} if self._boot else {}
        async with self._session.get(
            self._url("/v1/stream"),
            headers=self._headers(),
            params=query,
            timeout=timeout,
            max_line_size=_MAX_LINE,
        ) as answer:
            if answer.status != 200:
                raise aiohttp.ClientError(f"HTTP {answer.status}")
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                if len(buffer) > _MAX_LINE:
                    raise ValueError("a line without end")
                for line in filter(None, lines):
                    self._take(json.loads(line))

    def _take(self, line: Mapping[str, Any]) -> None:
        kind = line["type"]
        if kind == "hello":
            self._hello(line)
        elif self._unreadable:
            self._pass_over(line)
            return
        elif kind == "heartbeat":
            self._hold(frozenset(line["versions"]), _Beside(line["limits"], line["access"]))
            load = line["load"]
            self._kv_percent = 100 * load["kv_used"] // max(1, load["kv_total"])
        elif kind == "record":
            self._seq = line["seq"]
            if self._seq <= self._past and all(v["ok"] or not v["hard"] for v in line["verdicts"]):
                return
        self._on_line(self.pod, line)

    def _pass_over(self, line: Mapping[str, Any]) -> None:
        if line["type"] == "record":
            self._seq = line["seq"]
            if self._seq > self._past:
                self._on_unread(self.pod)

    def _hello(self, line: Mapping[str, Any]) -> None:
        told = str(line.get("schema", "none"))[:64]
        unreadable = "" if told == SCHEMA else told
        if unreadable != self._unreadable:
            self._unreadable = unreadable
            self._on_change(self.pod)  # at once: of such a pod not even the rest of this line may be readable
        if line["boot"] == self._boot:
            lost = line["oldest"] - self._seq - 1
        else:
            lost, self._seq = (1 if self._boot else 0), 0
            if self._boot:  # a new process has been told nothing
                self._cut = Cut()
            self._past = 0 if self._boot else line["seq"]
            self._rejected, self._refused = {}, ""
        self._boot = line["boot"]
        if lost > 0:
            self._on_gap(self.pod, lost)
        self._connected, self._identity = True, line["identity"]
        self._versions = frozenset(line["versions"])
        self._beside = _Beside(line["limits"], line["access"])
        self._restarts = self.pod.restarts
        self._wake.set()
        self._on_change(self.pod)

    def _hold(self, versions: frozenset[str], beside: _Beside) -> None:
        if (versions, beside) != (self._versions, self._beside):
            self._versions, self._beside = versions, beside
            self._wake.set()
            self._on_change(self.pod)

    def _holds(self, wanted: _Wanted) -> bool:
        """Whether the pod has all of it that it takes."""
        beside = all(
            version == held or version in self._rejected
            for version, held in zip(wanted.beside, self._beside, strict=True)
        )
        same = beside and self._cut == wanted.cut
        return same and self._versions == wanted.configs.keys() - self._rejected.keys()

    async def _configure(self) -> None:
        delay, complained = _BACKOFF_S[0], ""
        while True:
            await self._wake.wait()
            self._wake.clear()
            wanted = self._wanted
            if wanted is None or not self._connected or self._holds(wanted):
                continue
            try:
                await self._put(wanted)
                delay, complained = _BACKOFF_S[0], ""
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
                complaint = f"{type(error).__name__}: {error}"
                if complaint != complained:
                    log.info(
                        "a pod did not take its configuration",
                        extra={"pod": self.pod.name, "error": complaint},
                    )
                complained = complaint
                await asyncio.sleep(delay)
                delay = min(delay * 2, _BACKOFF_S[1])
                self._wake.set()

    async def _put(self, wanted: _Wanted) -> None:
        async with self._session.put(
            self._url("/v1/configs"),
            json=wanted.body,
            headers=self._headers(),
            timeout=aiohttp.ClientTimeout(total=5.0),
        ) as answer:
            if answer.status != 200:
                why = await _why(answer)
                if answer.status in _NOT_READ and why != self._refused:
                    self._refused = why
                    self._on_change(self.pod)
                raise aiohttp.ClientError(f"HTTP {answer.status}: {why}")
            told = await answer.json()
        self._refused = ""
        self._rejected = {r["version"]: f"{r['field']}: {r['message']}" for r in told["rejected"]}
        self._versions = frozenset(told["versions"])
        self._beside = _Beside(told["limits"], told["access"])
        self._cut = wanted.cut
        self._on_change(self.pod)


async def _why(answer: aiohttp.ClientResponse) -> str:
    """What a refusal says, with the field where it names one."""
    text = await answer.text()
    try:
        error = json.loads(text)["error"]
        told = f"{error['param']}: {error['message']}" if error["param"] else str(error["message"])
    except (ValueError, KeyError, TypeError):
        told = text
    return told[:200]
