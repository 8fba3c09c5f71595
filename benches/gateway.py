"""Milliseconds that the gateway adds to a request: through it against straight to a pod, paired.

Without an address a local Envoy with the real configuration stands before a stand-in pod, so that the
figure is the gateway's own: authentication, claims, body, routing, records. With ``--gateway`` and
``--pod`` the same is measured wherever these are. Each pair sends the same body twice in random order; the
differences are what is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from sluice_operator.api.common import DataClass, Risk
from sluice_operator.xds.local import LocalEnvoy, free_port
from sluice_operator.xds.server import AdsServer
from sluice_operator.xds.state import Arm, Cluster, Endpoint, GatewayState, Policy, Rule, Tenant


@dataclass(frozen=True)
class Target:
    """Where requests go, and with what."""

    url: str
    headers: dict[str, str]


@contextlib.asynccontextmanager
async def local() -> AsyncIterator[tuple[Target, Target]]:
    """A stand-in pod and a gateway before it, with a rollout in progress and its records being received."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.json_response({"object": "chat.completion", "choices": []})

    app = web.Application(client_max_size=8 << 20)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pod = runner.addresses[0][1]
    port = free_port()
    server = AdsServer(host="127.0.0.1", port=0, gateway_address=("127.0.0.1", port))
    endpoint = (Endpoint("127.0.0.1", pod),)
    rule = Rule("all", Arm("ns/stable", "c"), candidate=Arm("ns/candidate", "d"), attempt="a", weight=10)
    await server.push(
        GatewayState(
            clusters=(Cluster("ns/stable", endpoint), Cluster("ns/candidate", endpoint)),
            policies=(Policy("ns/bench", "bench", (rule,)),),
            tenants=(Tenant("bench", "d", ("bench-key",), data_classes=tuple(DataClass), risks=tuple(Risk)),),
        )
    )
    async with LocalEnvoy(await server.start()):
        if not (await server.wait_in_force(30)).ok:
            raise SystemExit("the local gateway did not come up")
        path = "/v1/chat/completions"
        through = Target(f"http://127.0.0.1:{port}{path}", {"authorization": "Bearer bench-key"})
        yield through, Target(f"http://127.0.0.1:{pod}{path}", {})
    await server.stop()
    await runner.cleanup()


async def timed(session: aiohttp.ClientSession, target: Target, body: bytes) -> float:
    """Milliseconds of one request; anything but 200 ends the bench."""
    headers = {"content-type": "application/json", **target.headers}
    start = time.perf_counter()
    async with session.post(target.url, data=body, headers=headers) as response:
        text = await response.text()
        if response.status != 200:
            raise SystemExit(f"{target.url} answered {response.status}: {text[:300]}")
    return (time.perf_counter() - start) * 1e3


async def measure(
    through: Target, straight: Target, *, model: str, pairs: int, size: int, seed: int
) -> list[tuple[float, float]]:
    """Pairs of milliseconds: through the gateway, straight."""
    dice = random.Random(seed)
    results = []
    async with aiohttp.ClientSession() as session:
        for index in range(pairs + 50):
            text = "".join(dice.choices("abcdefgh ", k=size))
            body = json.dumps(
                {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
            ).encode()
            order = [0, 1]
            dice.shuffle(order)
            taken = [0.0, 0.0]
            for which in order:
                taken[which] = await timed(session, (through, straight)[which], body)
            if index >= 50:
                results.append((taken[0], taken[1]))
    return results


def report(results: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Print the table; returns what the last line says."""

    def percentiles(values: list[float]) -> tuple[float, float]:
        cuts = statistics.quantiles(values, n=100)
        return cuts[49], cuts[98]

    rows = {
        "through": [a for a, _ in results],
        "straight": [b for _, b in results],
        "added (paired)": [a - b for a, b in results],
    }
    print(f"{'milliseconds':<16}{'p50':>8}{'p99':>8}")
    for name, values in rows.items():
        p50, p99 = percentiles(values)
        print(f"{name:<16}{p50:>8.2f}{p99:>8.2f}")
    p50, p99 = percentiles(rows["added (paired)"])
    return {"added_ms": {"p50": round(p50, 3), "p99": round(p99, 3)}}


async def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gateway", metavar="URL", help="of /v1/chat/completions at the gateway")
    parser.add_argument("--pod", metavar="URL", help="of /v1/chat/completions at a pod")
    parser.add_argument("--key", default="", help="API key for the gateway")
    parser.add_argument("--credential", default="", help="what the pod asks for in x-sluice-credential")
    parser.add_argument("--config", default="", help="configuration version for the pod, in x-sluice-config")
    parser.add_argument("--model", default="bench")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--size", type=int, default=2000, help="characters of the prompt")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sizes = {"pairs": options.pairs, "size": options.size, "seed": options.seed}
    print(f"seed {options.seed}, {options.pairs} pairs, {options.size} characters", file=sys.stderr)
    if options.gateway and options.pod:
        pod_headers = {"x-sluice-credential": options.credential, "x-sluice-config": options.config}
        through = Target(options.gateway, {"authorization": f"Bearer {options.key}"})
        straight = Target(options.pod, {k: v for k, v in pod_headers.items() if v})
        results = await measure(through, straight, model=options.model, **sizes)
    else:
        async with local() as (through, straight):
            results = await measure(through, straight, model=options.model, **sizes)
    print(f"seed {options.seed}")
    print(json.dumps(report(results)))


if __name__ == "__main__":
    asyncio.run(main())
