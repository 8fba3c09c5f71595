"""Where a request's time went: the pod's own stages, and what gateway and application say of theirs."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_runtime.reported import (
    MAX_AGE_S,
    NOTHING,
    STAGES,
    BadReport,
    Reported,
    parse_stages,
    parse_time,
)
from unit.runtime.server.support import Pod, chat_body, check, evidence_validator, pod_config, route_headers

HEADERS = {"sluice-stages": "retrieval=0.25, rerank=0.5,tool-wait=2, embed=0.125, chunk=0.125"}


async def test_all_stages_are_told(pod: Pod) -> None:
    await pod.hold(pod_config(contract=[check("c", "MustMatch", pattern="x")]))
    pod.engine.auto = ["x", "y"]
    asked = time.time() - 30
    told = {"sluice-user-time": f"{asked:.3f}", "x-sluice-time": f"{time.time() - 2:.6f}", **HEADERS}
    for stream in (True, False):
        await pod.post(chat_body(stream=stream), headers={**route_headers(), **told})
    for record in pod.records():
        evidence_validator().validate(record)
        timing = record["timing"]
        assert 30 <= timing["user_s"] < 60
        assert 2 <= timing["gateway_s"] < 30
        assert timing["decode_s"] == pytest.approx(0.05 - 0.03)
        assert timing["verify_s"] > 0
        assert timing["application"] == {"retrieval": 0.25, "rerank": 0.5, "tool-wait": 2, "other": 0.25}
        assert 0 < timing["visible_s"] <= timing["complete_s"]
        assert 0 < timing["verified_s"] <= timing["complete_s"]
    assert [r["timing"]["stream_s"] is None for r in pod.records()] == [False, True]
    metrics = pod.runtime.metrics.render().decode()
    route = 'arm="candidate",mirror="false",policy="prod/assistant",rule="default"'
    for stage in ("gateway", "queue", "prefill", "decode", "verification", *STAGES):
        assert f'sluice_stage_seconds_count{{{route},stage="{stage}"}} 2.0' in metrics, stage
    for name in ("visible", "verified", "complete", "user_ttft"):
        assert f"sluice_{name}_seconds_count{{{route}}} 2.0" in metrics, name
    assert (
        f'sluice_user_ttft_seconds_bucket{{arm="candidate",le="10.0",{route.partition(",")[2]}}} 0.0'
        in metrics
    )


async def test_nothing_is_told_without_it(pod: Pod) -> None:
    pod.engine.auto = ["x"]
    await pod.post(chat_body())
    timing = (await pod.record())["timing"]
    assert (timing["user_s"], timing["gateway_s"], timing["application"]) == (None, None, {})
    assert (timing["verify_s"], timing["verified_s"]) == (None, None), "there was nothing to verify"
    assert "sluice_user_ttft_seconds_count{" not in pod.runtime.metrics.render().decode()


async def test_a_client_that_leaves_was_shown_something_or_not(pod: Pod) -> None:
    request = asyncio.create_task(pod.post(chat_body(stream=True)))
    generation = await pod.engine.next()
    generation.fail()
    await request
    timing = (await pod.record())["timing"]
    assert (timing["visible_s"], timing["complete_s"]) == (None, None)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("sluice-user-time", "yesterday"),
        ("sluice-user-time", "-1"),
        ("sluice-user-time", "1e9"),
        ("sluice-user-time", "nan"),
        ("sluice-user-time", "1" * 400),
        ("sluice-stages", "retrieval"),
        ("sluice-stages", "retrieval=fast"),
        ("sluice-stages", "retrieval=-1"),
        ("sluice-stages", "retrieval=1e999"),
        ("sluice-stages", "retrieval=100000"),
        ("sluice-stages", "Retrieval=1"),
        ("sluice-stages", "my prompt says=1"),
        ("sluice-stages", "=1"),
        ("sluice-stages", "a=1,"),
        ("sluice-stages", ",".join(["a=1"] * 17)),
    ],
)
async def test_a_header_of_another_form_is_named(pod: Pod, header: str, value: str) -> None:
    pod.engine.auto = ["x"]
    reply = await pod.post(chat_body(), headers={**route_headers(), header: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(header)


async def test_times_that_can_not_be_count_as_not_given(pod: Pod) -> None:
    pod.engine.auto = ["x"]
    for there in (time.time() + 3600, time.time() - 2 * MAX_AGE_S, 0):
        told = {"sluice-user-time": f"{there:.0f}", "x-sluice-time": f"{there:.0f}"}
        await pod.post(chat_body(), headers={**route_headers(), **told})
    assert [(r["timing"]["user_s"], r["timing"]["gateway_s"]) for r in pod.records()] == [(None, None)] * 3


async def test_what_is_told_moves_nothing(pod: Pod) -> None:
    """The same place in the engine, the same scope, the same unit."""
    pod.engine.auto = ["x"]
    requests = []
    for told in ({}, {"sluice-user-time": f"{time.time():.0f}", **HEADERS}):
        await pod.post(chat_body(seed=1), headers={**route_headers(), **told})
        request = (await pod.engine.next()).request
        requests.append((request.scope, request.tenant, request.priority, request.deadline, request.weight))
    assert requests[0] == requests[1]
    first, second = pod.records()
    assert first["unit"] == second["unit"]


def test_small_differences_of_clocks_are_none() -> None:
    assert Reported(user_time=100.5).user_s(100.0) == 0.0
    assert Reported(user_time=106.0).user_s(100.0) is None
    assert Reported(gateway_time=99.75).gateway_s(100.0) == 0.25
    assert NOTHING.user_s(100.0) is None


@given(st.text(max_size=60))
def test_whatever_is_sent_only_our_names_and_sound_seconds_come_out(value: str) -> None:
    try:
        found = parse_stages("sluice-stages", value)
    except BadReport:
        return
    assert set(found) <= set(STAGES)
    assert all(0 <= seconds <= MAX_AGE_S * 16 for seconds in found.values())


@given(st.dictionaries(st.sampled_from([*STAGES, "x"]), st.integers(0, 10**6), min_size=1))
def test_what_is_well_formed_is_read(stages: dict[str, int]) -> None:
    value = ", ".join(f"{name}={ms / 1000:.3f}" for name, ms in stages.items())
    found = parse_stages("sluice-stages", value)
    assert sum(found.values()) == pytest.approx(sum(stages.values()) / 1000)
    assert parse_time("t", "12.5") == 12.5
