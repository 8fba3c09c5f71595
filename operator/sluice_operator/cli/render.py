"""RoutePolicies as tables. Pure: the time is given, nothing is read.

Invariant: text from the cluster is shown as it is, never taken as markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..api import Phase, RoutePolicy, RuleStatus
from ..api.rollout import Rollout
from ..api.routepolicy import Rule
from ..api.rulestatus import EvaluationStatus, ExclusionStatus, GuardStatus, TaskRate
from .edit import ATTEMPT_UNDER_WAY, awaited_step

STYLES = {
    Phase.STABLE: "dim",
    Phase.EVALUATING: "cyan",
    Phase.SHADOWING: "cyan",
    Phase.STEP: "yellow",
    Phase.WATCHING: "yellow",
    Phase.PROMOTED: "green",
    Phase.ROLLED_BACK: "red",
    Phase.ABORTED: "magenta",
}
_SHOWN_GUARDS = 3


def policies_view(policies: Sequence[RoutePolicy], now: datetime, namespace: str) -> RenderableType:
    """Status of each policy, one after the other."""
    if not policies:
        return Text(f"No RoutePolicy in namespace {namespace}. Begin with examples/20-assistant.yaml.")
    return Group(*(policy_view(policy, now) for policy in policies))


def policy_view(policy: RoutePolicy, now: datetime) -> RenderableType:
    """A line on the policy as a whole, a table of its rules, and what can be said of rollouts under way."""
    table = Table(show_lines=False, pad_edge=False, box=None, header_style="bold")
    for name in ("RULE", "PHASE", "WEIGHT", "TARGET", "CANDIDATE", "SAMPLES", "FOR"):
        table.add_column(name, overflow="fold")
    told: list[Text] = []
    seen = {status.name: status for status in policy.status.rules}
    for index, rule in enumerate(policy.spec.rules):
        status = seen.get(rule.name, RuleStatus(name=rule.name))
        table.add_row(
            Text(rule.name),
            Text(phase(rule, status), style=STYLES[status.phase]),
            Text(weight(status)),
            Text(target(rule)),
            Text(candidate(rule)),
            Text(samples(status)),
            Text(since(status.stage_since, now)),
        )
        told.extend(notes(policy, index, status, now))
    return Group(headline(policy), table, *told, Text(""))


def headline(policy: RoutePolicy) -> Text:
    """Name, model, and what the conditions say."""
    line = Text.assemble((policy.metadata.name, "bold"), f"  model {policy.spec.model}")
    conditions = {item.type: item for item in policy.status.conditions}
    ready = conditions.get("Ready")
    if ready is None:
        line.append("  no operator has seen it yet", style="yellow")
    elif ready.status != "True":
        line.append(f"  not ready ({ready.reason}): {ready.message}", style="red")
    stalled = conditions.get("Stalled")
    if stalled is not None and stalled.status == "True" and ready is not None:
        line.append(f"\n  refused edit ({stalled.reason}): {stalled.message}", style="red")
        line.append(f"\n  generation {policy.status.accepted_generation} serves on")
    return line


def phase(rule: Rule, status: RuleStatus) -> str:
    """`Step 1/2` for a step, else the phase's name."""
    if status.phase is Phase.STEP and rule.rollout is not None:
        return f"Step {status.step + 1}/{len(rule.rollout.steps)}"
    return status.phase.value


def weight(status: RuleStatus) -> str:
    """Percent for the candidate, or percent mirrored."""
    if status.phase is Phase.SHADOWING:
        return f"mirror {status.shadow_percent} %"
    return f"{status.weight} %" if status.phase is not Phase.STABLE else ""


def target(rule: Rule) -> str:
    """Who answers."""
    if rule.target.backend is not None:
        return rule.target.backend
    if rule.target.service is not None:
        return f"service {rule.target.service.name}:{rule.target.service.port}"
    return f"refusal {rule.target.refusal.status}" if rule.target.refusal else ""


