"""`make bench-engine`: this engine beside its peers on SmolLM2 in bfloat16, greedy, warm, on one machine. The
last line is one JSON object.

All run the same jobs in turn (contest.py); what only this engine has to keep follows (sections.py), and
with `--matrix` the HTTP server under load instead (matrix.py). The rows: 1, 4 and 16 sequences of 128 random
tokens in and 64 out, 32 of 256 in; `prefill`, 8 prompts of 1,024 with one token out; `prefix`, 4 that share
1,500 tokens which are cached; `mixed`, short and long under Poisson arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benches.engine.contest import OURS, Contest, Contestant, Failed
from benches.engine.figures import arrivals, limit_share, quantised, rates, table, versus
from benches.engine.limits import Cost, Limits
from benches.engine.matrix import matrix
from benches.engine.probe import smollm2
from benches.engine.sections import QUICK, SECTIONS, Sizes
from benches.engine.work import BY_NAME, MIX

from sluice_runtime.engine import machine
from sluice_runtime.models.checkpoint import Quantization

CACHE = Path(os.environ.get("SLUICE_CACHE", Path.home() / ".cache/sluice"))
KINDS: tuple[str, ...] = get_args(Quantization)
PEERS: dict[str, Contestant] = {
    "vllm": Contestant("vllm", "vllm_cpu", CACHE / "peers/vllm/bin/python"),
    "vllm-eager": Contestant("vllm-eager", "vllm_cpu", CACHE / "peers/vllm/bin/python", "eager"),
    "llama.cpp": Contestant(
        "llama.cpp", "llama", CACHE / "peers/llama/bin/python", str(CACHE / "peers/smol-bf16.gguf")
    ),
    "continuous": Contestant("continuous", "continuous"),
    "generate": Contestant("generate", "generate"),
}
DEFAULT_PEERS = "vllm,llama.cpp,continuous,generate"
_QUANTISED_ROWS = frozenset({"1", "16"})


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=CACHE / "models/smol", help="a model's directory")
    parser.add_argument("--peers", default=DEFAULT_PEERS, help=f"of {', '.join(PEERS)}; empty for none")
    parser.add_argument("--rows", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help="quantised forms to measure; empty for none")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="empty for none")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one round of rows 1, 4 and 16; short sections")
    parser.add_argument("--matrix", action="store_true", help="the HTTP server under load, instead")
    options = parser.parse_args(arguments)
    options.rows = _names(options.rows or ("1,4,16" if options.quick else ",".join(BY_NAME)), BY_NAME, parser)
    options.peers = _names(options.peers, PEERS, parser)
    options.kinds = _names(options.kinds, KINDS, parser)
    options.sections = _names(options.sections, SECTIONS, parser)
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


def _names(text: str, known: Any, parser: argparse.ArgumentParser) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            parser.error(f"{name!r} is not one of {', '.join(known)}")
    return names


def started(contestants: Sequence[Contestant], model: Path, contest: Contest) -> list[Contestant]:
    """Those that started; why another did not goes into the contest's failures."""
    logs, running = Path(tempfile.mkdtemp(prefix="bench-engine-")), list[Contestant]()
    for one in contestants:
        began = time.perf_counter()
        try:
            one.start(model, logs / f"{one.name}.log")
        except Failed as error:
            contest.failures[one.name] = f"start: {error}"
            print(f"· {one.name} did not start: {error}", flush=True)
            one.stop()
            continue
        about = ", ".join(f"{key} {value}" for key, value in one.about.items())
        print(f"· {one.name} started in {time.perf_counter() - began:.0f} s: {about}", flush=True)
        running.append(one)
    return running


def compete(options: argparse.Namespace) -> Contest:
    """Measure all rows of all contestants."""
    ours = Contestant(OURS, "sluice")
    kinds = [Contestant(kind, "sluice", option=kind, rows=_QUANTISED_ROWS) for kind in options.kinds]
    contest = Contest()
    running = started([ours, *kinds, *(PEERS[name] for name in options.peers)], options.model, contest)
    try:
        if OURS in contest.failures:
            sys.exit(f"this engine does not start: {contest.failures[OURS]}")
        contest.run(running, options.rows, options.rounds, options.seed)
    finally:
        for one in running:
            one.stop()
    return contest


def report(options: argparse.Namespace, contest: Contest, limits: Limits) -> dict[str, Any]:
    """Show the contest as a table; return its part of the JSON."""
    cost = Cost.of(json.loads((options.model / "config.json").read_text()))
    mix = {n: told for n in (OURS, *options.peers) if (told := arrivals(contest, n, options.seed))}
    print("\n" + table(contest, [OURS, *options.kinds, *options.peers]))
    for name, told in mix.items():
        cells = (f"{what} " + " / ".join(f"{v:.0f}" for v in p.values()) for what, p in told.items())
        print(f"{MIX.name}, {name}: p50 / p95 / p99 of " + ", ".join(cells))
    for name, why in contest.failures.items():
        print(f"not measured, or not to the end: {name}: {why}")
    own = rates(contest, OURS)
    return {
        "prefill_tokens_per_s": own.pop("prefill", None),
        "tokens_per_s": own,
        "vs": versus(contest, options.peers, options.seed),
        "not_measured": contest.failures,
        "limit_share": limit_share(contest, limits, cost),
        "quantised": quantised(contest, options.kinds),
        "arrivals": mix,
    }


def own_sections(options: argparse.Namespace) -> dict[str, Any]:
    """What this engine has to keep by itself."""
    if not options.sections:
        return {}
    model, told = smollm2(options.model), dict[str, Any]()
    for name in options.sections:
        began = time.perf_counter()
        told[name] = asyncio.run(
            SECTIONS[name](model, QUICK if options.quick else Sizes(), random.Random(options.seed))
        )
        print(f"{name} ({time.perf_counter() - began:.0f} s): {json.dumps(told[name])}", flush=True)
    return told


def main() -> None:
    options, began = parsed(), time.perf_counter()
    print(
        f"threads {machine.num_threads()}, seed {options.seed}, rounds {options.rounds}, "
        f"load average before {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    if options.matrix:
        print(json.dumps(asyncio.run(matrix(options.model, options.quick))))
        return
    limits = Limits()
    limits.measure()
    contest = compete(options)
    limits.measure()
    result = report(options, contest, limits) | own_sections(options)
    print(f"{time.perf_counter() - began:.0f} s in all, load average after {os.getloadavg()[0]:.1f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
