"""`make bench-engine` without a model: equal jobs for all, ratios by rounds, and who fails does not stop the
others."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from benches.engine import figures
from benches.engine.contest import OURS, Contest, Contestant, Failed, NotOffered, percentiles
from benches.engine.limits import Cost, Limits
from benches.engine.probe import Step
from benches.engine.sections import max_deviation
from benches.engine.work import MIX, ROWS, Outcome, job

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


@dataclass
class Scripted:
    """A contestant whose jobs take what the test says."""

    name: str
    seconds: dict[str, list[float]]
    rows: frozenset[str] | None = None
    asked: list[tuple[str, int]] = field(default_factory=list)
    is_stopped: bool = False

    def run(self, row: str, seed: int) -> Outcome:
        self.asked.append((row, seed))
        if row == MIX.name:
            raise NotOffered("it takes no requests while it runs")
        if row not in self.seconds:
            raise Failed("it broke")
        left = self.seconds[row]
        return Outcome(left.pop(0) if len(left) > 1 else left[0])

    def stop(self) -> None:
        self.is_stopped = True


def run(*contestants: Scripted, rows: tuple[str, ...] = ("1", "16"), rounds: int = 3) -> Contest:
    contest = Contest()
    for one in contestants:
        one.seconds.setdefault("4", [1.0])  # the warm-up
    contest.run(contestants, rows, rounds, seed=7)  # type: ignore[arg-type]
    return contest


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_job_is_its_row_and_the_same_for_all(row):
    asked = job(row.name, 3)
    assert asked == job(row.name, 3)
    assert len(asked.requests) == row.num
    assert {(len(r.prompt), r.num_out, r.at) for r in asked.requests} == {(row.num_in, row.num_out, 0.0)}
    assert {r.prompt[: row.num_shared] for r in asked.requests} == {asked.warm}
    assert len({r.prompt for r in asked.requests}) == row.num


def test_no_round_has_the_prompts_of_another():
    first, second = job("16", 1), job("16", 2)
    assert not {r.prompt[:16] for r in first.requests} & {r.prompt[:16] for r in second.requests}


def test_arrivals_are_spread_and_mixed():
    requests = job(MIX.name, 1).requests
    assert len(requests) == MIX.num
    assert all(a.at < b.at for a, b in pairwise(requests))
    assert {len(r.prompt) for r in requests} == {64, 1000}


def test_all_run_the_same_jobs_in_turn():
    ours, peer = Scripted(OURS, {"1": [1.0], "16": [1.0]}), Scripted("peer", {"1": [1.5], "16": [1.9]})
    run(ours, peer)
    assert ours.asked == peer.asked
    assert len({seed for row, seed in ours.asked if row == "1"}) == 3


def test_a_ratio_is_of_times_of_one_round():
    ours = Scripted(OURS, {"1": [1.0, 10.0, 1.0]})
    peer = Scripted("peer", {"1": [1.5, 15.0, 1.5]})  # the second round was disturbed
    contest = run(ours, peer, rows=("1",))
    assert contest.ratios("peer") == {"1": pytest.approx(1.5)}


def test_who_is_far_behind_is_measured_once():
    ours, peer = Scripted(OURS, {"1": [1.0], "16": [1.0]}), Scripted("peer", {"1": [1.5], "16": [9.0]})
    contest = run(ours, peer)
    assert [row for row, _ in peer.asked].count("16") == 1
    assert [row for row, _ in peer.asked].count("1") == 3
    assert contest.ratios("peer")["16"] == 9.0


def test_who_fails_is_named_and_the_others_go_on():
    ours, peer = Scripted(OURS, {"1": [1.0], "16": [1.0]}), Scripted("peer", {"16": [2.0]})
    contest = run(ours, peer)
    assert contest.failures == {"peer": "row 1: it broke"}
    assert (peer.is_stopped, ours.is_stopped) == (True, False)
    assert set(contest.ratios(OURS)) == {"1", "16"}
    assert len(contest.outcomes[OURS, "16"]) == 3


def test_what_a_peer_does_not_offer_is_no_failure():
    ours, peer = Scripted(OURS, {"1": [1.0]}), Scripted("peer", {"1": [2.0]})
    contest = run(ours, peer, rows=(MIX.name, "1"))
    assert contest.failures == {}
    assert set(contest.ratios("peer")) == {"1"}


def test_a_contestant_takes_part_in_its_rows_only():
    ours = Scripted(OURS, {"1": [1.0], "16": [1.0]})
    kind = Scripted("Int8", {"1": [0.5]}, rows=frozenset({"1"}))
    contest = run(ours, kind)
    assert contest.failures == {}
    assert figures.quantised(contest, ["Int8"]) == {"Int8": {"1": 2.0}}


def test_a_peer_that_is_not_installed_says_how_to_install_it(tmp_path: Path):
    one = Contestant("peer", "generate", python=tmp_path / "python")
    with pytest.raises(Failed, match="make peers"):
        one.start(tmp_path, tmp_path / "log")


def test_a_peer_that_dies_on_start_says_where_its_log_is(tmp_path: Path):
    one = Contestant("peer", "nobody", python=Path(sys.executable))
    with pytest.raises(Failed, match=f"exit code 1; see {tmp_path}/log"):
        one.start(tmp_path, tmp_path / "log")
    one.stop()
    assert "nobody" in (tmp_path / "log").read_text()


def test_ratios_have_their_geometric_mean():
    contest = run(Scripted(OURS, {"1": [1.0], "16": [1.0]}), Scripted("peer", {"1": [1.0], "16": [1.44]}))
    assert figures.versus(contest, ["peer", "absent"], seed=7) == {
        "peer": {"1": 1.0, "16": 1.44, figures.MEAN: 1.2}
    }


def test_arrivals_count_from_when_a_request_was_due():
    requests = job(MIX.name, 7).requests
    contest = Contest()
    times = tuple((request.at + 0.5, request.at + 0.6) for request in requests)
    contest.outcomes[OURS, MIX.name] = {0: Outcome(60.0, times)}
    contest.outcomes["peer", MIX.name] = {0: Outcome(60.0, tuple((a + 0.5, b + 0.6) for a, b in times))}
    assert figures.arrivals(contest, OURS, 7)["ttft_ms"] == {"p50": 500.0, "p95": 500.0, "p99": 500.0}
    assert figures.versus(contest, ["peer"], 7) == {
        "peer": {"mixed ttft_ms p95": 2.0, "mixed tpot_ms p95": 2.0}
    }


def test_shares_of_the_limits():
    cost = Cost.of(SMOLLM2)
    norms = 576 * (2 * 30 + 1)
    assert cost.num_parameters + norms == 134_515_008
    contest = Contest()
    contest.outcomes[OURS, "1"] = {0: Outcome(9.0, ((5.0, 5.02, 5.04),))}  # 20 ms a token
    contest.outcomes[OURS, "prefill"] = {0: Outcome(8.192)}  # 1,000 tokens a second
    limits = Limits(read_bytes_per_s=cost.bytes_per_decode * 100.0, flops_per_s=cost.flops_per_prefill * 4e3)
    told = figures.limit_share(contest, limits, cost)
    assert (told["decode_1"], told["prefill"]) == (0.5, 0.25)


def test_percentiles_are_nearest_ranks_in_milliseconds():
    assert percentiles([i / 1e3 for i in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([0.002]) == {"p50": 2.0, "p95": 2.0, "p99": 2.0}


def test_the_worst_window_is_found():
    def steps(*tokens: tuple[int, int]) -> list[Step]:
        return [Step(float(i), 1.0, 1.0, 2, {"a": a, "b": b}) for i, (a, b) in enumerate(tokens)]

    assert max_deviation(steps(*[(5, 5)] * 20), 3.0) == 0.0
    # A window of four steps with the odd one among them: 30 of 50 tokens, a fifth over its half.
    assert max_deviation(steps(*[(5, 5)] * 10, (15, 5), *[(5, 5)] * 10), 3.0) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="no window"):
        max_deviation(steps((5, 5), (5, 5)), 3.0)
