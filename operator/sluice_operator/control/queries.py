"""PromQL guards' values: polls the Prometheus that the operator was installed with, and no other.

A policy names a query, never an address, so that nobody who may edit a policy can make the operator call
somewhere. Invariant: a value is handed on only while its question still stands; no value is told as an
error, never as a number.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ..api.guards import Query
from ..plan.promql import QueryError, fill, number

log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 1_000_000
_MAX_AT_ONCE = 4

Took = Callable[[str, str, str, float | None, float | None, str], None]
"""policy (namespace/name), rule, query's name, candidate's value, stable's value, error."""


@dataclass(frozen=True)
class Question:
    """One query of one rule's attempt."""

    policy: str
    """namespace/name."""
    rule: str
    attempt: str
    stable: str
    """Stable's backend."""
    candidate: str
    """The candidate's backend."""
    query: Query

    def text(self, arm: str) -> str:
        """PromQL for one arm, `stable` or `candidate`. Raises QueryError."""
        namespace, _, policy = self.policy.partition("/")
        return fill(
            self.query.query,
            {
                "namespace": namespace,
                "policy": policy,
                "rule": self.rule,
                "arm": arm,
                "backend": self.candidate if arm == "candidate" else self.stable,
                "attempt": self.attempt,
            },
        )


class Prometheus:
    """Instant queries to one server."""

    def __init__(self, url: str, *, token_file: str = "", timeout_s: float = _TIMEOUT_S) -> None:
        self._url = url.rstrip("/") + "/api/v1/query"
        self._token_file = token_file
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def value(self, promql: str) -> float:
        """The one number that `promql` gives now. Raises QueryError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, trust_env=False)
        try:
            async with self._session.post(
                self._url, data={"query": promql}, headers=await self._headers(), allow_redirects=False
            ) as answer:
                raw = b""
                async for chunk in answer.content.iter_chunked(65_536):
                    raw += chunk
                    if len(raw) > _MAX_ANSWER_BYTES:
                        raise QueryError("the answer is too long: aggregate in the query, as sum(…) does")
                return number(_parsed(raw, answer.status))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise QueryError(f"Prometheus can't be asked: {type(error).__name__}") from None

    async def _headers(self) -> dict[str, str]:
        """Read anew each time, since projected tokens are replaced under way."""
        if not self._token_file:
            return {}
        token = (await asyncio.to_thread(Path(self._token_file).read_text)).strip()
        return {"Authorization": f"Bearer {token}"}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _parsed(raw: bytes, status: int) -> Any:
    if status in (401, 403):
        raise QueryError("Prometheus does not accept the operator's token: see --prometheus-token-file")
    try:
        return json.loads(raw)
    except ValueError:
        raise QueryError(f"Prometheus answered {status} without JSON: is --prometheus-url right?") from None


class Queries:
    """Polls what `sync` was last told, each question at its own interval.

    `value` is `Prometheus.value`, or None where the operator was installed without one: then each question
    has an error, which holds a rollout and never passes it."""

    def __init__(
        self,
        value: Callable[[str], Awaitable[float]] | None,
        took: Took,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._value, self._took, self._sleep = value, took, sleep
        self._tasks: dict[Question, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(_MAX_AT_ONCE)

    def sync(self, wanted: Iterable[Question]) -> None:
        """Asks these from now on, and no longer any other; to be called from the event loop."""
        asked = set(wanted)
        for gone in self._tasks.keys() - asked:
            self._tasks.pop(gone).cancel()
        for question in asked - self._tasks.keys():
            self._tasks[question] = asyncio.create_task(self._poll(question), name="query")

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self.sync(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self, question: Question) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            candidate, stable, error = await self._ask(question)
            self._took(question.policy, question.rule, question.query.name, candidate, stable, error)
            await self._sleep(max(0.0, question.query.interval_seconds - (loop.time() - began)))

    async def _ask(self, question: Question) -> tuple[float | None, float | None, str]:
        if self._value is None:
            return None, None, "the operator was installed without a Prometheus: set --prometheus-url"
        candidate: float | None = None
        try:
            async with self._gate:
                candidate = await self._value(question.text("candidate"))
                if question.query.max_increase_percent is None:
                    return candidate, None, ""
                return candidate, await self._value(question.text("stable")), ""
        except QueryError as error:
            arm = "stable: " if candidate is not None else ""
            return candidate, None, f"{arm}{error}"
        except Exception as error:
            # One query's bad luck must not end the polling of a guard.
            log.exception("a query could not be asked", extra={"policy": question.policy})
            return candidate, None, f"the query could not be asked: {type(error).__name__}"
