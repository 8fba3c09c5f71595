"""`make bench-quality`: what each quantised setting of SmolLM2 costs in quality: perplexity on the held-out
text, and the example suites, asked greedily over HTTP as `sluice evaluate` asks them. The last line is one
JSON object.

A model as small as this passes few samples, so rates alone can hardly tell two settings apart. Beside them
stands how near each answer is to bf16's: the share that is the same to the last character, and the mean
length of what they have in common from the start, in tokens. bf16 answers twice, in another order: how a
batch is made up decides how sums are rounded, and no setting can be held to more than bf16 keeps to itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from statistics import mean

from benches.engine.contest import ROOT
from benches.engine.serving import NAME, server
from tokenizers import Tokenizer

from sluice_operator.api.evalsuite import Sample
from sluice_operator.evaluation.files import load
from sluice_operator.evaluation.reply import Reply, SampleResult
from sluice_operator.evaluation.runner import Target, run
from sluice_runtime.engine import machine

CACHE = Path(os.environ.get("SLUICE_CACHE", Path.home() / ".cache/sluice"))
FIRST, AGAIN = "bf16", "bf16 again"
SETTINGS = {
    "Int8": ("Int8", "Auto"),
    "Int4": ("Int4", "Auto"),
    "W8A8": ("W8A8", "Auto"),
    "KV Int8": ("None", "Int8"),
    "KV Fp8": ("None", "Fp8"),
}
"""By name: `quantization` and `kvCacheDtype` of backend.json."""
_PLAIN = ("None", "Auto")
_MAX_LEN, _AT_ONCE, _RUN_S = 4096, 16, 3600.0
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Task:
    """One task's answers beside bf16's to the same samples. `lost`: passed by bf16 only; `gained`: by this
    setting only. `prefix_tokens` is a mean, as is `tokens`, the length of bf16's answers."""

    samples: int
    passed: int
    lost: int
    gained: int
    identical: int
    prefix_tokens: float
    tokens: float


def compare(first: Sequence[SampleResult], other: Sequence[SampleResult], encode: Encode) -> dict[str, Task]:
    """By task; both hold the same samples in the same order."""
    pairs: dict[str, list[tuple[SampleResult, SampleResult]]] = {}
    for a, b in zip(first, other, strict=True):
        if a.sample != b.sample:
            raise ValueError(f"{a.sample.name} is compared with {b.sample.name}")
        pairs.setdefault(a.sample.task, []).append((a, b))
    return {task: _task(own, encode) for task, own in sorted(pairs.items())}


def _task(pairs: Sequence[tuple[SampleResult, SampleResult]], encode: Encode) -> Task:
    texts = [(said(a.reply), said(b.reply)) for a, b in pairs]
    encoded = [(encode(a), encode(b)) for a, b in texts]
    return Task(
        samples=len(pairs),
        passed=sum(b.passed for _, b in pairs),
        lost=sum(a.passed and not b.passed for a, b in pairs),
        gained=sum(b.passed and not a.passed for a, b in pairs),
        identical=sum(a == b for a, b in texts),
        prefix_tokens=round(mean(_in_common(a, b) for a, b in encoded), 1),
        tokens=round(mean(len(a) for a, _ in encoded), 1),
    )


def said(reply: Reply) -> str:
    """All of an answer as one text."""
    calls = (json.dumps([call.name, call.arguments]) for call in reply.tool_calls)
    return "\n".join([reply.text, *calls])


def _in_common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


async def answers(
    model: Path, samples: Sequence[Sample], setting: tuple[str, str], order: random.Random
) -> list[SampleResult]:
    """Of a server in this setting, asked in a drawn order. Raises RuntimeError for what it did not answer."""
    places = list(range(len(samples)))
    order.shuffle(places)
    quantization, kv = setting
    engine = {
        "quantization": quantization,
        "kvCacheDtype": kv,
        "maxModelLen": _MAX_LEN,
        "maxNumSeqs": _AT_ONCE,
    }
    async with server(model, **engine) as running:
        target = Target(running.url, NAME, temperature=0.0)
        asked = [samples[i] for i in places]
        got = await run(asked, target, timeout_seconds=_RUN_S, concurrency=_AT_ONCE)
    for result in got:
        if result.reply.error:
            raise RuntimeError(f"{result.sample.name}: {result.reply.error}")
    return [result for _, result in sorted(zip(places, got, strict=True), key=lambda pair: pair[0])]


