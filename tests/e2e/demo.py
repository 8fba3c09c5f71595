"""``make demo``: from ``kubectl apply`` to an automatic rollback, on a real cluster with a real model.

Each chapter applies manifests of ``examples/`` and checks what the timeline claims; any claim that does not
hold ends the demo with exit code 1. A load generator sends real requests all along, and at the end none of a
healthy arm may have failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from openai import OpenAI

from .harness.evidence import Tap, arrival
from .harness.install import (
    EXAMPLES,
    Installation,
    backend_pods,
    install,
    kill_operator,
    models_dir,
    operator_back,
)
from .harness.kube import Object, until
from .harness.load import Load, Sample, chat
from .harness.story import Story

POLICY, RULE = "assistant", "chat"
FACT = "What is the capital of France?"
SPEED = ("TTFT", "TimePerToken", "InterTokenJitter", "Total")


class Demo:
    """The story's chapters, in order."""

    def __init__(self, story: Story, sluice: Installation) -> None:
        self.story, self.sluice, self.kube = story, sluice, sluice.kube
        self.load: Load | None = None

    def apply(self, name: str) -> None:
        """Apply an example as it stands."""
        self.kube.apply_file(EXAMPLES / name, MODELS_DIR=models_dir())
        self.story.tell(f"kubectl apply -f examples/{name}")

    def phase(self, *wanted: str) -> Object:
        """The rule's status once it is in one of these phases."""
        return until(
            f"rule {RULE} {' or '.join(wanted)}",
            lambda: rule if (rule := self.kube.rule(POLICY, RULE)).get("phase") in wanted else None,
        )

    def told(self, rule: Object) -> None:
        """The last line of the rule's history."""
        last = rule["history"][-1]
        self.story.tell(f"{last['phase']} ({last['reason']}): {last['message']}")

    def ready(self, backend: str) -> None:
        """Wait until the gateway can reach a backend."""
        began = time.monotonic()
        self.kube.wait_condition("InferenceBackend", backend, "Ready")
        self.story.tell(f"backend {backend} is Ready after {time.monotonic() - began:.0f} s")

    @contextmanager
    def candidate(self, manifest: str, backend: str) -> Iterator[Tap]:
        """A candidate backend with a tap on its pod; deleted at the end, which must end."""
        self.apply(manifest)
        self.ready(backend)
        pod = backend_pods(self.kube, backend)[0]["metadata"]["name"]
        with Tap(self.kube, pod, self.sluice.admin_token) as tap:
            yield tap

    def drop(self, backend: str) -> None:
        """Delete a backend and wait until its pods are gone, so that the next one finds room."""
        self.kube.delete("InferenceBackend", backend)
        until(f"backend {backend} gone", lambda: not backend_pods(self.kube, backend))

    def clear(self) -> None:
        """Take away what an earlier demo left: an attempt that was rolled back would stay back."""
        self.kube.delete("RoutePolicy", POLICY)
        until("the old policy gone", lambda: self.kube.get("RoutePolicy", POLICY) is None)
        for backend in ("smol-int8", "smol-slow", "broken", "smol-wide"):
            self.drop(backend)

    # Chapters

    def serve(self) -> None:
        for name in ("00-tenant.yaml", "01-models.yaml", "10-smol-bf16.yaml", "20-assistant.yaml"):
            self.apply(name)
        self.ready("smol-bf16")
        self.kube.wait_condition("RoutePolicy", POLICY, "Ready")
        client = OpenAI(base_url=self.sluice.url + "/v1", api_key=self.sluice.key, max_retries=0)
        for question in (FACT, "用一句话介绍一下你自己。"):
            parts = [
                event.choices[0].delta.content or ""
                for event in client.chat.completions.create(
                    model="assistant",
                    messages=[{"role": "user", "content": question}],
                    stream=True,
                    max_tokens=24,
                    temperature=0,
                )
                if event.choices
            ]
            answer = "".join(parts)
            self.story.check(
                len(parts) > 2 and bool(answer.strip()),
                f"streamed through the gateway: {question} → {answer!r}",
            )

    def promote(self) -> None:
        with self.candidate("11-smol-int8.yaml", "smol-int8"):
            self.apply("21-rollout-sound.yaml")
            for phase in ("Shadowing", "Step", "Watching", "Promoted"):
                rule = self.phase(phase)
                self.told(rule)
            seen = [line["phase"] for line in rule["history"]]
            self.story.check(
                seen[-5:] == ["Shadowing", "Step", "Step", "Watching", "Promoted"],
                "shadow, 25 %, 50 %, watched with a holdback, promoted",
            )
        self.apply("20-assistant.yaml")
        self.phase("Stable")
        self.story.tell("back to smol-bf16 by an edit, for the next chapters")
        self.drop("smol-int8")

    def slow(self) -> None:
        with self.candidate("12-smol-slow.yaml", "smol-slow") as tap:
            self.apply("22-rollout-slow.yaml")
            self.told(self.phase("Step"))
            rule = self.phase("RolledBack")
            self.told(rule)
            fired = rule["history"][-1]["message"].partition(":")[0].partition("/")[0]
            self.story.check(fired in SPEED, "a guard of its speed rolled it back by itself")
            tap.settle()
            live = [r for r in tap.records if not r["mirror"]]
            seconds, requests = tap.after_first(lambda record: record is live[0])
            self.story.tell(
                f"from its first slow answer to its last request: {seconds:.1f} s, "
                f"{requests} candidate requests"
            )
            self.story.facts["slow"] = {"seconds": seconds, "candidate_requests": requests}
            self.draw(tap, rule)
        self.apply("20-assistant.yaml")
        self.drop("smol-slow")

    def draw(self, tap: Tap, rule: Object) -> None:
        """Keep what the README's picture shows: requests by arm, and when the rollout moved."""
        candidate = {record["request_id"] for record in tap.records}
        moves = [
            (self.story.at(datetime.fromisoformat(line["time"]).timestamp()), line["phase"], line["message"])
            for line in rule["history"][-2:]
        ]
        samples = self.load.samples if self.load else []
        self.story.facts["picture"] = {
            "moves": moves,
            "samples": [(self.story.at(s.start), s.total_s, s.request_id in candidate) for s in samples],
        }

    def contract(self) -> None:
        with self.candidate("13-broken.yaml", "broken") as tap:
            self.apply("23-rollout-broken-shadow.yaml")
            rule = self.phase("RolledBack")
            self.told(rule)
            tap.settle()
            self.story.check(
                bool(tap.records) and all(r["mirror"] for r in tap.records),
                "stopped in the shadow stage: no user saw an answer of it",
            )
            mirrored = len(tap.records)
            self.apply("24-rollout-broken.yaml")
            until(
                "a second rollback",
                lambda: (
                    self.kube.rule(POLICY, RULE).get("attempt") != rule["attempt"]
                    and self.kube.rule(POLICY, RULE).get("phase") == "RolledBack"
                ),
            )
            second = self.kube.rule(POLICY, RULE)
            self.told(second)
            tap.settle()
            broken = [
                r
                for r in tap.records[mirrored:]
                if not r["mirror"] and any(v["hard"] and not v["ok"] for v in r["verdicts"])
            ]
            self.story.check(
                second["history"][-1]["reason"] == "HardGateBroken" and 1 <= len(broken) <= 10,
                f"without the shadow stage: rolled back on the first violation "
                f"({len(broken)} requests were in flight or answered by it)",
            )
        self.apply("20-assistant.yaml")
        self.drop("broken")

    def edit(self) -> None:
        with self.candidate("14-smol-wide.yaml", "smol-wide") as tap:
            self.apply("25-rollout-wide.yaml")
            self.told(self.phase("Step"))
            until("candidate traffic", lambda: [r for r in tap.records if not r["mirror"]])
            edited = time.time()
            self.apply("20-assistant.yaml")
            self.phase("Stable")
            written = time.time() - edited
            tap.settle()
            late = max(0.0, max(arrival(record) for record in tap.records) - edited)
            self.story.check(
                late < written + 1,
                "an edit in mid-rollout was in force at once: last candidate request "
                f"{late:.2f} s after it, status written after {written:.2f} s",
            )

    def restart(self) -> None:
        self.apply("25-rollout-wide.yaml")
        before = self.phase("Step")
        until("evidence in this step", lambda: self.kube.rule(POLICY, RULE).get("numSamples", 0) >= 2)
        before = self.kube.rule(POLICY, RULE)
        kill_operator(self.kube)
        self.story.tell(f"operator pod killed at step {before['step']} with {before['numSamples']} samples")
        revived = operator_back(self.kube)
        self.story.tell(f"another operator is ready after {revived:.1f} s")
        then = self.kube.rule(POLICY, RULE).get("numSamples", 0)
        after = until(
            "the rollout to go on",
            lambda: rule if (rule := self.kube.rule(POLICY, RULE)).get("numSamples", 0) > then else None,
        )
        self.story.check(
            after["attempt"] == before["attempt"] and after["step"] >= before["step"],
            "the same attempt goes on where it was",
        )
        self.apply("20-assistant.yaml")
        self.phase("Stable")
        self.drop("smol-wide")


