"""All commands: each reads, renders or edits, and says what to do next. Errors are one line and exit code
1.
"""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.live import Live
from rich.markup import escape

from ..api import RoutePolicy
from .asking import calibrate, review
from .capacity import capacity
from .cluster import Cluster
from .common import Context, Namespace, Policy, RuleName, console, edit, now, one_line_errors
from .edit import (
    EditError,
    JsonPatch,
    abort_patch,
    approve_patch,
    awaited_step,
    exclude_patch,
    retry_patch,
    rollout_of,
    status_of,
)
from .evaluate import evaluate
from .reading import ledger
from .render import approved, history_table, policies_view
from .simulate import simulate

app = typer.Typer(
    name="sluice",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    help=(
        "See and steer rollouts of LLM backends.\n\n"
        "`sluice status` shows where each rule's rollout stands and why it does not move; `sluice history`"
        " how it got there; `sluice ledger` what was tried before, with the evidence. `sluice rollback` takes"
        " a candidate out at once: it sets `abort: true` in the RoutePolicy, and a person's edit wins over"
        " everything automatic. `sluice retry` starts a new attempt after that.\n\n"
        "Everything shown can be read with `kubectl get routepolicy -o yaml` too. Where a GitOps tool owns"
        " the RoutePolicy, make the same edit in Git, or it will undo this one."
    ),
)
_SEE, _STEER, _TEST = "See", "Steer", "Test and measure"


@app.command(rich_help_panel=_SEE)
def status(
    policy: Annotated[
        str, typer.Argument(help="Name of one RoutePolicy; default: all.", show_default=False)
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing, until Ctrl-C.")] = False,
) -> None:
    """Where each rule's rollout stands: phase, weight, samples, evidence, and why it is held."""
    with one_line_errors():
        cluster = Cluster(context=context, namespace=namespace)

        def look() -> list[RoutePolicy]:
            return [cluster.policy(policy)] if policy else cluster.policies()

        if not watch:
            console.print(policies_view(look(), now(), cluster.namespace))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(policies_view(look(), now(), cluster.namespace), refresh=True)
                time.sleep(1)


@app.command(rich_help_panel=_SEE)
def history(policy: Policy, rule: RuleName = "", namespace: Namespace = "", context: Context = "") -> None:
    """What happened to a policy's rollouts, oldest first, with the evidence that decided."""
    with one_line_errors():
        found = Cluster(context=context, namespace=namespace).policy(policy)
        known = [*(one.name for one in found.spec.rules), *(one.name for one in found.status.rules)]
        if rule and rule not in known:
            names = ", ".join(dict.fromkeys(known))
            raise EditError(f"RoutePolicy {policy} has no rule {rule}; it has {names}")
        console.print(history_table(found, rule))


@app.command(rich_help_panel=_STEER)
def approve(policy: Policy, rule: RuleName = "", namespace: Namespace = "", context: Context = "") -> None:
    """Let a rollout take the step that waits for a person, for this attempt alone.

    It sets `rollout.approval` to the attempt and step that `sluice status` names. If another candidate has
    come in the meantime, nothing is approved.
    """
    with one_line_errors():

        def patch(found: RoutePolicy, index: int) -> JsonPatch:
            change, step = approve_patch(found, index), awaited_step(found, index)
            rollout, seen = rollout_of(found, index), status_of(found, index)
            assert step is not None
            console.print(
                f"You approve {escape(seen.candidate.backend)} against {escape(seen.stable.backend)}:"
                f" {escape(approved(rollout, step))}"
            )
            return change

        edit(policy, rule, namespace, context, patch)
        console.print("It goes on with its guards armed. Watch it: [bold]sluice status --watch[/bold]")


@app.command(rich_help_panel=_STEER)
def exclude(
    policy: Policy,
    rule: RuleName = "",
    task: Annotated[str, typer.Option(help="Requests of this task.", show_default=False)] = "",
    tenant: Annotated[str, typer.Option(help="Requests of this tenant.", show_default=False)] = "",
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Take a candidate from one task, one tenant, or one task of one tenant; the rest goes on.

    Those requests go to the rule's target at once. To undo it, remove the entry from `rollout.exclude`.
    """
    with one_line_errors():
        edit(
            policy,
            rule,
            namespace,
            context,
            lambda found, index: exclude_patch(found, index, task, tenant),
        )
        console.print("Those requests go to the target; the rollout goes on with the rest.")


@app.command(rich_help_panel=_STEER)
def rollback(policy: Policy, rule: RuleName = "", namespace: Namespace = "", context: Context = "") -> None:
    """Take a candidate out at once: sets `abort: true`, so that the rule's target serves everybody."""
    with one_line_errors():

        def patch(found: RoutePolicy, index: int) -> JsonPatch:
            cost = status_of(found, index).rollback_cost
            if cost:
                console.print(f"It costs: {escape(cost)}")
            return abort_patch(found, index)

        edit(policy, rule, namespace, context, patch)
        console.print("Requests go to the target. To try again: [bold]sluice retry[/bold]")


app.command("abort", help="The same as `rollback`.", rich_help_panel=_STEER)(rollback)


@app.command(rich_help_panel=_STEER)
def retry(policy: Policy, rule: RuleName = "", namespace: Namespace = "", context: Context = "") -> None:
    """Start a new attempt after a rollback or an abort, from the beginning and with fresh evidence."""
    with one_line_errors():
        edit(policy, rule, namespace, context, retry_patch)
        console.print("A new attempt begins. Watch it: [bold]sluice status --watch[/bold]")


app.command(rich_help_panel=_SEE)(ledger)
for command in (review, evaluate, calibrate, simulate, capacity):
    app.command(rich_help_panel=_TEST)(command)


@app.command("version", rich_help_panel=_SEE)
def show_version() -> None:
    """The version of this command."""
    try:
        console.print(f"sluice {version('sluice-operator')}")
    except PackageNotFoundError:
        console.print("sluice, not installed as a package")
