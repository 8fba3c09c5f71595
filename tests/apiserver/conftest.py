from __future__ import annotations

from collections.abc import Iterator

import pytest

from apiserver.server import ApiServer, binaries_missing


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """A bare API server with the CRDs, shared by all tests."""
    if missing := binaries_missing():
        pytest.fail(missing)
    with ApiServer.start() as server:
        server.install_crds()
        yield server
