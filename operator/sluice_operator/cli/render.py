"""RoutePolicies as tables. Pure: the time is given, nothing is read.

Invariant: text from the cluster is shown as it is, never taken as markup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..api import Phase, RoutePolicy, RuleStatus
from ..api.routepolicy import GuardStatus, Rule

STYLES = {
    Phase.STABLE: "dim",
    Phase.SHADOWING: "cyan",
    Phase.STEP: "yellow",
    Phase.PROMOTED: "green",
    Phase.ROLLED_BACK: "red",
    Phase.ABORTED: "magenta",
}
HELD = {
    "NoEvidence": "no requests were judged: it waits for traffic",
    "CandidateNotReady": "the gateway can't reach the candidate yet",
    "CandidateGone": "the candidate's backend does not exist",
    "CandidateIsTarget": "the candidate is the target: remove the rollout",
    "StableNotReady": "the gateway can't reach the target",
    "Paused": "rollout.paused is set",
}
WAITS = (Phase.SHADOWING, Phase.STEP)


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
    notes: list[Text] = []
    seen = {status.name: status for status in policy.status.rules}
    for rule in policy.spec.rules:
        status = seen.get(rule.name, RuleStatus(name=rule.name))
        table.add_row(
            Text(rule.name),
            Text(phase(rule, status), style=STYLES[status.phase]),
            Text(weight(status)),
            Text(target(rule)),
            Text(candidate(rule)),
            Text(samples(rule, status)),
            Text(since(status.stage_since, now)),
        )
        if status.held:
            notes.append(Text(f"{rule.name} waits: {HELD.get(status.held, status.held)}", style="yellow"))
        if status.guards:
            notes.append(
                Text(f"{rule.name} evidence: " + "; ".join(evidence(guard) for guard in status.guards))
            )
    return Group(headline(policy), table, *notes, Text(""))


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


def samples(rule: Rule, status: RuleStatus) -> str:
    """Judged candidate requests of this stage, and how many it needs."""
    rollout = rule.rollout
    if rollout is None or status.phase not in WAITS:
        return ""
    needed = 0
    if status.phase is Phase.SHADOWING and rollout.shadow is not None:
        needed = rollout.shadow.min_samples
    elif status.phase is Phase.STEP and status.step < len(rollout.steps):
        needed = rollout.steps[status.step].min_samples
    return f"{status.num_samples}/{needed}" if needed else str(status.num_samples)


def evidence(guard: GuardStatus) -> str:
    """Bad events of candidate and stable, and what a bet on the candidate being worse made of 1."""
    wealth = [float(value) for value in guard.log_wealth]
    line = f"{guard.name} {guard.num_bad_candidate}:{guard.num_bad_stable} bad"
    if not wealth:
        return line
    highest = max(wealth)
    mean = highest + math.log(sum(math.exp(value - highest) for value in wealth) / len(wealth))
    return f"{line} ×{math.exp(min(mean, 20)):.3g}"


def since(start: str, now: datetime) -> str:
    """`42s`, `7m`, `3h` or `5d` since an RFC 3339 time."""
    if not start:
        return ""
    seconds = max(0, int((now - datetime.fromisoformat(start)).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


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