def candidate(rule: Rule) -> str:
    """What the candidate changes."""
    if rule.rollout is None:
        return ""
    arm = rule.rollout.candidate
    parts = [arm.backend or "", f"scope {arm.cache_scope}" if arm.cache_scope else ""]
    if arm.features is not None:
        parts.append("features")
    if arm.sampling is not None:
        parts.append("sampling")
    return ", ".join(part for part in parts if part)


def samples(status: RuleStatus) -> str:
    """Judged candidate requests of this stage, and how many it needs."""
    if status.phase not in ATTEMPT_UNDER_WAY or status.phase is Phase.EVALUATING:
        return ""
    return f"{status.num_samples}/{status.min_samples}" if status.min_samples else str(status.num_samples)


def notes(policy: RoutePolicy, index: int, status: RuleStatus, now: datetime) -> Iterator[Text]:
    """What else there is to say of a rule, a line each."""
    rule = policy.spec.rules[index]
    for text, style in _lines(policy, index, status, now):
        yield Text(f"{rule.name} {text}", style=style)


def _lines(policy: RoutePolicy, index: int, status: RuleStatus, now: datetime) -> Iterator[tuple[str, str]]:
    rollout = policy.spec.rules[index].rollout
    step = awaited_step(policy, index) if rollout is not None else None
    if rollout is not None and step is not None:
        yield f"waits for approval: {approved(rollout, step)}", "yellow"
        yield f"to approve: {approve_command(policy, index)}", "bold"
    elif status.held:
        yield f"waits: {status.held_message or status.held}", "yellow"
    if status.watch_until:
        yield f"is watched until {clock(status.watch_until)} UTC, in {until(status.watch_until, now)}", ""
    if status.rollback_cost:
        yield f"a rollback would cost: {status.rollback_cost}", ""
    for excluded in status.excluded:
        yield f"leaves out {slice_name(excluded)} ({excluded.reason}): {excluded.message}", "red"
    if status.phase in ATTEMPT_UNDER_WAY:
        yield from _evidence(status)


def _evidence(status: RuleStatus) -> Iterator[tuple[str, str]]:
    if status.evaluation is not None:
        yield f"suites: {evaluation(status.evaluation)}", "red" if status.evaluation.failed_hard else ""
    if status.guards:
        yield f"evidence: {guards(status.guards)}", ""
    gains = [f"{gain.name} {'shown' if gain.shown else 'not shown yet'}" for gain in status.gains]
    if gains:
        yield f"gains: {', '.join(gains)}", ""
    seen = [f"{kind.name} {kind.num_samples}" for kind in status.coverage]
    if seen:
        yield f"has seen: {', '.join(seen)}", ""
    for query in status.queries:
        if query.error:
            yield f"query {query.name}: {query.error}", "yellow"
        elif query.candidate:
            compared = f", stable {query.stable}" if query.stable else ""
            over = f"; {query.num_failures} in a row over the limit" if query.num_failures else ""
            yield f"query {query.name}: {query.candidate}{compared}{over}", ""
    for task in status.agreement:
        if task.num_pairs:
            own = f", stable with itself {task.num_baseline_equal}/{task.num_baseline_pairs}"
            pairs = f"{task.num_equal}/{task.num_pairs}{own}"
            yield f"greedy answers that agree, {task.task or 'no task'}: {pairs}", ""


def approved(rollout: Rollout, step: int) -> str:
    """What an approval lets in: `step 2 of 3, 50 % of requests`."""
    if step >= len(rollout.steps):
        return "the promotion: the candidate serves everybody"
    one = rollout.steps[step]
    limits = [f"tenants {', '.join(one.tenants)}"] if one.tenants else []
    limits += [f"tasks {', '.join(one.tasks)}"] if one.tasks else []
    whose = f" of {' and '.join(limits)}" if limits else " of requests"
    return f"step {step + 1} of {len(rollout.steps)}, {one.weight} %{whose}"


def approve_command(policy: RoutePolicy, index: int) -> str:
    """What to type."""
    meta = policy.metadata
    return f"kubectl sluice approve {meta.name} {policy.spec.rules[index].name} -n {meta.namespace}"


