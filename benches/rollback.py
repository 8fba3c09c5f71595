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
    EXAMPLES,
    Installation,
    backend_pods,
    install,
    kill_operator,
    models_dir,
    operator_back,
)
from e2e.harness.kube import documents, until
from e2e.harness.load import Load, chat

PARIS = [{"name": "capital", "mustMatch": "Paris"}]
NAME = "bench"
SLOW = {"ttft": standin.GOOD["ttft"] * 5, "tpot": standin.GOOD["tpot"] * 5}
KINDS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "slow": (SLOW, lambda r: r["timing"]["ttft_s"] is not None and r["timing"]["ttft_s"] > 0.05),
    "contract": (
        {"text": "The capital of France is Rome."},
        lambda r: any(v["hard"] and not v["ok"] for v in r["verdicts"]),
    ),
}
"""Script of the candidate that turns bad, and how a bad answer is told."""


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
    tap.records.clear()
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


def progress(text: str) -> None:
    """A line for whoever waits; not part of the report."""
    print(text, file=sys.stderr, flush=True)


def scripted(
    sluice: Installation, rounds: int, num_edits: int, seed: int
) -> tuple[dict[str, list[tuple[float, int]]], list[float], list[int]]:
    """Rollbacks, edits and restarts with scripted runtimes at 20 requests/s and 10 % weight."""
    kube = sluice.kube
    for arm in "ab":
        kube.apply(standin.backend(f"{NAME}-{arm}"))
    kube.apply(standin.policy(NAME, NAME, f"{NAME}-a", checks=PARIS))
    for arm in "ab":
        kube.wait_condition("InferenceBackend", f"{NAME}-{arm}", "Ready")
    kube.wait_condition("RoutePolicy", NAME, "Ready")
    pod = backend_pods(kube, f"{NAME}-b")[0]["metadata"]["name"]
    results: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}
    body = chat("capital?") | {"model": NAME}
    with (
        Load(sluice.url, sluice.key, lambda _: body, rate=20, seed=seed) as load,
        Tap(kube, pod, sluice.admin_token) as tap,
    ):
        for number in range(rounds):
            for index, (kind, (script, bad)) in enumerate(KINDS.items()):
                results[kind].append(rollback(sluice, tap, script, bad, number * len(KINDS) + index + 1))
                progress(f"· scripted, round {number + 1} of {rounds}, {kind}: {results[kind][-1]}")
        took = edits(sluice, num_edits)
        failed = restarts(sluice, load, rounds)
    kube.delete("RoutePolicy", NAME)
    for arm in "ab":
        kube.delete("InferenceBackend", f"{NAME}-{arm}")
    return results, took, failed


def with_model(sluice: Installation, rounds: int) -> dict[str, list[int]]:
    """Candidate requests until a rollback, with SmolLM2 and the demo's manifests: 3 requests/s, 25 %."""
    kube = sluice.kube
    for name in ("10-smol-bf16.yaml", "20-assistant.yaml"):
        kube.apply_file(EXAMPLES / name)
    kube.wait_condition("RoutePolicy", "assistant", "Ready", seconds=180)
    found: dict[str, list[int]] = {}
    for kind, backend, manifest, release in (
        ("slow", "smol-slow", "12-smol-slow.yaml", "22-rollout-slow.yaml"),
        ("contract", "broken", "13-broken.yaml", "24-rollout-broken.yaml"),
    ):
        kube.apply_file(EXAMPLES / manifest)
        kube.wait_condition("InferenceBackend", backend, "Ready", seconds=180)
        pod = backend_pods(kube, backend)[0]["metadata"]["name"]
        question = chat("What is the capital of France?", max_tokens=16)
        with (
            Load(sluice.url, sluice.key, lambda _, body=question: body, rate=3),  # type: ignore[misc]
            Tap(kube, pod, sluice.admin_token) as tap,
        ):
            found[kind] = [one_release(sluice, tap, release, number) for number in range(rounds)]
            progress(f"· with the model, {kind}: {found[kind]} candidate requests")
        kube.apply_file(EXAMPLES / "20-assistant.yaml")
        kube.delete("InferenceBackend", backend)
    return found


def one_release(sluice: Installation, tap: Tap, release: str, number: int) -> int:
    """Candidate requests of one attempt that goes back by itself."""
    policy = next(iter(documents(EXAMPLES / release)))
    attempt = 1000 + int(time.time()) % 1_000_000 + number
    policy["spec"]["rules"][0]["rollout"]["attempt"] = attempt
    tap.records.clear()
    before = sluice.kube.rule("assistant", "chat")["attempt"]
    sluice.kube.apply(policy)
    until(
        "rolled back",
        lambda: (
            (rule := sluice.kube.rule("assistant", "chat"))["phase"] == "RolledBack"
            and rule["attempt"] != before
        ),
        seconds=120,
    )
    tap.settle()
    return len(tap.records)


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
    for name in ("00-tenant.yaml", "01-models.yaml"):
        sluice.kube.apply_file(EXAMPLES / name, MODELS_DIR=models_dir())
    results, took, failed = scripted(sluice, args.rounds, args.edits, args.seed)
    report(args, results, took, failed, with_model(sluice, args.rounds))


def report(
    args: argparse.Namespace,
    results: dict[str, list[tuple[float, int]]],
    took: list[float],
    failed: list[int],
    model: dict[str, list[int]],
) -> None:
    """The table and the JSON line."""
    answer: dict[str, Any] = {
        kind: {
            "seconds": round(statistics.median(s for s, _ in rows), 3),
            "candidate_requests": statistics.median(n for _, n in rows),
            "candidate_requests_model": statistics.median(model[kind]),
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
            f"{kind}, SmolLM2 at 3/s, 25 %",
            f"{answer[kind]['candidate_requests_model']} requests",
            " ".join(map(str, model[kind])),
        )
    table.add_row(
        "edit in force", f"{answer['edit']['seconds_p50']} s", f"p99 {answer['edit']['seconds_p99']} s"
    )
    table.add_row("operator killed", f"{sum(failed)} failed", " ".join(map(str, failed)))
    Console().print(table)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
