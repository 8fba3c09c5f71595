from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from unit.runtime.server.support import Pod, running_pod


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path) as running:
        yield running
