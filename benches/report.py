"""``make bench``: run every benchmark, show its output as it comes, and keep table and JSON in
``benches/RESULTS.md``.

A benchmark that fails ends the run and leaves the report as it was.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS = {
    "bench-engine": (
        ["-m", "benches.engine"],
        "This engine and its peers on SmolLM2-135M-Instruct, bf16, greedy, the same random prompts in turn,"
        " medians of rounds; ×: how many times faster this engine is. Then what it keeps under mixed load,"
        " between tenants and with its prefix cache, and what is not the model's in a step.",
    ),
    "bench-quality": (
        ["-m", "benches.quality"],
        "What each quantised setting of SmolLM2-135M-Instruct costs: perplexity on benches/data/heldout.txt;"
        " the example suites asked greedily over HTTP: samples passed, and how near answers are to bf16's.",
    ),
    "bench-gateway": (
        ["benches/gateway.py"],
        "Milliseconds that the gateway adds to a request: through it and straight to a pod, interleaved.",
    ),
    "bench-gates": (
        ["benches/gates.py"],
        "Simulated rollouts under the operator's own gates: sound candidates rolled back, bad ones found, and"
        " the same traces through models of other tools.",
    ),
    "bench-rollback": (
        ["benches/rollback.py"],
        "How long a bad candidate, or an edit of the RoutePolicy, lives on, on the real cluster.",
    ),
}
"""Python's arguments and meaning, by make target. Make has brought up what they need."""


def machine() -> str:
    """Processor, cores and memory, in a line."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {model}, {gib:.0f} GiB, Linux {platform.release().split('-')[0]}"


def run(target: str, arguments: list[str]) -> str:
    """The output of a benchmark, also shown."""
    print(f"\n── {target}", flush=True)
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    if process.wait():
        sys.exit(f"{target} failed with exit code {process.returncode}")
    return "\n".join(lines).strip()


def main() -> None:
    """Run and write."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    parts = [
        f"# Benchmarks\n\n`make bench`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit {commit}, "
        f"on {machine()}. "
        "No accelerator: nothing here has been run on a GPU yet. Seeds stand in the tables."
    ]
    for target, (arguments, what) in BENCHMARKS.items():
        *table, last = run(target, arguments).splitlines()
        parts.append(
            f"## {target}\n\n{what}\n\n```\n" + "\n".join(table).strip() + f"\n```\n```json\n{last}\n```"
        )
    (ROOT / "benches/RESULTS.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
