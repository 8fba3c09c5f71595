"""Records what a real model took, for simulations: ``python benches/record.py OUT.jsonl``, on the cluster.

SmolLM2 answers prompts of several lengths through the gateway; its pod's evidence is kept without anything
that names a request. `sluice simulate --trace` and `make bench-gates` resample it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from e2e.harness.evidence import Tap
from e2e.harness.install import EXAMPLES, backend_pods, install, models_dir
from e2e.harness.kube import until
from e2e.harness.load import Load, chat

SENTENCE = "The gateway sends each request to the arm that its conversation belongs to. "
NAMELESS = {"request_id": "", "unit": "", "policy": "", "attempt": "", "config": "", "digest": ""}


def request(number: int) -> dict[str, Any]:
    """Prompts of 20 to 400 tokens and answers of up to 24, from the number alone."""
    draw = random.Random(number)
    return chat(SENTENCE * draw.choice((1, 2, 4, 8, 24)) + "Say it shorter.", max_tokens=draw.randint(4, 24))


def main() -> None:
    """Serve, load, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    options = parser.parse_args()
    sluice = install()
    for name in ("00-tenant.yaml", "01-models.yaml", "10-smol-bf16.yaml", "20-assistant.yaml"):
        sluice.kube.apply_file(EXAMPLES / name, MODELS_DIR=models_dir())
    sluice.kube.wait_condition("InferenceBackend", "smol-bf16", "Ready", seconds=180)
    sluice.kube.wait_condition("RoutePolicy", "assistant", "Ready")
    pod = backend_pods(sluice.kube, "smol-bf16")[0]["metadata"]["name"]
    with Tap(sluice.kube, pod, sluice.admin_token) as tap:
        tap.settle()
        told_before = len(tap.records)  # of an earlier load, which the pod still remembers
        with Load(sluice.url, sluice.key, request, rate=options.rate, headers={"sluice-task": "chat"}):
            until("enough requests", lambda: len(tap.records) - told_before >= options.requests, seconds=1200)
        tap.settle()
        records = [record for record in tap.records[told_before:] if record["final"]]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({**record, **NAMELESS}, separators=(",", ":")) for record in records)
    options.out.write_text("\n".join(lines) + "\n")
    print(f"{len(records)} records in {options.out}")


if __name__ == "__main__":
    main()
