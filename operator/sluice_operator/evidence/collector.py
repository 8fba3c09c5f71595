"""One stream per pod, for as long as the pod is there.

Invariant: streams follow the pods by uid and address, so a successor of the same name starts unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp

from ..plan.cut import Cut
from ..plan.observed import PodView, StreamView
from .observe import Observed, from_record, from_running
from .stream import PodStream

log = logging.getLogger(__name__)


class Collector:
    """Keeps the streams. ``observed`` gets evidence as it arrives, ``changed`` the backend of a pod that
    told news, ``unread`` the pod of a record that is of another schema. ``price``: what the pod costs in an
    hour, where its backend names it."""

    def __init__(
        self,
        token: Callable[[], str],
        *,
        observed: Callable[[list[Observed]], None],
        changed: Callable[[PodView], None],
        gap: Callable[[PodView, int], None],
        unread: Callable[[PodView], None],
        price: Callable[[PodView], float | None],
    ) -> None:
        self._token = token
        self._observed, self._changed, self._gap, self._price = observed, changed, gap, price
        self._unread = unread
        self._session: aiohttp.ClientSession | None = None
        self._streams: dict[tuple[str, str], tuple[PodStream, asyncio.Task[None]]] = {}

    def sync(self, pods: Iterable[PodView]) -> None:
        """Opens streams to new pods, closes those of pods that are gone."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        wanted = {p.key: p for p in pods if p.ip and p.phase not in ("Succeeded", "Failed")}
        for key, (stream, _) in list(self._streams.items()):
            pod = wanted.get(key)
            if pod is None or (pod.uid, pod.ip, pod.admin_port) != (
                stream.pod.uid,
                stream.pod.ip,
                stream.pod.admin_port,
            ):
                self._close(key)
            else:
                stream.pod = pod
        for key, pod in wanted.items():
            if key not in self._streams:
                self._open(key, pod, self._session)

    def view(self, pod: PodView) -> StreamView:
        held = self._streams.get(pod.key)
        return held[0].view if held and held[0].pod.uid == pod.uid else StreamView()

    def configure(
        self,
        pod: PodView,
        configs: Mapping[str, Mapping[str, Any]],
        limits: Mapping[str, Any],
        access: Mapping[str, Any],
        cut: Cut,
    ) -> None:
        held = self._streams.get(pod.key)
        if held:
            held[0].configure(configs, limits, access, cut)

    async def close(self) -> None:
        tasks = [task for _, task in self._streams.values()]
        for key in list(self._streams):
            self._close(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _open(self, key: tuple[str, str], pod: PodView, session: aiohttp.ClientSession) -> None:
        stream = PodStream(
            pod,
            session,
            self._token,
            on_line=self._line,
            on_change=self._changed,
            on_gap=self._gap,
            on_unread=self._unread,
        )
        self._streams[key] = (stream, asyncio.create_task(self._run(stream), name=f"stream {pod.name}"))

    async def _run(self, stream: PodStream) -> None:
        while True:
            try:
                await stream.run()
            except ExceptionGroup:
                log.exception(
                    "a pod's stream failed in a way that it should not", extra={"pod": stream.pod.name}
                )
                await asyncio.sleep(1)

    def _close(self, key: tuple[str, str]) -> None:
        _, task = self._streams.pop(key)
        task.cancel()

    def _line(self, pod: PodView, line: Mapping[str, Any]) -> None:
        now = time.time()
        if line["type"] == "record":
            found = [from_record(line, now, self._price(pod))]
        elif line["type"] == "heartbeat":
            found = [from_running(entry, now) for entry in line["running"]]
        else:
            return
        told = [o for o in found if o is not None and o.policy.startswith(f"{pod.namespace}/")]
        if told:
            self._observed(told)