def perplexity(model: Path, text: Path, settings: Sequence[tuple[str, str]]) -> list[dict[str, float]]:
    """What `python -m sluice_runtime.perplexity` tells of each setting, in their order."""
    names = [quantization if kv == "Auto" else f"{quantization}/{kv}" for quantization, kv in settings]
    process = subprocess.run(
        [
            *(sys.executable, "-m", "sluice_runtime.perplexity", "--model", str(model)),
            *("--text", str(text), "--settings", *names),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, dict[str, float]] = json.loads(process.stdout)["settings"]
    return [found[name] for name in names]


def table(scored: Mapping[str, Mapping[str, float]], compared: Mapping[str, Mapping[str, Task]]) -> str:
    """A column for each setting; a block each for perplexity, passed samples, and nearness to bf16."""
    lines = [_row("", compared)]
    if scored:
        of = [scored.get(name) for name in compared]
        lines.append(_row("perplexity", ["" if own is None else f"{own['perplexity']:.2f}" for own in of]))
        lines.append(
            _row("  difference, %", ["" if own is None else f"{own['delta_percent']:+.1f}" for own in of])
        )
    totals = {name: list(tasks.values()) for name, tasks in compared.items()}

    def block(title: str, cell: Callable[[Sequence[Task]], str]) -> None:
        lines.append(f"{title}, by task")
        for task in compared[FIRST]:
            lines.append(_row(f"  {task}", [cell([own[task]]) for own in compared.values()]))
        lines.append(_row("  all", [cell(own) for own in totals.values()]))

    block("passed", lambda own: f"{_sum(own, 'passed')}/{_sum(own, 'samples')}")
    lines.append(
        _row("  lost, gained", [f"-{_sum(own, 'lost')} +{_sum(own, 'gained')}" for own in totals.values()])
    )
    block("the same answer as bf16", lambda own: f"{_sum(own, 'identical')}/{_sum(own, 'samples')}")
    block(
        "tokens in common with bf16's answer, of",
        lambda own: f"{_mean(own, 'prefix_tokens'):.0f}/{_mean(own, 'tokens'):.0f}",
    )
    return "\n".join(lines)


def _row(title: str, cells: Iterable[str]) -> str:
    return f"{title:<18}" + "".join(f"{cell:>12}" for cell in cells)


def _sum(tasks: Sequence[Task], name: str) -> int:
    return sum(getattr(task, name) for task in tasks)


def _mean(tasks: Sequence[Task], name: str) -> float:
    """Over samples, not over tasks."""
    total: float = sum(getattr(task, name) * task.samples for task in tasks)
    return total / _sum(tasks, "samples")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=CACHE / "models/smol", help="a model's directory")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="beside bf16; default %(default)s")
    parser.add_argument(
        "--suites", type=Path, default=ROOT / "examples/suites", help="a directory of EvalSuites"
    )
    parser.add_argument("--text", type=Path, default=ROOT / "benches/data/heldout.txt", help="UTF-8")
    parser.add_argument("--max-tokens", type=int, help="cut all answers off there, for a shorter run")
    parser.add_argument("--no-perplexity", action="store_true", help="suites only")
    parser.add_argument("--seed", type=int, default=1, help="draws the orders in which samples are asked")
    options = parser.parse_args(arguments)
    options.settings = [name for name in options.settings.split(",") if name]
    for name in options.settings:
        if name not in SETTINGS:
            parser.error(f"{name!r} is not one of {', '.join(SETTINGS)}")
    return options


def samples_of(directory: Path, max_tokens: int | None) -> list[Sample]:
    """Of all suites; where `max_tokens` is given, with no longer answers than that."""
    found = [sample for suite in load(sorted(directory.glob("*.yaml"))) for sample in suite.samples]
    if max_tokens is None:
        return found
    return [s.model_copy(update={"max_tokens": min(s.max_tokens, max_tokens)}) for s in found]


def main() -> None:
    options, began = parsed(), time.perf_counter()
    samples = samples_of(options.suites, options.max_tokens)
    settings = {FIRST: _PLAIN, AGAIN: _PLAIN} | {name: SETTINGS[name] for name in options.settings}
    tokenizer, rng = Tokenizer.from_file(str(options.model / "tokenizer.json")), random.Random(options.seed)
    print(
        f"{len(samples)} samples, seed {options.seed}, threads {machine.num_threads()}, "
        f"load average before {os.getloadavg()[0]:.1f}",
        flush=True,
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    scored: dict[str, dict[str, float]] = {}
    if not options.no_perplexity:
        named = {name: setting for name, setting in settings.items() if name != AGAIN}
        found = perplexity(options.model, options.text, list(named.values()))
        scored = dict(zip(named, found, strict=True))
        print(f"· perplexity of {len(scored)} settings: {time.perf_counter() - began:.0f} s", flush=True)
    first: list[SampleResult] = []
    compared: dict[str, dict[str, Task]] = {}
    for name, setting in settings.items():
        started = time.perf_counter()
        got = asyncio.run(answers(options.model, samples, setting, rng))
        first = first or got
        compared[name] = compare(first, got, encode)
        tasks, seconds = list(compared[name].values()), time.perf_counter() - started
        print(
            f"· {name}: {len(samples)} answers in {seconds:.0f} s, {_sum(tasks, 'passed')} passed, "
            f"{_sum(tasks, 'identical')} the same as {FIRST}'s",
            flush=True,
        )
    print(f"\n{table(scored, compared)}")
    print(f"{time.perf_counter() - began:.0f} s in all, load average after {os.getloadavg()[0]:.1f}")
    told = {name: {task: asdict(own) for task, own in tasks.items()} for name, tasks in compared.items()}
    print(json.dumps({"seed": options.seed, "perplexity": scored, "suites": told}))


if __name__ == "__main__":
    main()
