"""The cluster that the kubeconfig names, with errors that a person can act on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from pydantic import ValidationError

from ..api import GROUP, VERSION, RoutePolicy
from .edit import JsonPatch

_TIMEOUT_S = 10


class ClusterError(Exception):
    """The cluster can't be reached, refused, or holds something that can't be read."""


class Cluster:
    """One namespace of the cluster that the kubeconfig's context names."""

    def __init__(self, *, context: str = "", namespace: str = "") -> None:
        # The client reads KUBECONFIG when it is imported, which is too early for tests.
        file = os.environ.get("KUBECONFIG") or None
        try:
            contexts, active = config.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
            config.load_kube_config(file, context=context or None)  # type: ignore[no-untyped-call]
        except (config.ConfigException, FileNotFoundError) as error:
            raise ClusterError(
                f"no usable kubeconfig ({str(error).rstrip('.')}): set KUBECONFIG, or --context"
            ) from None
        if context:
            active = next(item for item in contexts if item["name"] == context)
        self.namespace = namespace or active["context"].get("namespace") or "default"
        self._api = client.CustomObjectsApi()

    def policies(self) -> list[RoutePolicy]:
        """All RoutePolicies of the namespace, by name."""
        found = self._call(
            "RoutePolicies",
            lambda: self._api.list_namespaced_custom_object(
                GROUP, VERSION, self.namespace, "routepolicies", _request_timeout=_TIMEOUT_S
            ),
        )
        return [
            _parse(item) for item in sorted(found["items"], key=lambda item: str(item["metadata"]["name"]))
        ]

    def policy(self, name: str) -> RoutePolicy:
        """One RoutePolicy."""
        found = self._call(
            f"RoutePolicy {name}",
            lambda: self._api.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, "routepolicies", name, _request_timeout=_TIMEOUT_S
            ),
        )
        return _parse(found)

    def patch_policy(self, name: str, patch: JsonPatch) -> None:
        """Applies a JSON patch to the spec, as field manager `sluice-cli`."""
        self._call(
            f"RoutePolicy {name}",
            lambda: self._api.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                "routepolicies",
                name,
                patch,
                field_manager="sluice-cli",
                _content_type="application/json-patch+json",
                _request_timeout=_TIMEOUT_S,
            ),
        )

    def _call(self, what: str, call: Callable[[], Any]) -> dict[str, Any]:
        try:
            return dict(call())
        except ApiException as error:
            raise ClusterError(_told(error, what, self.namespace)) from None
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise ClusterError(f"the API server can't be reached: {reason}") from None


def _told(error: ApiException, what: str, namespace: str) -> str:
    try:
        message = str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        message = str(error.body or error.reason).strip()
    if error.status == 404:
        if "page not found" in message or "could not find the requested resource" in message:
            return "this cluster has no RoutePolicies: is Sluice installed (charts/sluice)?"
        return f"{what} is not in namespace {namespace}; another one: -n NAMESPACE"
    if error.status == 401:
        return "the cluster does not accept your credentials: log in again"
    if error.status == 422 and "test operation" in message:
        return f"{what} has changed in the meantime: try again"
    return message


def _parse(item: dict[str, Any]) -> RoutePolicy:
    try:
        return RoutePolicy.model_validate(
            {key: item[key] for key in ("metadata", "spec", "status") if key in item}
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        name = item["metadata"]["name"]
        raise ClusterError(
            f"RoutePolicy {name} can't be read at {field}: {first['msg']}."
            " Is this command older than the cluster's Sluice?"
        ) from None
