"""How much a rule is asked, and what its replicas cost."""

from __future__ import annotations

from sluice_operator.api.releaserecord import ArmEvidence
from sluice_operator.control.traffic import Traffic
from sluice_operator.control.usage import Usage
from sluice_operator.gates import ArmName, Observation


def request(time: float, *, arm: ArmName = ArmName.STABLE, **more: object) -> Observation:
    fields: dict[str, object] = {"total_s": 0.5, "task": "chat", "tenant": "a", **more}
    return Observation(time=time, request_id=str(time), arm=arm, age_s=0.5, **fields)  # type: ignore[arg-type]


def test_rates_are_of_the_last_minute_by_task_and_tenant() -> None:
    traffic = Traffic()
    traffic.take(request(100 + i / 4) for i in range(400))
    traffic.take(request(150 + i, task="code", arm=ArmName.CANDIDATE, total_s=2.0) for i in range(50))
    rates = traffic.rates(200.0)
    assert round(rates[("chat", "a")], 2) == 4.0
    assert round(rates[("code", "a")], 2) == round(50 / 60, 2)
    assert traffic.mean_seconds(200.0) == 2.0
    assert round(traffic.arm_rate("candidate", 200.0), 2) == round(50 / 60, 2)
    assert traffic.rates(1000.0) == {}
    assert traffic.mean_seconds(1000.0) == 0.0


def test_nothing_is_said_of_a_rate_before_there_is_one() -> None:
    traffic = Traffic()
    assert traffic.rates(10.0) == {}
    traffic.take([request(10.0), request(11.0)])
    assert traffic.rates(12.0) == {}


def test_a_clock_that_was_set_back_makes_no_rate_of_an_hour() -> None:
    """Else all that comes until the clock has caught up would count as of one minute."""
    traffic = Traffic()
    traffic.take(request(4000 + i / 4) for i in range(240))
    traffic.take(request(400 + i / 4) for i in range(8))
    assert traffic.rates(402.0) == {}
    traffic.take(request(402 + i / 4) for i in range(240))
    assert round(traffic.rates(462.0)[("chat", "a")], 1) == 4.0


def test_copies_running_requests_and_what_people_say_are_no_traffic() -> None:
    traffic = Traffic()
    traffic.take([request(1.0)])
    traffic.take(
        [
            request(2.0, mirror=True),
            request(3.0, censored=True, total_s=None),
            request(4.0, feedback="wrong", total_s=None),
            request(5.0, total_s=None),
            request(6.0, total_s=None, failed=True),
        ]
    )
    assert sum(traffic.rates(21.0).values()) * 20 == 2


def test_idle_replicas_cost_too() -> None:
    usage = Usage()
    for second in range(0, 3601, 30):
        usage.see("candidate", 2, 10 + second % 60, float(second))
    prices = {"candidate": ("1.5", "EUR")}
    stable, candidate = usage.told(ArmEvidence(), ArmEvidence(num_requests=100), prices)
    assert (candidate.replica_hours, candidate.cost, candidate.currency) == ("2", "3", "EUR")
    assert candidate.cost_per_success == "0.03"
    assert candidate.peak_kv_percent == 40
    assert (stable.replica_hours, stable.cost) == ("0", "")


def test_time_in_which_nobody_looked_is_not_counted() -> None:
    usage = Usage()
    usage.see("stable", 1, 0, 0.0)
    usage.see("stable", 1, 0, 10_000.0)
    usage.see("stable", 1, 0, 10_036.0)
    assert usage.told(ArmEvidence(), ArmEvidence(), {})[0].replica_hours == "0.01"
