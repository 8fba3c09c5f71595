"""The controller and `Suffix` over what SmolLM2 really said, on supposed machines under a virtual clock.

`data/smollm2_answers.json`: prompts and answers of 96 tokens, as ids, of the two workloads of
benches/speculation.py: JSON records gone on with greedily, and sampled prose.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from sluice_runtime.engine.speculation.controller import Controller, Phase, Progress, Stream
from sluice_runtime.engine.speculation.proposer import Wanted
from sluice_runtime.engine.speculation.suffix import Suffix
from sluice_runtime.engine.types import SamplingParams

ANSWERS: dict[str, list[tuple[list[int], list[int]]]] = json.loads(
    (Path(__file__).parent / "data/smollm2_answers.json").read_text()
)
NUM_OUTPUT = 96
NUM_TOKENS = 4
SAMPLING = SamplingParams(NUM_OUTPUT)
SECONDS = 120


@dataclass(frozen=True)
class Machine:
    """A step of n rows takes `base_s + row_s · n`, up to a tenth more by chance."""

    base_s: float
    row_s: float

    def seconds(self, rows: int, rng: random.Random) -> float:
        return (self.base_s + self.row_s * rows) * (1 + 0.1 * rng.random())


FLAT, STEEP, STEEPER = Machine(0.012, 0.001), Machine(0.009, 0.0025), Machine(0.009, 0.0042)


class Replay:
    """The same rounds of `num_streams` requests at once, with the controller and without guesses."""

    def __init__(self, workload: str, num_streams: int, machine: Machine) -> None:
        self.controller, self.proposer = Controller(NUM_TOKENS), Suffix()
        self.workload, self.num_streams, self.machine = workload, num_streams, machine
        self.rng = random.Random(0)
        self.now = self.without_s = 0.0
        self.num_drafted = self.num_right = 0

    def round(self, first: int) -> None:
        answers = ANSWERS[self.workload]
        texts = {str(i): answers[(first + i) % len(answers)] for i in range(self.num_streams)}
        # The first token is the prefill's.
        at = dict.fromkeys(texts, 1)
        self.controller.plan(self.now, {})
        while at:
            counts = self.controller.plan(self.now, dict.fromkeys(at, Stream("acme", self.workload)))
            progress = self._step(texts, at, counts)
            seconds = self.machine.seconds(sum(1 + p.num_drafted for p in progress.values()), self.rng)
            self.now += seconds
            self.controller.saw(self.now, seconds, progress, prompts=False)
            for request_id in [i for i, num in at.items() if num == NUM_OUTPUT]:
                del at[request_id]
                self.proposer.forget(request_id)
        for _ in range(NUM_OUTPUT - 1):
            self.without_s += self.machine.seconds(self.num_streams, self.rng)

    def _step(
        self, texts: dict[str, tuple[list[int], list[int]]], at: dict[str, int], counts: dict[str, int]
    ) -> dict[str, Progress]:
        wanted = []
        for request_id, num in counts.items():
            prompt, answer = texts[request_id]
            num = min(num, NUM_OUTPUT - at[request_id] - 1)
            if num > 0:
                known = prompt + answer[: at[request_id]]
                wanted.append(Wanted(request_id, known, num, SAMPLING, lambda i: 0.0))
        guesses, progress = self.proposer.propose(wanted), {}
        for request_id, start in at.items():
            guess, answer, right = guesses.get(request_id, []), texts[request_id][1], 0
            while right < len(guess) and guess[right] == answer[start + right]:
                right += 1
            progress[request_id] = Progress(1 + right, len(guess), right)
            at[request_id] += 1 + right
            self.num_drafted += len(guess)
            self.num_right += right
        return progress

    def run(self) -> Replay:
        first = 0
        while self.now < SECONDS:
            self.round(first)
            first += self.num_streams
        return self

    @property
    def ratio(self) -> float:
        """Time without guesses over that with the controller: what a user sees, its trials included."""
        return self.without_s / self.now

    @property
    def phase(self) -> Phase:
        size = self.num_streams.bit_length()
        return next(j.phase for j in self.controller.judged() if j.size == size)


@pytest.mark.parametrize(
    ("machine", "num_streams", "at_least"),
    [(FLAT, 1, 2.2), (FLAT, 4, 1.6), (STEEP, 1, 1.7), (STEEP, 4, 1.2), (STEEPER, 1, 1.5)],
)
def test_records_are_guessed_and_gain(machine: Machine, num_streams: int, at_least: float) -> None:
    replay = Replay("records", num_streams, machine).run()
    assert replay.phase is Phase.ON
    assert replay.num_right / replay.num_drafted > 0.6
    assert replay.ratio > at_least


@pytest.mark.parametrize("machine", [FLAT, STEEP, STEEPER])
@pytest.mark.parametrize("num_streams", [1, 4])
def test_prose_is_not_guessed_and_loses_next_to_nothing(machine: Machine, num_streams: int) -> None:
    replay = Replay("story", num_streams, machine).run()
    assert replay.phase is not Phase.ON
    assert replay.num_right / replay.num_drafted < 0.3
    assert replay.ratio > 0.98


def test_what_hardly_gains_costs_nothing_either() -> None:
    """Four streams of records on a machine where each row is dear: on or off, not slower."""
    assert Replay("records", 4, STEEPER).run().ratio > 1
