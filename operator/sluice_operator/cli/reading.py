"""`sluice ledger`: what was tried, with what evidence, and how it ended."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .cluster import Cluster
from .common import Context, Namespace, console, now, one_line_errors
from .edit import EditError
from .records import as_json, as_markdown, record_view, records_view


class Output(StrEnum):
    """How it is printed."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


def ledger(
    name: Annotated[
        str,
        typer.Argument(help="One ReleaseRecord, in full; default: all, in short.", show_default=False),
    ] = "",
    policy: Annotated[str, typer.Option(help="Only those of this RoutePolicy.", show_default=False)] = "",
    output: Annotated[Output, typer.Option("--output", "-o", help="How it is printed.")] = Output.TABLE,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """What was released before, rejected attempts too, with the evidence of both arms.

    Without a name: a few lines for each attempt, oldest first. With one: the whole record. `-o markdown`
    is a report to hand on, `-o json` is for programs. No record holds anybody's text.
    """
    with one_line_errors():
        cluster = Cluster(context=context, namespace=namespace)
        found = [cluster.record(name)] if name else cluster.records()
        if name and policy not in ("", found[0].spec.policy):
            raise EditError(f"{name} is of RoutePolicy {found[0].spec.policy}, not of {policy}")
        found = [record for record in found if policy in ("", record.spec.policy)]
        if output is Output.TABLE:
            console.print(record_view(found[0]) if name else records_view(found, now()))
        else:
            text = as_markdown(found) if output is Output.MARKDOWN else as_json(found, one=bool(name))
            typer.echo(text)
