"""Names of the objects we own: deterministic, so that a replay is harmless, and within Kubernetes' limits."""

from __future__ import annotations

import hashlib

BACKEND_LABEL = "sluice.dev/backend"
POLICY_LABEL = "sluice.dev/policy"
RUNTIME_SECRET = "sluice-runtime"  # noqa: S105 (a name, not a secret)
_LONGEST = 52


def digest(text: str, length: int = 10) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def child(name: str) -> str:
    """Name of Deployment, Service, ConfigMap and budget of the backend ``name``; room is left for the
    pods' suffixes."""
    full = f"sluice-{name}"
    return full if len(full) <= _LONGEST else f"{full[: _LONGEST - 11]}-{digest(name)}"


def label(value: str) -> str:
    """``value`` as a label's value (63 characters at most)."""
    return value if len(value) <= 63 else f"{value[:52]}-{digest(value)}"


def revision(policy: str, generation: int) -> str:
    """Name of the ControllerRevision that keeps the accepted spec; its data is immutable, hence the
    generation."""
    return f"sluice-{policy}-{generation}"


def cluster(namespace: str, backend: str) -> str:
    return f"{namespace}/{backend}"


def service_cluster(namespace: str, service: str, port: int) -> str:
    return f"{namespace}/svc:{service}:{port}"
