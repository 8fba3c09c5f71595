"""The cluster that the kubeconfig names, with errors that a person can act on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from pydantic import ValidationError

from ..api import GROUP, VERSION, InferenceBackend, ReleaseRecord, RoutePolicy
from .edit import JsonPatch

_TIMEOUT_S = 10
_MANAGER = "sluice-cli"
T = TypeVar("T", RoutePolicy, InferenceBackend, ReleaseRecord)


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
        return self._list(RoutePolicy)

    def policy(self, name: str) -> RoutePolicy:
        """One RoutePolicy."""
        return self._get(RoutePolicy, name)

    def backend(self, name: str) -> InferenceBackend:
        """One InferenceBackend."""
        return self._get(InferenceBackend, name)

    def records(self) -> list[ReleaseRecord]:
        """All ReleaseRecords of the namespace, oldest first."""
        return sorted(self._list(ReleaseRecord), key=lambda record: record.spec.started)

    def record(self, name: str) -> ReleaseRecord:
        """One ReleaseRecord."""
        return self._get(ReleaseRecord, name)

    def patch_policy(self, name: str, patch: JsonPatch) -> None:
        """Applies a JSON patch to the spec."""
        self._patch(RoutePolicy, name, patch, "application/json-patch+json")

    def annotate(self, model: type[T], name: str, annotations: dict[str, str]) -> None:
        """Sets annotations: a request to the operator."""
        body = {"metadata": {"annotations": annotations}}
        self._patch(model, name, body, "application/merge-patch+json")

    def newest_event(self, kind: str, name: str, reason: str) -> str:
        """Message of the newest Event of this reason about an object; empty: there is none."""
        found = self._call(
            "Events",
            lambda: (
                client.CoreV1Api()
                .list_namespaced_event(
                    self.namespace,
                    field_selector=f"involvedObject.kind={kind},involvedObject.name={name},reason={reason}",
                    _request_timeout=_TIMEOUT_S,
                )
                .to_dict()
            ),
        )
        events = sorted(found["items"], key=lambda event: str(event["last_timestamp"]))
        return str(events[-1]["message"]) if events else ""

    def _list(self, model: type[T]) -> list[T]:
        found = self._call(
            f"{model.__name__} objects",
            lambda: self._api.list_namespaced_custom_object(
                GROUP, VERSION, self.namespace, model.KIND.plural, _request_timeout=_TIMEOUT_S
            ),
        )
        items = sorted(found["items"], key=lambda item: str(item["metadata"]["name"]))
        return [_parse(model, item) for item in items]

    def _get(self, model: type[T], name: str) -> T:
        found = self._call(
            f"{model.__name__} {name}",
            lambda: self._api.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, model.KIND.plural, name, _request_timeout=_TIMEOUT_S
            ),
        )
        return _parse(model, found)

    def _patch(self, model: type[T], name: str, body: Any, content_type: str) -> None:
        self._call(
            f"{model.__name__} {name}",
            lambda: self._api.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                model.KIND.plural,
                name,
                body,
                field_manager=_MANAGER,
                _content_type=content_type,
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
            kind = what.split()[0]
            return f"this cluster knows no {kind}: is Sluice installed (charts/sluice)?"
        return f"{what} is not in namespace {namespace}; another one: -n NAMESPACE"
    if error.status == 401:
        return "the cluster does not accept your credentials: log in again"
    if error.status == 422 and "rejected our request" in message:
        # All that the API server says where a test of a JSON patch fails; what is invalid is told in full.
        return f"{what} has changed in the meantime: try again"
    return message


def _parse(model: type[T], item: dict[str, Any]) -> T:
    try:
        return model.model_validate({key: item[key] for key in ("metadata", "spec", "status") if key in item})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        name = item["metadata"]["name"]
        raise ClusterError(
            f"{model.__name__} {name} can't be read at {field}: {first['msg']}."
            " Is this command older than the cluster's Sluice?"
        ) from None
