"""The Secret ``sluice-runtime``: made once in the operator's namespace, copied to where backends run.

It is made here and not by the chart, since a template that draws random values draws them again at each
upgrade. Secrets are never cached but for the two values themselves and what tenants and verifiers name, and
never logged.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any

from ..api import FIELD_MANAGER
from ..kube import Conflict, Kube
from ..kube.client import CONFIG_MAP, SECRET
from ..plan.access import OFFERED_TYPE
from .cache import Name
from .context import Context, Credentials

_KEYS = ("admin-token", "gateway-credential")


def decode(secret: Mapping[str, Any] | None) -> dict[str, str]:
    """Text values of a Secret; what is not text is left out."""
    found = {}
    for key, value in ((secret or {}).get("data") or {}).items():
        try:
            found[key] = base64.b64decode(value).decode()
        except ValueError:
            continue
    return found


def _manifest(namespace: str, name: str, data: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": FIELD_MANAGER},
        },
        "data": {k: base64.b64encode(v.encode()).decode() for k, v in data.items()},
    }


async def establish(kube: Kube, namespace: str, name: str) -> Credentials:
    """The credentials of this installation, made if there are none yet."""
    found = decode(await kube.find(SECRET, namespace, name))
    if not all(found.get(key) for key in _KEYS):
        whole = {key: found.get(key) or secrets.token_urlsafe(32) for key in _KEYS}
        try:
            if found:
                await kube.apply(_manifest(namespace, name, whole))
            else:
                await kube.create(_manifest(namespace, name, whole))
        except Conflict:
            pass
        found = decode(await kube.get(SECRET, namespace, name))
    return Credentials(found["admin-token"].strip(), found["gateway-credential"].strip())


async def ensure_copy(ctx: Context, namespace: str) -> None:
    """The same Secret where pods mount it."""
    name = ctx.settings.defaults.runtime_secret
    if namespace == ctx.settings.namespace:
        return
    if decode(await ctx.kube.find(SECRET, namespace, name)) != ctx.credentials.data():
        await ctx.kube.apply(_manifest(namespace, name, ctx.credentials.data()))


async def load(ctx: Context, wanted: set[Name], config_maps: set[Name]) -> bool:
    """Reads what tenants and verifiers name. Returns whether any differs from what was known."""
    read = {name: await ctx.kube.find(SECRET, *name) for name in sorted(wanted)}
    found = {name: decode(secret) for name, secret in read.items()}
    offered = {name for name, secret in read.items() if (secret or {}).get("type") == OFFERED_TYPE}
    bundles = {
        name: ((await ctx.kube.find(CONFIG_MAP, *name)) or {}).get("data") or {}
        for name in sorted(config_maps)
    }
    if (found, bundles, offered) == (ctx.secrets, ctx.config_maps, ctx.offered):
        return False
    for known, news in ((ctx.secrets, found), (ctx.config_maps, bundles)):
        known.clear()
        known.update(news)
    ctx.offered = offered
    return True
