"""Release records for people and programs. Pure: the time is given, nothing is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.text import Text

from ..api import ReleaseRecord
from ..api.releaserecord import Outcome
from ..plan.report import markdown
from .render import since

STYLES = {
    Outcome.RUNNING: "yellow",
    Outcome.PROMOTED: "green",
    Outcome.ROLLED_BACK: "red",
    Outcome.ABORTED: "magenta",
    Outcome.SUPERSEDED: "dim",
}


def records_view(records: Sequence[ReleaseRecord], now: datetime) -> RenderableType:
    """A paragraph for each record: its name, how it ended and when, what was compared, and why."""
    if not records:
        return Text("No release has been recorded here yet.")
    lines: list[Text] = []
    for record in records:
        spec = record.spec
        line = Text.assemble((record.metadata.name, "bold"), "  ", (spec.outcome.value, STYLES[spec.outcome]))
        when = since(spec.ended or spec.started, now)
        line.append(f"  {when} ago" if when else "")
        line.append("  review due" if is_due(record, now) else "", style="yellow")
        arms = f"{spec.candidate.backend or 'settings'} against {spec.stable.backend}"
        lines += [line, Text(f"  {spec.policy}/{spec.rule}: {arms}")]
        if spec.reason:
            lines.append(Text(f"  {spec.reason}: {spec.message}"))
    return Group(*lines)


def is_due(record: ReleaseRecord, now: datetime) -> bool:
    """Whether its comparison should be repeated."""
    spec = record.spec
    return bool(spec.ended and spec.next_review) and datetime.fromisoformat(spec.next_review) <= now


def record_view(record: ReleaseRecord) -> RenderableType:
    """The whole report, for a terminal."""
    return Markdown(markdown(record.spec), hyperlinks=False)


def as_markdown(records: Sequence[ReleaseRecord]) -> str:
    """Reports, one after the other."""
    return "\n".join(markdown(record.spec) for record in records)


def as_json(records: Sequence[ReleaseRecord], *, one: bool) -> str:
    """Records as `kubectl -o json` has them; `one`: the only one, and no list."""
    told = [
        {
            "name": record.metadata.name,
            "namespace": record.metadata.namespace,
            **record.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
        for record in records
    ]
    return json.dumps(told[0] if one else told, indent=2, ensure_ascii=False)
