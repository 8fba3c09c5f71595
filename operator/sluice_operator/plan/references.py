"""Secrets and ConfigMaps that a policy's verifiers need, and the names by which configurations mean them.

Invariant: a name has the namespace of the policy in it, so no policy can mean what another namespace holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..api.routepolicy import RoutePolicySpec, Verifier


@dataclass(frozen=True)
class Reference:
    """A key of an object that a verifier needs."""

    kind: Literal["Secret", "ConfigMap"]
    namespace: str
    name: str
    key: str
    field: str
    """What names it, within the verifier."""

    @property
    def object(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def text(self) -> str:
        """How configurations name the value."""
        return f"{self.namespace}/{self.kind}/{self.name}/{self.key}"


def token_of(namespace: str, verifier: Verifier) -> Reference | None:
    """Where its token stands."""
    ref = verifier.token_secret
    return Reference("Secret", namespace, ref.name, ref.key, "tokenSecret") if ref is not None else None


def authority_of(namespace: str, verifier: Verifier) -> Reference | None:
    """Where its certificate authorities stand."""
    bundle = verifier.ca_bundle
    if bundle is None:
        return None
    if bundle.secret is not None:
        return Reference("Secret", namespace, bundle.secret.name, bundle.secret.key, "caBundle.secret")
    assert bundle.config_map is not None
    ref = bundle.config_map
    return Reference("ConfigMap", namespace, ref.name, ref.key, "caBundle.configMap")


def references(namespace: str, spec: RoutePolicySpec) -> Iterator[Reference]:
    """All that a policy's verifiers need."""
    for _, verifier in verifiers(spec):
        yield from filter(None, (token_of(namespace, verifier), authority_of(namespace, verifier)))


def verifiers(spec: RoutePolicySpec) -> Iterator[tuple[str, Verifier]]:
    """Each verifier of a policy, with the field that it stands in."""
    for i, rule in enumerate(spec.rules):
        for j, check in enumerate(rule.contract.checks):
            if check.verifier is not None:
                yield f"spec.rules[{i}].contract.checks[{j}].verifier", check.verifier
