"""PromQL guards: a real Prometheus scrapes the arms' pods, and what it says counts."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.harness.prometheus import LocalPrometheus, program
from integration.test_rollouts import in_phase
from integration.world import Load, World, backend_manifest, policy_manifest, rollout, until
from sluice_operator.kube.client import POLICY, Kind
from sluice_operator.xds.local import LocalEnvoy

pytestmark = [pytest.mark.apiserver, pytest.mark.prometheus]
BURN = {
    "name": "errors-seen",
    "query": 'sum(sluice_requests_total{outcome="error",arm="$arm"})',
    "max": "3",
    "failures": 2,
    "intervalSeconds": 1,
}


async def test_a_metric_of_the_users_own_takes_a_candidate_back(bare: World) -> None:
    executable = program()
    assert executable is not None, "no Prometheus: run `make prometheus`"
    pods = []
    async with LocalEnvoy(bare.ads_port):
        # Which ports the pods get is known once they are there, and the operator is told at its start.
        await bare.start_operator()
        await bare.tenant()
        for name, script in (("a", {}), ("b", {"error_rate": 0.5})):
            pods.append(await bare.serve(name, **script))
        await bare.kill_operator()
        targets = [f"127.0.0.1:{pod.api_port}" for pod in pods]
        async with LocalPrometheus(executable, targets) as prometheus:
            await bare.start_operator(prometheus_url=prometheus.url)
            await bare.apply(policy_manifest("m", "a"))
            await bare.wait_condition(POLICY, "m", "Ready")
            async with Load(bare, "m"):
                # No other guard may be quicker: what went wrong is watched only.
                spec = rollout(
                    "b", 50, seconds=600, queries=[BURN], guards=[{"metric": "ErrorRate", "mode": "Watch"}]
                )
                await bare.apply(policy_manifest("m", "a", rollout=spec))
                rule = await in_phase(bare, "m", "RolledBack")
            assert rule["history"][-1]["reason"] == "QueryFired"
            assert "errors-seen" in rule["history"][-1]["message"]
            assert rule["weight"] == 0
            assert rule["queries"][0]["numFailures"] >= 2


async def test_without_a_prometheus_a_policy_with_queries_is_refused(world: World) -> None:
    for name in ("a", "b"):
        await world.apply(backend_manifest(name))

    async def there() -> bool:
        deployments = [await world.gone(Kind("apps/v1", "Deployment"), f"sluice-{name}") for name in "ab"]
        return not any(deployments)

    await until("both backends are known", there)
    await world.apply(policy_manifest("m", "a", rollout=rollout("b", 50, queries=[BURN])))
    told: dict[str, Any] = await world.wait_condition(POLICY, "m", "Stalled")
    assert told["reason"] == "PrometheusNotFound"
    assert "rollout.queries[0]" in told["message"]
