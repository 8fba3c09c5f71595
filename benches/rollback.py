"""How long a bad candidate, or an edit, lives on: ``make bench-rollback``.

Seconds are measured with scripted runtimes (the runtime's own server, evidence and admin port, no model)
behind the real gateway and operator on the real cluster, 20 requests/s, 10 % weight. A candidate is good
until its script changes in the middle of a step; from its first bad answer to its last request is what
counts, read off its own pod's evidence stream.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.harness import standin
from e2e.harness.evidence import Tap
from e2e.harness.install import (
    Installation,
    backend_pods,
    install,
    kill_operator,
    operator_back,
)
from e2e.harness.kube import until
from e2e.harness.load import Load, chat

PARIS = [{"name": "capital", "mustMatch": "Paris"}]
NAME = "bench"


def phase(sluice: Installation, wanted: str) -> None:
    """Wait for the rule's phase."""
    until(f"phase {wanted}", lambda: sluice.kube.rule(NAME, "all").get("phase") == wanted, seconds=90)


def rollback(
    sluice: Installation,
    tap: Tap,
    script: dict[str, Any],
    bad: Callable[[dict[str, Any]], bool],
    attempt: int,
) -> tuple[float, int]:
    """One rollout that turns bad in the middle of its step: seconds and candidate requests until its last
    one."""
    tap.put("/v1/script", standin.GOOD)
    tap.records.clear()
    sluice.kube.apply(
        standin.policy(
            NAME,
            NAME,
            f"{NAME}-a",
            checks=PARIS,
            rollout=standin.rollout(f"{NAME}-b", 10, seconds=600, samples=100, attempt=attempt),
        )
    )
    until("30 good candidate requests", lambda: len(tap.records) >= 30, seconds=90)
    tap.put("/v1/script", standin.GOOD | script)
    phase(sluice, "RolledBack")
    tap.settle()
    return tap.after_first(bad)


def answered(http: httpx.Client, url: str, wanted: str) -> None:
    """Ask the gateway until its answer has this text in it."""
    ask, body = url + "/v1/chat/completions", chat("?") | {"model": "edit"}
    until("edit in force", lambda: wanted in http.post(ask, json=body).text, every=0.002)


def edits(sluice: Installation, count: int) -> list[float]:
    """Seconds from a changed refusal being sent to the API server to a client reading it at the gateway."""
    seconds = []
    headers = {"Authorization": f"Bearer {sluice.key}"}
    with httpx.Client(headers=headers, timeout=5) as http:
        for number in range(count):
            manifest = standin.policy("edit", "edit", "x")
            manifest["spec"]["rules"][0]["target"] = {
                "refusal": {"message": f"edit {number} at {time.time()}"}
            }
            wanted = manifest["spec"]["rules"][0]["target"]["refusal"]["message"]
            start = time.monotonic()
            sluice.kube.apply(manifest)
            answered(http, sluice.url, wanted)
            seconds.append(time.monotonic() - start)
    sluice.kube.delete("RoutePolicy", "edit")
    return seconds


def more_traffic(seconds: float) -> None:
    """Let the load go on for so long."""
    end = time.monotonic() + seconds
    until(f"{seconds:.0f} s more traffic", lambda: time.monotonic() > end)


def restarts(sluice: Installation, load: Load, count: int) -> list[int]:
    """Failed requests around each kill of the operator's pod."""
    failed = []
    for _ in range(count):
        start = time.time()
        kill_operator(sluice.kube)
        operator_back(sluice.kube)
        more_traffic(5)
        failed.append(sum(not sample.ok for sample in load.since(start)))
    return failed


def main() -> None:
    """Print a table, then one JSON object as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--edits", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    sluice = install()
    kube = sluice.kube
    for arm in "ab":
        kube.apply(standin.backend(f"{NAME}-{arm}"))
    kube.apply(standin.policy(NAME, NAME, f"{NAME}-a", checks=PARIS))
    for arm in "ab":
        kube.wait_condition("InferenceBackend", f"{NAME}-{arm}", "Ready")
    kube.wait_condition("RoutePolicy", NAME, "Ready")
    pod = backend_pods(kube, f"{NAME}-b")[0]["metadata"]["name"]
    slow = {"ttft": standin.GOOD["ttft"] * 5, "tpot": standin.GOOD["tpot"] * 5}
    broken = {"text": "The capital of France is Rome."}
    kinds: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
        "slow": (slow, lambda r: r["timing"]["ttft_s"] is not None and r["timing"]["ttft_s"] > 0.05),
        "contract": (broken, lambda r: any(v["hard"] and not v["ok"] for v in r["verdicts"])),
    }
    results: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds}
    with (
        Load(
            sluice.url, sluice.key, lambda _: chat("capital?") | {"model": NAME}, rate=20, seed=args.seed
        ) as load,
        Tap(kube, pod, sluice.admin_token) as tap,
    ):
        for number in range(args.rounds):
            for index, (kind, (script, bad)) in enumerate(kinds.items()):
                results[kind].append(rollback(sluice, tap, script, bad, number * len(kinds) + index + 1))
        took = edits(sluice, args.edits)
        failed = restarts(sluice, load, args.rounds)
    for arm in "ab":
        kube.delete("InferenceBackend", f"{NAME}-{arm}")
    kube.delete("RoutePolicy", NAME)
    report(args, results, took, failed)


def report(
    args: argparse.Namespace,
    results: dict[str, list[tuple[float, int]]],
    took: list[float],
    failed: list[int],
) -> None:
    """The table and the JSON line."""
    answer: dict[str, Any] = {
        kind: {
            "seconds": round(statistics.median(s for s, _ in rows), 3),
            "candidate_requests": statistics.median(n for _, n in rows),
        }
        for kind, rows in results.items()
    }
    answer["edit"] = {
        "seconds_p50": round(statistics.median(took), 4),
        "seconds_p99": round(statistics.quantiles(took, n=100, method="inclusive")[98], 4),
    }
    answer["restart"] = {"failed_requests": sum(failed)}
    table = Table(
        title=f"Rollback, 20 requests/s, 10 %, {args.rounds} rounds, {args.edits} edits, seed {args.seed}"
    )
    for column in ("what", "median", "all"):
        table.add_column(column)
    for kind, rows in results.items():
        table.add_row(
            kind,
            f"{answer[kind]['seconds']} s, {answer[kind]['candidate_requests']} requests",
            " ".join(f"{s:.2f}s/{n}" for s, n in rows),
        )
    table.add_row(
        "edit in force", f"{answer['edit']['seconds_p50']} s", f"p99 {answer['edit']['seconds_p99']} s"
    )
    table.add_row("operator killed", f"{sum(failed)} failed", " ".join(map(str, failed)))
    Console().print(table)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
