"""What commands share: options, consoles, and errors of one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from ..api import RoutePolicy
from .cluster import Cluster, ClusterError
from .edit import EditError, JsonPatch, rule_with_rollout

console = Console()
errors = Console(stderr=True)
T = TypeVar("T")

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
Wait = Annotated[bool, typer.Option("--wait", "-w", help="Wait for the result, and show it.")]


def now() -> datetime:
    return datetime.now(UTC)


def stamp() -> str:
    """Now, RFC 3339."""
    return now().strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What went wrong in one line, with exit code 1."""
    try:
        yield
    except (ClusterError, EditError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def edit(
    policy: str, rule: str, namespace: str, context: str, patch: Callable[[RoutePolicy, int], JsonPatch]
) -> None:
    """Makes an edit of a rule's rollout, and says what it has set."""
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
                f"RoutePolicy {escape(policy)}, rule {name}: rollout.{field} is now"
                f" {escape(repr(operation['value']))}"
            )


def waited(title: str, look: Callable[[], tuple[T | None, str]], seconds: float) -> T:
    """Looks once a second until there is something. `look` also says how far it is. Raises EditError."""
    deadline = time.monotonic() + seconds
    with console.status(escape(title)) as status:
        while True:
            found, progress = look()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise EditError(f"{title}: nothing within {seconds:.0f} s: is the operator running?")
            if progress:
                status.update(escape(f"{title}: {progress}"))
            time.sleep(1)
