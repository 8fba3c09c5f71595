"""Statuses on the wire."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ..kube.client import Kind
from ..plan.conditions import Fact, find, merge
from .cache import Broken, parse_conditions
from .context import Context, about, now, stamp


def wire(status: BaseModel) -> dict[str, Any]:
    """As the API server takes it."""
    told: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return told


def changed(before: BaseModel, after: BaseModel) -> bool:
    return wire(before) != wire(after)


async def tell_broken(ctx: Context, kind: Kind, broken: Broken) -> None:
    """An object that the types refuse: Stalled, with the field, and nothing else of its status touched."""
    meta = broken.metadata
    old = parse_conditions(broken.status.get("conditions") or [])
    facts = [
        Fact("Ready", "False", broken.problem.reason, broken.problem.text()),
        Fact("Reconciling", "False", "Stalled", "waiting for a correction"),
        Fact("Stalled", "True", broken.problem.reason, broken.problem.text()),
    ]
    conditions = merge(old, facts, generation=meta.generation, now=stamp())
    if conditions == old and broken.status.get("observedGeneration") == meta.generation:
        return
    status = {"observedGeneration": meta.generation, "conditions": [wire(c) for c in conditions]}
    answer = await ctx.kube.patch_status(kind, meta.namespace, meta.name, status)
    await ctx.answered(kind.kind, answer)
    before = find(old, "Stalled")
    if before is None or before.message != broken.problem.text():
        await ctx.recorder.tell(
            about(kind.kind, meta), broken.problem.reason, broken.problem.text(), now(), kind="Warning"
        )
