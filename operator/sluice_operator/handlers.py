"""kopf's part: watching, and nothing else.

Handlers hand each event on and return nothing (kopf would write it to status). What is done about an event
is level triggered and lives in ``control``, so a lost or doubled event costs time, never truth.
"""

from __future__ import annotations

from typing import Any

import kopf

from .api import GROUP, VERSION
from .control.app import App
from .plan.names import BACKEND_LABEL

WATCHED = {
    "inferencebackends": "InferenceBackend",
    "routepolicies": "RoutePolicy",
    "cachescopes": "CacheScope",
    "tenants": "Tenant",
    "evalsuites": "EvalSuite",
    "releaserecords": "ReleaseRecord",
}


def register(registry: kopf.OperatorRegistry, app: App) -> None:
    """Watches all that the operator looks at."""
    for plural, kind in WATCHED.items():
        kopf.on.event(GROUP, VERSION, plural, registry=registry)(_handler(app, kind))
    ours = {BACKEND_LABEL: kopf.PRESENT}
    kopf.on.event("", "v1", "pods", labels=ours, registry=registry)(_handler(app, "Pod"))
    kopf.on.event("apps", "v1", "deployments", labels=ours, registry=registry)(_handler(app, "Deployment"))
    kopf.on.event("", "v1", "secrets", registry=registry)(_handler(app, "Secret"))


def _handler(app: App, kind: str) -> Any:
    async def watched(event: kopf.RawEvent, **_: Any) -> None:
        await app.event(kind, event["type"], event["object"])

    watched.__name__ = f"watch_{kind.lower()}"
    return watched


def settings() -> kopf.OperatorSettings:
    """kopf tuned for watching only; see FACTS in the issue for the figures behind each."""
    told = kopf.OperatorSettings()
    told.posting.enabled = False
    told.queueing.idle_timeout = 1.0
    told.watching.inactivity_timeout = 60.0
    told.watching.server_timeout = 300  # the API server takes whole seconds only
    told.watching.connect_timeout = 5.0
    told.networking.request_timeout = 30.0
    told.persistence.finalizer = f"{GROUP}/unused"
    told.scanning.disabled = False
    return told
