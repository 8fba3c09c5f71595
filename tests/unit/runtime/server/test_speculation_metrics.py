"""What is told of speculation: counters whose ratios are acceptance and tokens per forward."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from sluice_runtime.engine.types import EngineLoad, SpeculationLoad
from sluice_runtime.metrics import Metrics

LOAD = EngineLoad(1, 2, 3, 4, 5, 0.1, 6.0, 7, 8, 9, 10, 11, 12)


def _told(load: EngineLoad) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(Metrics(lambda: load).render().decode())
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
        if "speculation" in sample.name or "stream_" in sample.name
    }


def test_acceptance_by_position_and_tokens_per_forward() -> None:
    load = SpeculationLoad((10, 4), (8, 3), 50, 61, 2, 1)
    assert _told(replace(LOAD, speculation=load)) == {
        ("sluice_speculation_guesses_total", "1"): 10,
        ("sluice_speculation_guesses_total", "2"): 4,
        ("sluice_speculation_right_guesses_total", "1"): 8,
        ("sluice_speculation_right_guesses_total", "2"): 3,
        ("sluice_stream_forwards_total", ""): 50,
        ("sluice_stream_tokens_total", ""): 61,
        ("sluice_speculation_workloads", "on"): 2,
        ("sluice_speculation_workloads", "off"): 1,
    }
    assert load.acceptance_rate == 11 / 14
    assert load.tokens_per_forward == 61 / 50


def test_nothing_where_there_is_none() -> None:
    assert _told(LOAD) == {}
    unused = SpeculationLoad((0,), (0,), 0, 0, 0, 0)
    assert unused.acceptance_rate is None
    assert unused.tokens_per_forward is None