def slice_name(excluded: ExclusionStatus) -> str:
    """`task nl2sql`, `tenant shop`, or `task nl2sql of tenant shop`."""
    task = f"task {excluded.task}" if excluded.task else ""
    tenant = f"tenant {excluded.tenant}" if excluded.tenant else ""
    return " of ".join(part for part in (task, tenant) if part)


def evaluation(run: EvaluationStatus) -> str:
    """Rates by task, with stable's, and what failed."""
    what = f"{run.stage} " if run.stage else ""
    if not run.ended:
        return f"{what}running since {clock(run.started)} UTC" if run.started else f"{what}running"
    if run.error:
        return f"{what}could not be finished: {run.error}"
    stable = {rate.task: rate for rate in run.stable}
    told = "; ".join(task_rate(rate, stable.get(rate.task)) for rate in run.candidate)
    if run.without:
        told += f"{'; ' if told else ''}not asked, as it is excluded: {', '.join(run.without)}"
    hard = f"; failed hard samples: {', '.join(run.failed_hard)}" if run.failed_hard else ""
    failed = f"; failed: {', '.join(run.failed)}" if run.failed else ""
    return f"{what}{told}{hard}{failed}"


def task_rate(rate: TaskRate, stable: TaskRate | None) -> str:
    """`nl2sql 9/10 (stable 10/10)`."""
    compared = f" (stable {stable.num_passed}/{stable.num_samples})" if stable is not None else ""
    return f"{rate.task} {rate.num_passed}/{rate.num_samples}{compared}"


def guards(found: Sequence[GuardStatus]) -> str:
    """The guards that are nearest to firing; the others by number."""
    shown = sorted(found, key=wealth, reverse=True)[:_SHOWN_GUARDS]
    rest = f"; and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    return "; ".join(evidence(guard) for guard in shown) + rest


def evidence(guard: GuardStatus) -> str:
    """Bad events of candidate and stable, and what a bet on the candidate being worse made of 1."""
    line = f"{guard.name} {guard.num_bad_candidate}:{guard.num_bad_stable} bad"
    return f"{line} ×{math.exp(min(wealth(guard), 20)):.3g}" if guard.log_wealth else line


def wealth(guard: GuardStatus) -> float:
    """Natural logarithm of the mean over its bets."""
    bets = [float(value) for value in guard.log_wealth]
    if not bets:
        return -math.inf
    highest = max(bets)
    return highest + math.log(sum(math.exp(value - highest) for value in bets) / len(bets))


def since(start: str, now: datetime) -> str:
    """`42s`, `7m`, `3h` or `5d` since an RFC 3339 time."""
    return _span((now - datetime.fromisoformat(start)).total_seconds()) if start else ""


def until(end: str, now: datetime) -> str:
    """The same, until then."""
    return _span((datetime.fromisoformat(end) - now).total_seconds())


def _span(seconds: float) -> str:
    whole = max(0, int(seconds))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def clock(time: str) -> str:
    """An RFC 3339 time to the second."""
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M:%S")


def history_table(policy: RoutePolicy, rule: str = "") -> RenderableType:
    """Transitions of one rule or of all, oldest first."""
    table = Table(pad_edge=False, box=None, header_style="bold")
    for name in ("TIME", "RULE", "PHASE", "REASON", "WHAT HAPPENED"):
        table.add_column(name, overflow="fold")
    lines = [
        (line, status.name)
        for status in policy.status.rules
        if rule in ("", status.name)
        for line in status.history
    ]
    if not lines:
        return Text("Nothing has happened yet.")
    for line, name in sorted(lines, key=lambda item: item[0].time):
        step = f" {line.step + 1}" if line.step is not None and line.phase is Phase.STEP else ""
        style = STYLES[line.phase]
        table.add_row(
            Text(clock(line.time)),
            Text(name),
            Text(line.phase.value + step, style=style),
            Text(line.reason),
            Text(line.message),
        )
    return table
