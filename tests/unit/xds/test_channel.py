"""The channel between gateway and operator: certificates on both sides, and what the bootstrap shows."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice_operator.xds.bootstrap import TlsFiles, render
from sluice_operator.xds.local import LocalEnvoy, free_port
from sluice_operator.xds.server import AdsServer

pytestmark = pytest.mark.asyncio(loop_scope="session")


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def certificates(directory: Path, name: str) -> TlsFiles:
    """An authority and one certificate of it."""
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1")
    openssl(
        directory,
        "req",
        "-x509",
        *ec,
        "-keyout",
        f"{name}-ca.key",
        "-out",
        f"{name}-ca.crt",
        "-subj",
        "/CN=ca",
    )
    openssl(
        directory, "req", *ec[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=localhost"
    )
    (directory / "san").write_text("subjectAltName=DNS:localhost")
    openssl(
        directory, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-ca.crt", "-CAkey", f"{name}-ca.key",
        "-CAcreateserial", "-days", "1", "-extfile", "san", "-out", f"{name}.crt",
    )  # fmt: skip
    return TlsFiles(directory / f"{name}.crt", directory / f"{name}.key", directory / f"{name}-ca.crt")


@pytest.mark.envoy
@pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with openssl")
async def test_both_sides_show_certificates(open_world: Any, eventually: Any, tmp_path: Path) -> None:
    ours, strangers = certificates(tmp_path, "ours"), certificates(tmp_path, "strangers")
    impostor = TlsFiles(strangers.certificate, strangers.key, ours.authority)
    async with open_world(envoy=False, tls=ours) as world:
        await world.server.push(world.state())
        async with LocalEnvoy(world.ads_port, tls=impostor) as stranger:

            async def tried_again() -> bool:
                url = f"http://127.0.0.1:{stranger.admin_port}/stats?filter=sluice-operator.upstream_cx_total"
                try:
                    async with world.http.get(url) as response:
                        return int((await response.text()).split(":")[1]) >= 2
                except (OSError, IndexError):
                    return False

            await eventually(tried_again)
            assert world.server.num_gateways == 0
        async with LocalEnvoy(world.ads_port, tls=ours):
            assert (await world.server.wait_in_force(60)).ok
            assert (await world.chat()).status == 200
            assert await eventually(lambda: world.records)


@pytest.mark.envoy
async def test_readiness_follows_the_configuration(eventually: Any, open_world: Any) -> None:
    async with open_world(envoy=False) as world:
        ops_port = free_port()

        async def status(path: str) -> int:
            try:
                async with world.http.get(f"http://127.0.0.1:{ops_port}{path}") as response:
                    return int(response.status)
            except OSError:
                return 0

        async with LocalEnvoy(world.ads_port, ops_port=ops_port):
            await eventually(lambda: world.server.num_gateways)
            assert await status("/readyz") != 200
            await world.server.push(world.state())

            async def ready() -> bool:
                return await status("/readyz") == 200

            await eventually(ready)
            assert (await world.chat()).status == 200
            assert await status("/metrics") == 200
            assert await status("/config_dump") == 404


async def test_a_server_can_be_stopped_at_once() -> None:
    server = AdsServer(host="127.0.0.1", port=0)
    assert await server.start()
    await server.stop()


async def test_the_command_prints_what_render_gives() -> None:
    command = [
        sys.executable,
        "-m",
        "sluice_operator.xds.bootstrap",
        "--operator",
        "op.ns:18000",
        "--tls",
        "/tls",
    ]
    printed = subprocess.run(  # noqa: ASYNC221
        command, check=True, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    ).stdout
    files = TlsFiles(*(Path("/tls") / name for name in ("tls.crt", "tls.key", "ca.crt")))
    assert yaml.safe_load(printed) == render(("op.ns", 18000), tls=files)


@pytest.mark.envoy
async def test_a_gateway_asks_again_every_second(eventually: Any) -> None:
    """With Envoy's own back-off the tenth try comes after a minute and more."""
    num_tries = 0

    async def turn_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_tries
        num_tries += 1
        writer.close()

    server = await asyncio.start_server(turn_away, "127.0.0.1", 0)
    async with server, LocalEnvoy(server.sockets[0].getsockname()[1]):
        await eventually(lambda: num_tries >= 12, 40)
