"""What `sluice simulate` is given: a policy, and where its traffic takes its figures from.

Invariant: an error names the option or the file and what is expected of it, before anything is simulated.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ..api import RoutePolicy
from ..api.routepolicy import Rule
from ..plan.validate_rollout import alone, rollout_problems
from ..simulation.prepare import pick_rule
from ..simulation.sources import from_evidence, from_release, shares, with_latency
from ..simulation.traffic import Shape, Traffic

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def rule_of(file: Path, name: str) -> Rule:
    """The rule of the file's RoutePolicy that is to be simulated. Raises ValueError for a policy that the
    operator would refuse wherever it is applied."""
    found = [one for one in _documents(file) if isinstance(one, dict) and one.get("kind") == "RoutePolicy"]
    if len(found) != 1:
        raise ValueError(f"{file} holds {len(found)} RoutePolicies: give a file with one")
    metadata = found[0].get("metadata")
    spec = RoutePolicy.model_validate(
        {
            "metadata": {"namespace": "simulation", **(metadata if isinstance(metadata, dict) else {})},
            "spec": found[0].get("spec"),
        }
    ).spec
    rule = pick_rule(spec, name)
    problem = next(rollout_problems(spec.rules.index(rule), rule, alone(rule)), None)
    if problem is not None:
        raise ValueError(f"{file} would be refused: {problem.text()}")
    return rule


def traffic_of(
    rate: float | None,
    latency: str,
    trace: Path | None,
    record: Path | None,
    tasks: str,
    tenants: str,
    shape: Shape,
) -> Traffic:
    """The traffic model. Raises ValueError."""
    if sum(one is not None for one in (trace, record, latency or None)) > 1:
        raise ValueError("latencies come from one source: give one of --latency, --trace and --record")
    traffic = Traffic()
    if trace is not None:
        traffic = from_evidence(_text(trace).splitlines())
    elif record is not None:
        documents = _documents(record)
        if len(documents) != 1 or not isinstance(documents[0], dict) or "spec" not in documents[0]:
            raise ValueError(f"{record} is no ReleaseRecord: `kubectl get releaserecord NAME -o yaml` is")
        traffic = from_release(documents[0])
    elif latency:
        traffic = with_latency(traffic, latency)
    changes: dict[str, Any] = {"shape": shape}
    if rate is not None:
        changes["rate"] = rate
    if tasks:
        changes["tasks"] = shares(tasks, "--tasks")
    if tenants:
        changes["tenants"] = shares(tenants, "--tenants")
    return replace(traffic, **changes)


def seconds_of(text: str) -> float:
    """`300s`, `5m`. Raises ValueError."""
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1.0)
    try:
        found = float(number) * unit
    except ValueError:
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise ValueError(f"--from {text!r} is no time: write 300s or 5m")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None


def _documents(file: Path) -> list[Any]:
    try:
        return [one for one in yaml.safe_load_all(_text(file)) if one is not None]
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ValueError(f"{file} is not YAML{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from None
