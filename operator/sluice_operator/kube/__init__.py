"""The only place that talks to the API server: everything else hands over plain dicts and gets plain
dicts."""

from .client import Conflict, Kube, KubeError, NotFound

__all__ = ["Conflict", "Kube", "KubeError", "NotFound"]
