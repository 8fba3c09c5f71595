"""Commands that ask the operator for something, by an annotation: reviews, evaluations, calibrations.

The operator answers in the object's status or in the ledger, so a request outlives both this command and the
operator that first saw it.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer
from rich.markup import escape

from ..api import InferenceBackend, RoutePolicy, RuleStatus
from ..api.releaserecord import Review
from .cluster import Cluster
from .common import Context, Namespace, Wait, console, one_line_errors, stamp, waited
from .edit import ATTEMPT_UNDER_WAY, EditError, rollout_of, rule_with_rollout, status_of
from .render import evaluation

REVIEW, EVALUATE = "sluice.dev/review", "sluice.dev/evaluate"
CALIBRATE, CALIBRATED = "sluice.dev/calibrate", "sluice.dev/calibrated"
_REVIEW_S, _CALIBRATE_S, _SLACK_S = 4500.0, 3900.0, 120.0


def review(
    name: Annotated[str, typer.Argument(help="Name of the ReleaseRecord.", show_default=False)],
    wait: Wait = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Repeat a record's comparison on today's traffic, and note the outcome in the record.

    Both arms get copies of a tenth of the rule's requests; nobody sees the answers. It takes from five
    minutes to an hour and says Keep, Limit (keep it from one task or tenant), GoBack or LookLonger. Both
    backends must still have pods.
    """
    with one_line_errors():
        cluster = Cluster(context=context, namespace=namespace)
        spec = cluster.record(name).spec
        policy = cluster.policy(spec.policy)
        if not spec.ended:
            raise EditError(f"{name} is of an attempt that goes on: `sluice status` shows it")
        if spec.stable.backend == spec.candidate.backend:
            raise EditError(f"both arms of {name} are of one backend: start a rollout to compare settings")
        if spec.rule not in [rule.name for rule in policy.spec.rules]:
            raise EditError(f"RoutePolicy {spec.policy} has no rule {spec.rule} any more: no traffic to copy")
        asked = stamp()
        cluster.annotate(RoutePolicy, spec.policy, {REVIEW: f"{name} {asked}"})
        console.print(
            f"{escape(spec.candidate.backend)} is compared with {escape(spec.stable.backend)} on copies of"
            f" rule {escape(spec.rule)}. The outcome: [bold]sluice ledger {escape(name)}[/bold]"
        )
        if wait:
            found = waited("comparing", lambda: (_reviewed(cluster, name, asked), ""), _REVIEW_S)
            console.print(f"{found.outcome.value}: {escape(found.message)}")


def _reviewed(cluster: Cluster, name: str, asked: str) -> Review | None:
    reviews = cluster.record(name).spec.reviews
    newer = [one for one in reviews if datetime.fromisoformat(one.time) >= datetime.fromisoformat(asked)]
    return newer[0] if newer else None


def ask_evaluation(cluster: Cluster, policy: str, rule: str, *, wait: bool) -> None:
    """Has the operator run a rollout's suites now."""
    found = cluster.policy(policy)
    index = rule_with_rollout(found, rule)
    wanted, name = rollout_of(found, index).evaluation, found.spec.rules[index].name
    if wanted is None:
        raise EditError(
            f"rule {name} has no suites: add rollout.evaluation.suites, or run one here with -f FILE"
        )
    phase = status_of(found, index).phase
    if phase not in ATTEMPT_UNDER_WAY:
        raise EditError(f"rule {name} has no attempt under way ({phase.value}): `sluice retry` starts one")
    asked = stamp()
    cluster.annotate(RoutePolicy, policy, {EVALUATE: asked})
    console.print(f"Suites {escape(', '.join(wanted.suites))} are asked of both arms of rule {escape(name)}.")
    if not wait:
        console.print("The rates: [bold]sluice status[/bold]")
        return

    def look() -> tuple[str | None, str]:
        found = cluster.policy(policy)  # rules may have moved since
        return _evaluated(status_of(found, rule_with_rollout(found, name)), asked), ""

    told = waited(
        "evaluating",
        look,
        wanted.timeout_seconds + _SLACK_S,
    )
    console.print(escape(told))


def _evaluated(status: RuleStatus, asked: str) -> str | None:
    run = status.evaluation
    return evaluation(run) if run is not None and run.ended and run.stage.endswith(asked) else None


def calibrate(
    backend: Annotated[str, typer.Argument(help="Name of the InferenceBackend.", show_default=False)],
    policy: Annotated[
        str, typer.Option(help="RoutePolicy whose SLO counts; it names the backend.", show_default=False)
    ],
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.", min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(help="Length of the answers.", min=2)] = 64,
    force: Annotated[bool, typer.Option("--force", help="Even while it serves users: they notice.")] = False,
    wait: Wait = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Measure what one pod safely carries: load rises until the policy's SLO no longer holds.

    The result goes to the backend's `status.capacity`. A rollout then sends a candidate no more than its
    pods carry, and `status.advisedReplicas` follows the traffic. Refused while the backend serves users.
    """
    with one_line_errors():
        cluster = Cluster(context=context, namespace=namespace)
        cluster.backend(backend)
        cluster.policy(policy)
        request = {"policy": policy, "promptTokens": prompt_tokens, "outputTokens": output_tokens}
        asked = json.dumps({**request, "force": force, "at": stamp()})
        cluster.annotate(InferenceBackend, backend, {CALIBRATE: asked})
        console.print(f"Load on one pod of {escape(backend)} rises; this takes minutes.")
        if not wait:
            console.print(f"The result: [bold]kubectl describe ib {escape(backend)}[/bold]")
            return

        def look() -> tuple[tuple[bool, str] | None, str]:
            answer = _calibrated(cluster.backend(backend), asked)
            return answer, "" if answer else cluster.newest_event("InferenceBackend", backend, "Calibrating")

        ok, message = waited("calibrating", look, _CALIBRATE_S)
        if not ok:
            raise EditError(message)
        console.print(escape(message))


def _calibrated(backend: InferenceBackend, asked: str) -> tuple[bool, str] | None:
    try:
        answer = json.loads(backend.metadata.annotations.get(CALIBRATED, ""))
        return (bool(answer["ok"]), str(answer["message"])) if answer["request"] == asked else None
    except (ValueError, TypeError, KeyError):
        return None
