"""Whether speculative decoding pays, and whether its controller sees it: what a user gets, on a real model.

    python benches/speculation.py MODEL_DIR [--seconds 60] [--sequences 1 4] [--draft-layers N] [--out FILE]

Two workloads. `records`: JSON records of one form, gone on with greedily; guesses should pay. `story`:
sampled prose; they should not. Engines serve each in turns, one request after another or several at once,
with the same prompts and seeds: one that never guesses, and one that does under its controller. The ratio is
of the times of two rounds that follow each other, the median of all such pairs, since other work of the
machine comes and goes; `settled` are those that began after the controller had decided. `--draft-layers` adds
an engine whose draft is the model's own first layers: not a trained one, but one that must be found useless.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.speculation.controller import Judged, Phase, percentile
from sluice_runtime.engine.types import (
    EngineConfig,
    EngineRequest,
    SamplingParams,
    Speculation,
    SpeculationLoad,
    SpeculationMethod,
)
from sluice_runtime.models import LoadedModel, ModelSource, load

NUM_OUTPUT = 96
MIN_ROUNDS = 6
WORKLOADS = ("records", "story")
RECORD = '{"id": %d, "name": "item-%d", "tags": ["small", "blue"], "price": 12.50, "stock": true},\n'
STORY = "Write a strange story about %s and %s.\n\n"
SUBJECTS = ("a lighthouse", "a lost dog", "two rivals", "the last train", "an old map", "a storm", "a debt")


def prompt_of(model: LoadedModel, workload: str, rng: random.Random) -> tuple[int, ...]:
    text = STORY % tuple(rng.sample(SUBJECTS, 2))
    if workload == "records":
        first = rng.randrange(1000, 9000)
        text = "".join(RECORD % (i, i) for i in range(first, first + 8))
    return tuple(model.tokenizer.encode_text(text))


@dataclass
class Arm:
    """An engine, and what it did with one workload: seconds of each round and of each request."""

    name: str
    engine: Engine
    workload: str
    rounds: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    before: SpeculationLoad | None = None

    def __post_init__(self) -> None:
        self.before = self.engine.load().speculation

    async def round(self, number: int, num_sequences: int) -> None:
        """So many requests at once; prompts and seeds follow from the round's number."""
        rng = random.Random(number)
        temperature = 1.0 if self.workload == "story" else 0.0
        requests = [
            EngineRequest(
                f"{self.workload}-{i}",
                prompt_of(self.engine.model, self.workload, rng),
                SamplingParams(NUM_OUTPUT, temperature, seed=rng.getrandbits(32), ignore_eos=True),
                scope="bench",
                task=f"{self.workload}-{num_sequences}",
            )
            for i in range(num_sequences)
        ]
        began = time.perf_counter()
        self.answers += await asyncio.gather(*map(self._one, requests))
        self.rounds.append(time.perf_counter() - began)

    async def _one(self, request: EngineRequest) -> list[int]:
        began = time.perf_counter()
        tokens = [token_id async for chunk in self.engine.submit(request) for token_id in chunk.token_ids]
        self.requests.append(time.perf_counter() - began)
        return tokens

    def judged(self, num_sequences: int) -> Judged | None:
        """What the controller holds of the workload, at the size of batch that it mostly has."""
        speculator = self.engine._speculator
        if speculator is None:
            return None
        task, size = f"{self.workload}-{num_sequences}", num_sequences.bit_length()
        return next((j for j in speculator.judged() if (j.task, j.size) == (task, size)), None)

    def row(self, off: Arm, num_settled: int, num_sequences: int) -> dict[str, Any]:
        """`num_settled`: of the rounds, the latest."""
        ratios = [a / b for a, b in zip(off.rounds, self.rounds, strict=True)]
        row: dict[str, Any] = {
            "tokens_per_s": round(num_sequences * NUM_OUTPUT / statistics.median(self.rounds), 1),
            "request_s": _quantiles(self.requests),
            "vs_off": round(statistics.median(ratios), 2),
            "same_answers": self.answers == off.answers,
        }
        now, then, judged = self.engine.load().speculation, self.before, self.judged(num_sequences)
        if now is None or then is None:
            return row
        if num_settled:
            row["vs_off_settled"] = round(statistics.median(ratios[-num_settled:]), 2)
        return row | _counts(now, then) | ({} if judged is None else _arms(judged))


