"""A tap on a pod's evidence stream: which requests an arm got, when, and how they went.

It is how the demo and the benchmarks count what a candidate did after its first bad answer: at the pod
itself, where no judgement of ours comes between.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from .kube import Kube

Record = dict[str, Any]


class Tap:
    """Final records of one pod, as they happen. Use as a context manager."""

    def __init__(self, kube: Kube, pod: str, token: str) -> None:
        self.records: list[Record] = []
        self._forward = kube.forward(pod, 9000)
        self._token = token
        self._thread = threading.Thread(target=self._read, daemon=True, name=f"tap {pod}")
        self._connected = threading.Event()

    def __enter__(self) -> Tap:
        self._url = self._forward.__enter__()
        self._http = httpx.Client(timeout=None, headers={"Authorization": f"Bearer {self._token}"})
        self._thread.start()
        if not self._connected.wait(60):
            raise TimeoutError("no hello from the pod's evidence stream within 60 s")
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._forward.__exit__(None, None, None)

    def _read(self) -> None:
        try:
            with self._http.stream("GET", self._url + "/v1/stream", params={"since": 0}) as answer:
                for line in answer.iter_lines():
                    record = json.loads(line)
                    self._connected.set()
                    if record["type"] == "record" and record["final"]:
                        self.records.append(record)
        except (httpx.HTTPError, httpx.StreamError):
            return

    def put(self, path: str, body: Any) -> None:
        """A call of the admin API, such as the stand-in's script."""
        httpx.put(self._url + path, json=body, headers=self._http.headers, timeout=10).raise_for_status()

    def settle(self) -> None:
        """Wait until the pod has ended what it had: a request is a record only when it ends."""
        count = -1
        while count != len(self.records):
            count = len(self.records)
            time.sleep(3)

    def after_first(self, bad: Callable[[Record], bool]) -> tuple[float, int]:
        """Seconds from the end of the first bad answer to the arrival of the last request (0 where none came
        later), and the number of requests that ended since, the first bad one included."""
        first = next((index for index, record in enumerate(self.records) if bad(record)), None)
        if first is None:
            raise AssertionError(f"no bad record among {len(self.records)}")
        return max(0.0, max(map(arrival, self.records)) - self.records[first]["time"]), len(
            self.records
        ) - first


def arrival(record: Record) -> float:
    """Unix seconds at which a request reached the pod."""
    return float(record["time"] - record["timing"]["total_s"])
