"""The far side of a contest: a process that loads once, then runs a job a line and idles in between.

    → {"row": "16", "seed": 3}
    ← {"seconds": 5.1, "times": [[0.2, …], …]}

The first line out says that it is ready: `{"ready": {…}}`. Libraries that print go to stderr. Needs only the
standard library, so that it runs in each peer's own environment. A job that a peer has no way to do is a
`NotImplementedError`, and told as `{"not_offered": "why"}`; any other exception as `{"error": "what"}`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from benches.engine.work import Job, Outcome, Request, job

Measure = Callable[[Job], Outcome]


def warmed(run: Measure) -> Measure:
    """`run`, after it has computed what the job's requests share: for who caches prefixes."""

    def measure(job: Job) -> Outcome:
        if job.warm:
            run(Job((Request(0.0, job.warm, 1),)))
        return run(job)

    return measure


def serve(start: Callable[[Path, str], tuple[Measure, dict[str, object]]]) -> None:
    """`start` loads the model at a path, with an option of the contestant's own (empty: none), and returns
    what runs a job, and what there is to say about it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--option", default="")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measure, about = start(options.model, options.option)
    print(json.dumps({"ready": about}), file=replies)
    for line in sys.stdin:
        asked = json.loads(line)
        gc.collect()
        try:
            outcome = measure(job(asked["row"], asked["seed"]))
            reply = json.dumps(dataclasses.asdict(outcome))
        except NotImplementedError as error:
            reply = json.dumps({"not_offered": str(error)})
        except Exception as error:
            traceback.print_exc()
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(reply, file=replies)
