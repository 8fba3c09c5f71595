"""A feature switched off by one edit, with the real engine: in force in seconds, and no pod starts again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openai import OpenAI

from e2e.harness import standin
from e2e.harness.install import Installation, backend_pods, models_dir
from e2e.harness.kube import Object, until
from e2e.test_backend_status import real

Make = Callable[[Object], Object]
PROMPT = "The gateway sends each request to the arm that its conversation belongs to. " * 12


def restarts(pods: list[Any]) -> list[tuple[str, int]]:
    return [(p["metadata"]["uid"], p["status"]["containerStatuses"][0]["restartCount"]) for p in pods]


def test_sharing_of_prefixes_is_switched_off_for_a_tenant(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    everything = {"dataClasses": ["Public", "Internal", "Confidential", "Restricted"]}
    made(real("switched", f"{models_dir()}/smol", fitness=everything))
    kube.wait_condition("InferenceBackend", "switched", "Ready", seconds=180)
    policy = standin.policy("switched", "switched", "switched")
    made(policy)
    kube.wait_condition("RoutePolicy", "switched", "Ready")
    client = OpenAI(base_url=sluice.url + "/v1", api_key=sluice.key, max_retries=0)

    def cached() -> int:
        answer = client.completions.create(model="switched", prompt=PROMPT, max_tokens=1)
        details = answer.usage and answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0

    cached()
    assert cached() > 0
    before = restarts(backend_pods(kube, "switched"))
    off = {"features": {"prefixCache": False}, "tenants": ["demo"]}
    kube.apply({**policy, "spec": {**policy["spec"], "switches": [off]}})
    until("nothing is taken from the cache", lambda: cached() == 0)
    other = {"features": {"prefixCache": False}, "tenants": ["somebody-else"]}
    kube.apply({**policy, "spec": {**policy["spec"], "switches": [other]}})
    until("another tenant's switch is not ours", lambda: cached() > 0)
    assert restarts(backend_pods(kube, "switched")) == before
