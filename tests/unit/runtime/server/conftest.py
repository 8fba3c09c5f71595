from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from unit.runtime.server.support import Pod, running_pod


@pytest.fixture(scope="session", autouse=True)
def _uvicorn_ends_at_once() -> Iterator[None]:
    """It looks each 0.1 s whether it should end, twice: more than most tests here take themselves."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        yield


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path) as running:
        yield running
