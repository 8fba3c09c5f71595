"""Guessing only where it pays: the controller and its cost model under a virtual clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from sluice_runtime.engine.speculation.controller import Controller, Phase, Progress, Rules, Stream
from sluice_runtime.engine.speculation.cost import StepCost

NUM_TOKENS = 4
RULES = Rules(min_samples=8, max_samples=32)


@dataclass(frozen=True)
class Machine:
    """A step of n rows takes `base_s + row_s · n`, give or take `noise`; the first `num_free` are free."""

    base_s: float = 0.010
    row_s: float = 0.0005
    noise: float = 0.1
    num_free: int = 0

    def seconds(self, rows: int, chance: float) -> float:
        dear = self.row_s * max(0, rows - self.num_free)
        return (self.base_s + dear) * (1 + self.noise * chance)


class World:
    """Streams that never end, on a machine, with a chance for each guess to be right by workload."""

    def __init__(
        self, chances: dict[str, float], num_streams: int = 1, machine: Machine | None = None, seed: int = 0
    ) -> None:
        self.controller = Controller(NUM_TOKENS, RULES)
        self.chances = chances
        self.machine = machine or Machine()
        self.streams = {f"{task}-{i}": Stream("acme", task) for task in chances for i in range(num_streams)}
        self.rng = random.Random(seed)
        self.now = 0.0
        self.num_drafted = dict.fromkeys(chances, 0)
        self.num_tokens = dict.fromkeys(chances, 0)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def step(self) -> dict[str, int]:
        began = self.now
        counts = self.controller.plan(self.now, self.streams)
        progress: dict[str, Progress] = {}
        for request_id, stream in self.streams.items():
            num_right, num = 0, counts.get(request_id, 0)
            while num_right < num and self.rng.random() < self.chances[stream.task]:
                num_right += 1
            progress[request_id] = Progress(1 + num_right, num, num_right)
            self.num_drafted[stream.task] += num
            self.num_tokens[stream.task] += 1 + num_right
        rows = sum(1 + p.num_drafted for p in progress.values())
        self.now += self.machine.seconds(rows, self.rng.random())
        self.controller.saw(self.now, self.now - began, progress, prompts=False)
        return counts

    def share_drafted(self, task: str, seconds: float) -> float:
        """Guesses for each token, in the next so many seconds."""
        before = self.num_drafted[task], self.num_tokens[task]
        self.run(seconds)
        return (self.num_drafted[task] - before[0]) / (self.num_tokens[task] - before[1])

    def decided(self, task: str) -> set[Phase]:
        """What the first trial finds."""
        self.step()
        while Phase.TRIAL in self.phases(task):
            self.step()
        return self.phases(task)

    def phases(self, task: str) -> set[Phase]:
        found = self.controller._workloads.items()
        return {workload.phase for (_, name, _), workload in found if name == task}


def test_it_stays_on_where_it_is_faster() -> None:
    world = World({"code": 0.8})
    world.run(120)
    assert world.phases("code") == {Phase.ON}
    assert world.share_drafted("code", 20) > 0.5


def test_it_goes_off_where_it_is_slower_and_then_costs_nothing() -> None:
    world = World({"prose": 0.02}, machine=Machine(row_s=0.002))
    world.run(20)
    assert world.phases("prose") == {Phase.OFF}
    assert world.share_drafted("prose", 5) == 0


def test_a_trial_that_loses_learns_so_and_is_cheap() -> None:
    world = World({"prose": 0.02}, machine=Machine(row_s=0.01))
    assert world.decided("prose") == {Phase.OFF}
    # Two blocks of sixteen steps with four guesses each, and hardly any after them.
    assert world.num_drafted["prose"] < 3 * 16 * NUM_TOKENS


def test_a_trial_guesses_as_far_as_pays() -> None:
    """Four guesses for each of four streams are too many for this machine, and one is worth it."""
    world = World({"code": 0.9}, num_streams=4, machine=Machine(row_s=0.003, num_free=8))
    world.run(60)
    assert world.phases("code") == {Phase.ON}
    assert 0.4 < world.share_drafted("code", 20) < 0.6


def test_trials_of_what_never_pays_become_rare() -> None:
    world = World({"prose": 0.02}, machine=Machine(row_s=0.002))
    world.run(2000)
    assert world.share_drafted("prose", 2000) < 0.06


def test_it_is_tried_again_and_found_to_pay_now() -> None:
    world = World({"mixed": 0.02}, machine=Machine(row_s=0.002))
    world.run(20)
    assert world.phases("mixed") == {Phase.OFF}
    world.chances["mixed"] = 0.95
    world.run(200)
    assert world.phases("mixed") == {Phase.ON}


def test_it_goes_off_when_it_no_longer_pays() -> None:
    world = World({"mixed": 0.9}, machine=Machine(row_s=0.002))
    world.run(60)
    assert world.phases("mixed") == {Phase.ON}
    world.chances["mixed"] = 0.0
    world.run(60)
    assert world.phases("mixed") == {Phase.OFF}


def test_workloads_are_judged_apart_though_they_share_steps() -> None:
    world = World({"code": 0.95, "prose": 0.0}, num_streams=2, machine=Machine(row_s=0.001))
    world.run(120)
    assert world.phases("code") == {Phase.ON}
    assert world.phases("prose") == {Phase.OFF}


def test_not_with_a_large_batch() -> None:
    """One stream: rows are nearly free. Sixty-four: each costs what it brings."""
    machine = Machine(base_s=0.010, row_s=0.002)
    small, large = World({"code": 0.6}, 1, machine), World({"code": 0.6}, 64, machine)
    assert small.decided("code") == {Phase.ON}
    assert large.decided("code") == {Phase.OFF}


def test_a_faster_median_with_a_slower_tail_is_not_enough() -> None:
    """Nine blocks in ten gain, the tenth loses much."""
    world = World({"code": 1.0})
    slow = random.Random(1)

    def stall() -> None:
        if world.controller._block is not None and world.controller._block.guesses and slow.random() < 0.02:
            world.now += 0.5

    for _ in range(20_000):
        stall()
        world.step()
        if world.phases("code") == {Phase.OFF}:
            break
    assert world.phases("code") == {Phase.OFF}


def test_the_off_arm_is_concurrent() -> None:
    world = World({"code": 0.9})
    world.run(60)
    blocks = [bool(world.step()) for _ in range(16 * 80)]
    assert 0.08 < 1 - sum(blocks) / len(blocks) < 0.17


def test_streams_that_come_and_go_leave_nothing_behind() -> None:
    controller = Controller(NUM_TOKENS, replace(RULES, max_workloads=4))
    for i in range(50):
        streams = {str(i): Stream(f"tenant-{i}", "task")}
        counts = controller.plan(float(i), streams)
        controller.saw(i + 0.5, 0.5, {str(i): Progress(1, counts.get(str(i), 0))}, prompts=False)
        assert controller.plan(i + 0.6, {}) == {}
    assert len(controller._workloads) <= 4
    assert controller._block is None


@pytest.mark.parametrize(
    ("num_streams", "chance", "expected"),
    [(1, 0.9, 4), (1, 0.05, 1), (1, 0.01, 0), (64, 0.9, 0), (4, 0.9, 4)],
)
def test_as_many_guesses_as_rows_are_worth(num_streams: int, chance: float, expected: int) -> None:
    cost = StepCost()
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        # Flat up to 32 rows, then in proportion.
        cost.saw(rows, 0.01 * (1 + 0.02 * rows) if rows <= 32 else 0.01 * rows / 10)
    assert cost.best_num_guesses(num_streams, [chance] * 4) == expected


def test_one_slow_step_is_forgotten() -> None:
    cost = StepCost()
    for seconds in (1.0, *[0.01] * 31):
        cost.saw(5, seconds)
    assert (cost.seconds(5) or 1) < 0.03


def test_what_is_not_measured_is_tried() -> None:
    cost = StepCost()
    assert cost.seconds(4) is None
    assert cost.best_num_guesses(2, [None] * 4) == 4
    cost.saw(1, 0.01)
    assert cost.seconds(8) == 0.01
    cost.saw(9, 0.05)
    assert cost.seconds(5) == pytest.approx(0.03)
