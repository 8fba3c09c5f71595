"""`sluice simulate`: figures, advice, plot and errors, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from sluice_operator.cli.simulate import simulate
from sluice_operator.cli.simulate_plot import curves, terminal_plot, write_svg
from sluice_operator.simulation.result import Result as Run

app = typer.Typer()
app.command()(simulate)


def policy(tmp_path: Path, **rollout: Any) -> Path:
    file = tmp_path / "policy.yaml"
    steps = [{"weight": 20, "minSeconds": 20, "minSamples": 5}]
    file.write_text(yaml.safe_dump({
        "apiVersion": "sluice.dev/v1alpha1", "kind": "RoutePolicy", "metadata": {"name": "assistant"},
        "spec": {"model": "m", "rules": [{
            "name": "chat", "target": {"backend": "old"},
            "rollout": {"candidate": {"backend": "new"}, "steps": steps, "watch": {"seconds": 0}, **rollout},
        }]},
    }))  # fmt: skip
    return file


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--processes", "1", "--runs", "2"])


def test_figures_as_json_are_the_same_each_time(tmp_path: Path) -> None:
    wrong = ["--regression", "p95 x10", "--from", "5s"]
    words = ["-f", str(policy(tmp_path)), "--rate", "10", *wrong, "-o", "json"]
    one = called(*words)
    assert one.exit_code == 0, one.output
    told = json.loads(one.stdout)
    assert told["minSeconds"] == 20.0
    assert told["from"] == 5.0
    assert told["sound"]["runs"] == 2
    assert told["regressed"]["detected"]["num"] == 2
    assert json.loads(called(*words).stdout) == told


def test_the_table_has_figures_plot_and_advice(tmp_path: Path) -> None:
    svg = tmp_path / "plot.svg"
    done = called("-f", str(policy(tmp_path)), "--rate", "10", "--tasks", "a=0.7,b=0.3", "--svg", str(svg))
    assert done.exit_code == 0, done.output
    for word in ("stopped though sound", "promoted", "seconds to promotion", "% of rollouts", "→ "):
        assert word in done.stdout
    assert "<svg" in svg.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--regression", "slower"], "is no regression"),
        (["--regression", "p95 x2 for code"], "nobody asks for task code"),
        (["--latency", "fast"], "not NAME=NUMBER"),
        (["--from", "soon"], "--from 'soon' is no time"),
        (["-o", "yaml"], "--output is table or json"),
        (["--rule", "other"], "no rollout in other"),
        (["--from", "nan"], "--from 'nan' is no time"),
        (["--from", "-5s"], "--from '-5s' is no time"),
        (["--latency", "ttft=nan"], "--latency: 'ttft=nan' is no number"),
        (["--latency", "ttft=0.3,sigma=50"], "sigma is at most 5, not 50"),
        (["--tasks", "chat=nan"], "--tasks: 'chat=nan' is no number"),
        (["--tasks", "chat=inf"], "--tasks: 'chat=inf' is no number"),
    ],
)
def test_errors_are_one_line_with_the_next_step(tmp_path: Path, words: list[str], told: str) -> None:
    done = called("-f", str(policy(tmp_path)), *words)
    assert done.exit_code == 1
    assert told in " ".join(done.stderr.split())
    assert done.stderr.startswith("error:")


@pytest.mark.parametrize("words", [["--rate", "0"], ["--rate", "inf"], ["--seed", "-1"]])
def test_numbers_that_no_traffic_has_are_refused(tmp_path: Path, words: list[str]) -> None:
    done = called("-f", str(policy(tmp_path)), *words)
    assert done.exit_code == 2
    assert words[0] in done.stderr


@pytest.mark.parametrize(
    ("rollout", "field"),
    [
        ({"alpha": "0.9"}, "alpha"),
        ({"candidate": {"backend": "old"}}, "candidate"),
        ({"steps": [{"weight": 20}, {"weight": 5}]}, "steps[1].weight"),
        ({"guards": [{"metric": "TTFT", "percentiles": []}]}, "guards[0].percentiles"),
    ],
)
def test_what_the_operator_would_refuse_is_not_simulated(
    tmp_path: Path, rollout: dict[str, Any], field: str
) -> None:
    done = called("-f", str(policy(tmp_path, **rollout)))
    assert done.exit_code == 1
    assert f"would be refused: spec.rules[0].rollout.{field}" in done.stderr


def test_what_the_policy_names_need_not_be_here(tmp_path: Path) -> None:
    """Suites, tenants, tasks and a Prometheus are the cluster's."""
    steps = [{"weight": 5, "tenants": ["shop"], "minSeconds": 5}, {"weight": 20, "minSeconds": 5}]
    named = {
        "steps": steps,
        "evaluation": {"suites": ["six"]},
        "queries": [{"name": "q", "query": "vector(1)", "max": "2"}],
        "exclude": [{"task": "code"}],
    }
    done = called("-f", str(policy(tmp_path, **named)), "--tenants", "shop=1", "-o", "json")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("option", ["-f", "--trace", "--record"])
def test_a_file_that_is_something_else_is_named(tmp_path: Path, option: str) -> None:
    file = tmp_path / "other"
    for content in (b"\xf3\x00", b"a: [", b"- 1"):
        file.write_bytes(content)
        words = [] if option == "-f" else ["-f", str(policy(tmp_path))]
        done = called(*words, option, str(file))
        assert done.exit_code == 1, content
        assert option == "--trace" or str(file) in done.stderr
        assert done.stderr.startswith("error:")


def test_a_plot_that_can_not_be_written_takes_no_figures_along(tmp_path: Path) -> None:
    done = called("-f", str(policy(tmp_path)), "--svg", str(tmp_path / "none" / "plot.svg"))
    assert done.exit_code == 1
    assert "stopped though sound" in done.stdout
    assert "--svg" in done.stderr
    assert "No such file or directory" in done.stderr


def test_a_policy_that_takes_days_is_refused(tmp_path: Path) -> None:
    done = called("-f", str(policy(tmp_path, steps=[{"weight": 5, "minSeconds": 86_400}])))
    assert done.exit_code == 1
    assert "takes 86400 s at least" in " ".join(done.stderr.split())


def test_an_unknown_field_is_named(tmp_path: Path) -> None:
    done = called("-f", str(policy(tmp_path, speed=3)))
    assert done.exit_code == 1
    assert "speed" in done.stderr


def test_a_file_without_a_policy_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("kind: Tenant\n")
    assert "holds 0 RoutePolicies" in " ".join(called("-f", str(file)).stderr.split())


def test_curves_are_cumulative_and_reach_what_happened(tmp_path: Path) -> None:
    found = {"sound": [Run("promoted", 10.0), Run("rolled-back", 4.0), Run("promoted", 20.0)]}
    lines = curves(found)
    third = pytest.approx(100 / 3)
    assert lines["sound: stopped"] == ([0.0, 4.0, 4.0, 20.0], [0.0, 0.0, third, third])
    assert lines["sound: promoted"][1][-1] == pytest.approx(200 / 3)
    plot = terminal_plot(lines)
    assert "\x1b" not in plot
    assert "sound: promoted" in plot
    write_svg(lines, tmp_path / "a.svg", 3.0)
    write_svg(lines, tmp_path / "b.svg", 3.0)
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_nothing_that_happened_is_no_plot() -> None:
    assert terminal_plot(curves({"sound": []})) == ""
