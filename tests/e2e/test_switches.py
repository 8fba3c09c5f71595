"""Features switched off by one edit, with the real engine: in force in seconds, and no pod starts again."""

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
"""Long enough for the cache, and repeated, so that what comes next is guessed."""


def restarts(pods: list[Any]) -> list[tuple[str, int]]:
    return [(p["metadata"]["uid"], p["status"]["containerStatuses"][0]["restartCount"]) for p in pods]


def test_features_are_switched_off_for_a_tenant(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    everything = {"dataClasses": ["Public", "Internal", "Confidential", "Restricted"]}
    engine = {"maxModelLen": 256, "kvCacheMemory": "16Mi", "speculation": {"method": "Suffix"}}
    made(real("switched", f"{models_dir()}/smol", fitness=everything, engine=engine))
    kube.wait_condition("InferenceBackend", "switched", "Ready")
    policy = standin.policy("switched", "switched", "switched")
    made(policy)
    kube.wait_condition("RoutePolicy", "switched", "Ready")
    client = OpenAI(base_url=sluice.url + "/v1", api_key=sluice.key, max_retries=0)

    def used() -> dict[str, int]:
        """What each feature did for one answer: tokens taken from the cache, and tokens guessed. Long enough
        for a block of the controller's with guesses, whichever it begins with."""
        answer = client.completions.create(model="switched", prompt=PROMPT, max_tokens=40, temperature=0)
        assert answer.usage is not None
        prompt, output = answer.usage.prompt_tokens_details, answer.usage.completion_tokens_details
        assert prompt is not None
        assert output is not None
        guessed = (output.accepted_prediction_tokens or 0) + (output.rejected_prediction_tokens or 0)
        return {"prefixCache": prompt.cached_tokens or 0, "speculation": guessed}

    used()
    before = restarts(backend_pods(kube, "switched"))
    for feature, other in (("speculation", "prefixCache"), ("prefixCache", "speculation")):
        assert min(used().values()) > 0

        def switch(tenant: str, feature: str = feature) -> None:
            off = {"features": {feature: False}, "tenants": [tenant]}
            kube.apply({**policy, "spec": {**policy["spec"], "switches": [off]}})

        def told(feature: str = feature) -> int:
            return used()[feature]

        switch("demo")
        until(f"{feature} is off", lambda: told() == 0)
        assert used()[other] > 0, "each is switched for itself"
        switch("somebody-else")
        until("another tenant's switch is not ours", lambda: told() > 0)
    assert restarts(backend_pods(kube, "switched")) == before
