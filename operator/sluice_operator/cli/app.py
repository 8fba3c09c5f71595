"""Commands: each reads, renders or edits, and says what to do next. Errors are one line and exit code
1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from ..api import RoutePolicy
from .cluster import Cluster, ClusterError
from .edit import EditError, JsonPatch, abort_patch, retry_patch, rule_with_rollout
from .render import history_table, policies_view

app = typer.Typer(
    name="sluice",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    help=(
        "See and steer rollouts of LLM backends.\n\n"
        "`sluice status` shows where each rule's rollout stands and why it does not move; `sluice history`"
        " how it got there. `sluice rollback` takes a candidate out at once: it sets `abort: true` in the"
        " RoutePolicy, and a person's edit wins over everything automatic. `sluice retry` starts a new"
        " attempt after that.\n\n"
        "Everything shown can be read with `kubectl get routepolicy -o yaml` too. Where a GitOps tool owns"
        " the RoutePolicy, make the same edit in Git, or it will undo this one."
    ),
)
console = Console()
errors = Console(stderr=True)

Namespace = Annotated[
    str,
    typer.Option("--namespace", "-n", help="Namespace; default: the current context's.", show_default=False),
]
Context = Annotated[str, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)]
Policy = Annotated[str, typer.Argument(help="Name of the RoutePolicy.", show_default=False)]
RuleName = Annotated[
    str,
    typer.Argument(
        help="Name of the rule; may be left out where one rule has a rollout.", show_default=False
    ),
]


@app.command()
def status(
    policy: Annotated[
        str, typer.Argument(help="Name of one RoutePolicy; default: all.", show_default=False)
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing, until Ctrl-C.")] = False,
) -> None:
    """Where each rule's rollout stands: phase, weight, samples, evidence, and why it is held."""
    with _one_line_errors():
        cluster = Cluster(context=context, namespace=namespace)

        def look() -> list[RoutePolicy]:
            return [cluster.policy(policy)] if policy else cluster.policies()

        if not watch:
            console.print(policies_view(look(), _now(), cluster.namespace))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(policies_view(look(), _now(), cluster.namespace), refresh=True)
                time.sleep(1)


@app.command()
def history(policy: Policy, rule: RuleName = "", namespace: Namespace = "", context: Context = "") -> None:
    """What happened to a policy's rollouts, oldest first, with the evidence that decided."""
    with _one_line_errors():
        found = Cluster(context=context, namespace=namespace).policy(policy)
        if rule and rule not in [status.name for status in found.status.rules]:
            raise EditError(f"RoutePolicy {policy} has no rule {rule}")
        console.print(history_table(found, rule))


@app.command()
def rollback(policy: Policy, rule: RuleName = "", namespace: Namespace = "", context: Context = "") -> None:
    """Take a candidate out at once: sets `abort: true`, so that the rule's target serves everybody."""
    with _one_line_errors():
        _edit(policy, rule, namespace, context, abort_patch)
        console.print("Requests go to the target. To try again: [bold]sluice retry[/bold]")


app.command("abort", help="The same as `rollback`.")(rollback)


@app.command()
def retry(policy: Policy, rule: RuleName = "", namespace: Namespace = "", context: Context = "") -> None:
    """Start a new attempt after a rollback or an abort, from the beginning and with fresh evidence."""
    with _one_line_errors():
        _edit(policy, rule, namespace, context, retry_patch)
        console.print("A new attempt begins. Watch it: [bold]sluice status --watch[/bold]")


@app.command("version")
def show_version() -> None:
    """The version of this command."""
    try:
        console.print(f"sluice {version('sluice-operator')}")
    except PackageNotFoundError:
        console.print("sluice, not installed as a package")


def _edit(
    policy: str, rule: str, namespace: str, context: str, patch: Callable[[RoutePolicy, int], JsonPatch]
) -> None:
    cluster = Cluster(context=context, namespace=namespace)
    found = cluster.policy(policy)
    index = rule_with_rollout(found, rule)
    change = patch(found, index)
    cluster.patch_policy(policy, change)
    name = escape(found.spec.rules[index].name)
    for operation in change:
        if operation["op"] != "test":
            field = str(operation["path"]).rsplit("/", 1)[-1]
            console.print(
                f"RoutePolicy {escape(policy)}, rule {name}: rollout.{field} is now {operation['value']!r}"
            )


def _now() -> datetime:
    return datetime.now(UTC)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (ClusterError, EditError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