def judge(story: Story, samples: list[Sample]) -> None:
    """No request may have failed but those that the broken candidate answered in its own chapter."""
    failed = [sample for sample in samples if not sample.ok]
    unexplained = [sample for sample in failed if "contract_violation" not in sample.text + sample.error]
    story.facts["requests"] = {"sent": len(samples), "failed": len(failed)}
    story.check(
        not unexplained,
        f"{len(samples)} requests, {len(failed)} failed, each of them the broken candidate's own answer"
        + "".join(
            f"; at {story.at(s.start):.1f} s: {s.status} {s.error or s.text[:120]}" for s in unexplained[:20]
        ),
    )


def main() -> int:
    """Run the story; 0 if all of it happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate", type=float, default=3.0, help="requests a second (default 3: two cores carry about 4)"
    )
    parser.add_argument(
        "--save", type=Path, help="write the timeline as JSON, from which the README's picture is drawn"
    )
    args = parser.parse_args()
    story = Story()
    try:
        with story.chapter("Install"):
            demo = Demo(story, install())
            demo.clear()
            story.tell("Helm installed the operator and the gateway")
        with story.chapter("1. Serve"):
            demo.serve()
        with Load(
            demo.sluice.url, demo.sluice.key, lambda _: chat(FACT, max_tokens=16), rate=args.rate
        ) as load:
            demo.load = load
            for title, chapter in (
                ("2. A sound candidate", demo.promote),
                ("3. A slow candidate", demo.slow),
                ("4. A candidate that breaks its contract", demo.contract),
                ("5. An edit in the middle", demo.edit),
                ("6. The operator dies", demo.restart),
            ):
                with story.chapter(title):
                    chapter()
        with story.chapter("Through all of it"):
            judge(story, load.samples)
    except Exception as error:  # the chapter has told it
        if not story.failed:
            raise error
    story.print()
    if args.save:
        story.save(args.save)
    print(f"\nFAILED: {story.failed}" if story.failed else "\nAll of it happened.")
    return 1 if story.failed else 0


if __name__ == "__main__":
    sys.exit(main())
