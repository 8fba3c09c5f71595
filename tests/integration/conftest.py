from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from apiserver.server import ApiServer, binaries_missing
from integration.world import SYSTEM, World
from sluice_operator.kube import Kube
from sluice_operator.xds.local import LocalEnvoy

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """A bare API server with the CRDs; each test takes a namespace of its own."""
    if missing := binaries_missing():
        pytest.fail(missing)
    with ApiServer.start() as server:
        server.install_crds()
        server.namespace(SYSTEM)
        yield server


@pytest_asyncio.fixture
async def bare(api_server: ApiServer, tmp_path: Path) -> AsyncIterator[World]:
    """API server and namespace, with no operator yet."""
    namespace = f"test-{next(_numbers)}"
    api_server.namespace(namespace)
    kube = await Kube.connect(kubeconfig=str(api_server.kubeconfig))
    world = World(api_server, kube, tmp_path, namespace)
    try:
        yield world
    finally:
        await world.stop()
        await kube.close()


@pytest_asyncio.fixture
async def world(bare: World) -> AsyncIterator[World]:
    """With operator, gateway and a tenant."""
    await bare.start_operator()
    async with LocalEnvoy(bare.ads_port):
        await bare.tenant()
        yield bare
