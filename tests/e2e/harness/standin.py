"""Backends whose engine is scripted: the runtime's own server, contract, evidence and admin port without a
model.

They start in a second and take almost no CPU, so that rollouts can be driven at 20 requests/s on two cores.
"""

from __future__ import annotations

import json
from typing import Any

from .install import images
from .kube import Object

GOOD: Object = {
    "ttft": 0.02,
    "tpot": 0.002,
    "sigma": 0.3,
    "text": "The capital of France is Paris.",
    "error_rate": 0.0,
}


def backend(name: str, *, replicas: int = 1, **script: Any) -> Object:
    """An InferenceBackend manifest whose pods answer as the script says."""
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceBackend",
        "metadata": {"name": name},
        "spec": {
            "model": {"hostPath": {"path": "/var/tmp"}},
            "image": images()["RUNTIME_IMAGE"],
            "args": [
                "-m",
                "sluice_runtime.standin",
                "--config",
                "/etc/sluice/backend.json",
                "--script",
                json.dumps(GOOD | script),
            ],
            "engine": {"maxNumSeqs": 64, "maxQueue": 256},
            "replicas": replicas,
            "resources": {"requests": {"cpu": "20m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
            "fitness": {"dataClasses": ["Public", "Internal", "Confidential", "Restricted"]},
            "terminationGracePeriodSeconds": 5,
        },
    }


def policy(
    name: str, model: str, stable: str, *, rollout: Object | None = None, checks: list[Object] | None = None
) -> Object:
    """A RoutePolicy with one rule ``all``."""
    rule: Object = {"name": "all", "target": {"backend": stable}, "contract": {"checks": checks or []}}
    if rollout:
        rule["rollout"] = rollout
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "RoutePolicy",
        "metadata": {"name": name},
        "spec": {"model": model, "rules": [rule]},
    }


def rollout(
    candidate: str,
    *weights: int,
    seconds: int = 5,
    samples: int = 10,
    shadow: Object | None = None,
    **more: Any,
) -> Object:
    """A rollout with these steps, promoted right after the last one."""
    steps = [{"weight": weight, "minSeconds": seconds, "minSamples": samples} for weight in weights]
    return {
        "candidate": {"backend": candidate},
        "steps": steps,
        "watch": {"seconds": 0},
        **({"shadow": shadow} if shadow else {}),
        **more,
    }
