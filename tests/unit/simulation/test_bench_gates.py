"""`make bench-gates` in miniature: it runs through, and its last line has the agreed form."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sluice_operator.simulation.regression import Regression
from sluice_operator.simulation.traffic import Traffic
from sluice_operator.simulation.versus import Bout, by_tool


@pytest.fixture(scope="module")
def gates() -> ModuleType:
    file = Path(__file__).parents[3] / "benches/gates.py"
    spec = importlib.util.spec_from_file_location("bench_gates", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_gates"] = module
    spec.loader.exec_module(module)
    return module


def test_the_last_line_has_the_agreed_form(gates: ModuleType) -> None:
    quick = tuple((name, text, weight, 20.0) for name, text, weight, _ in gates.DETECT)
    shapes = ("poisson", gates.RECORDED)
    sizes = gates.Sizes(aa=1, x5=1, other=1, peers=1, records=200, shapes=shapes, detect=quick, onset_s=40.0)
    figures = json.loads(json.dumps(gates.bench(sizes, seed=7)))
    assert set(figures) == {"aa", "detect", "peers", "decide_ms", "fold_10k_ms"}
    assert set(figures["aa"]) == {"false_rollback", "time_to_promote_ratio"}
    assert set(figures["aa"]["false_rollback"]) == {"poisson", "recorded"}
    assert set(figures["detect"]) == {"p95_x5", "p95_x1.5", "error_5pct", "slow_3pct_x100", "hard"}
    assert set(figures["detect"]["p95_x5"]) == {"median", "max"}
    assert "Sluice" in figures["peers"]
    assert len(figures["peers"]) == 13


def test_a_bout_is_the_same_each_time_and_has_every_tool(gates: ModuleType) -> None:
    bout = Bout(Traffic(), 200.0, gates.rule((10, 60), (20, 60)), 200.0, Regression(), seed=3)
    one = bout.round(4)
    assert one == bout.round(4)
    assert set(by_tool([one], None)) == set(bout.tools())
    assert one["Sluice"].outcome == "promoted"