def _quantiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    return {f"p{p}": round(scale * percentile(values, p / 100), 3) for p in (50, 95)}


def _counts(now: SpeculationLoad, then: SpeculationLoad) -> dict[str, Any]:
    """Acceptance is of the guesses that were made; tokens per forward are of all forwards."""
    right = [a - b for a, b in zip(now.right, then.right, strict=True)]
    drafted = [a - b for a, b in zip(now.drafted, then.drafted, strict=True)]
    forwards = now.num_stream_forwards - then.num_stream_forwards
    return {
        "acceptance": round(sum(right) / sum(drafted), 2) if sum(drafted) else None,
        "by_position": [round(r / d, 2) if d else None for r, d in zip(right, drafted, strict=True)],
        "tokens_per_forward": round((now.num_stream_tokens - then.num_stream_tokens) / forwards, 2),
        "guesses_per_forward": round(sum(drafted) / forwards, 2),
    }


def _arms(judged: Judged) -> dict[str, Any]:
    """The controller's own arms, in milliseconds a token."""
    return {
        "controller": judged.phase.value,
        **{
            f"{name}_arm_ms": {**_quantiles(arm, 1000), "num": len(arm)}
            for name, arm in (("on", judged.on), ("off", judged.off))
            if arm
        },
    }


def engines(source: ModelSource, num_layers: int) -> dict[str, Engine]:
    def make(speculation: Speculation | None, draft: LoadedModel | None = None) -> Engine:
        config = EngineConfig(max_num_seqs=4, num_kv_blocks=128, max_model_len=1024, speculation=speculation)
        engine = Engine(load(source), config, draft=draft)
        engine.start()
        return engine

    made = {"off": make(None), "Suffix": make(Speculation(SpeculationMethod.SUFFIX))}
    if num_layers:
        cut = truncated(load(source), num_layers)
        made[f"Draft of {num_layers} layers"] = make(Speculation(SpeculationMethod.DRAFT), cut)
    return made


def truncated(model: LoadedModel, num_layers: int) -> LoadedModel:
    """The model's first layers with its own head, as a draft."""
    inner: Any = model.model
    inner.model.layers = inner.model.layers[:num_layers]
    inner.config.num_hidden_layers = num_layers
    return model


async def measure(
    made: dict[str, Engine], workload: str, num_sequences: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Rounds in turns for so many seconds, `MIN_ROUNDS` at least: a row for each engine."""
    arms = [Arm(name, engine, workload) for name, engine in made.items()]
    first_settled: dict[str, int] = {}
    number, until = 0, time.perf_counter() + seconds
    while number < MIN_ROUNDS or time.perf_counter() < until:
        for arm in arms:
            judged = arm.judged(num_sequences)
            if judged is not None and judged.phase is not Phase.TRIAL:
                first_settled.setdefault(arm.name, number)
        for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
            await arm.round(number, num_sequences)
        number += 1
    off = arms[0]
    return {
        f"{workload} {num_sequences}× {arm.name}": arm.row(
            off, number - first_settled.get(arm.name, number), num_sequences
        )
        for arm in arms
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, help="the JSON, to a file too")
    parser.add_argument("--seconds", type=float, default=60, help="of each workload; default %(default)s")
    parser.add_argument("--draft-layers", type=int, default=0, help="0: no draft; default %(default)s")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    source = ModelSource(path=options.model, dtype=options.dtype, device="cpu")
    made = engines(source, options.draft_layers)
    rows: dict[str, dict[str, Any]] = {}
    for workload in WORKLOADS:
        for num in options.sequences:
            found = asyncio.run(measure(made, workload, num, options.seconds))
            for name, row in found.items():
                print(name, json.dumps(row), flush=True)
            rows |= found
    for engine in made.values():
        engine.stop()
    print(json.dumps(rows, ensure_ascii=False))
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
