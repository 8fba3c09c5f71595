"""What many runs say, as figures and as advice.

Invariant: a run that was stopped by the time its regression began was stopped by chance: it counts as a false
rollback and not as detected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..api.rollout import Step
from ..api.routepolicy import Rule
from ..gates.power import detects, min_samples
from .intervals import clopper_pearson
from .result import Result


@dataclass(frozen=True)
class Share:
    """A count with what it says of the chance behind it, at 95 % confidence."""

    num: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share; 0 of nothing."""
        return self.num / self.total if self.total else 0.0


@dataclass(frozen=True)
class Spread:
    """Of some values; zeros for none."""

    median: float = 0.0
    p95: float = 0.0
    max: float = 0.0


@dataclass(frozen=True)
class Summary:
    """Runs of one scenario."""

    runs: int
    false_stops: Share
    """Stopped before anything was wrong with the candidate; of all."""
    narrowed: int
    """Of all stops, how many took back one task or tenant alone."""
    detected: Share
    """Stopped after that, of those that got so far."""
    promoted: Share
    seconds_to_stop: Spread
    """From the regression's beginning."""
    exposed: Spread
    """Requests that the candidate got from then until it was stopped; all it got where it never was."""
    told: Spread
    """Of those of a stopped candidate, how many the operator had heard of."""
    violations: Spread
    """Hard violations that it had heard of."""
    seconds_to_promote: Spread
    held: dict[str, float]
    """Mean seconds of a run by what held it up."""
    reasons: dict[str, int]
    """Stops by what fired."""

    def json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def share(num: int, total: int) -> Share:
    """With its interval."""
    low, high = clopper_pearson(num, total)
    return Share(num, total, low, high)


def spread(values: Sequence[float]) -> Spread:
    """Median, 95th percentile (a value that occurred) and maximum."""
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(
        float(median(ordered)), float(ordered[-(-95 * len(ordered) // 100) - 1]), float(ordered[-1])
    )


def summarise(results: Sequence[Result], onset: float | None) -> Summary:
    """`onset`: seconds at which the regression begins; None for an A/A test, where each stop is false."""
    stops = [one for one in results if one.stopped]
    early = [one for one in stops if onset is None or one.seconds <= onset]
    found = [one for one in stops if onset is not None and one.seconds > onset]
    late = [one for one in results if onset is not None and not (one.stopped and one.seconds <= onset)]
    promoted = [one for one in results if one.outcome == "promoted"]
    num = len(results)
    held: Counter[str] = Counter()
    for one in results:
        held.update(one.held)
    return Summary(
        runs=num,
        false_stops=share(len(early), num),
        narrowed=sum(one.outcome == "narrowed" for one in stops),
        detected=share(len(found), num - len(early)) if onset is not None else share(0, 0),
        promoted=share(len(promoted), num),
        seconds_to_stop=spread([one.seconds - (onset or 0.0) for one in found]),
        exposed=spread([one.num_exposed for one in late]),
        told=spread([one.num_told for one in found]),
        violations=spread([one.num_violations for one in found]),
        seconds_to_promote=spread([one.seconds for one in promoted]),
        held={name: round(seconds / num, 1) for name, seconds in held.most_common()} if num else {},
        reasons=dict(Counter(cause(one) for one in stops).most_common()),
    )


def cause(result: Result) -> str:
    """What stopped it, in short: the guard's name out of the message, else the reason."""
    head, found, _ = result.message.partition(": ")
    return head if found and len(head) <= 60 else result.reason or result.outcome


def advice(
    sound: Summary, bad: Summary | None, rule: Rule, rate: float, min_seconds: float, onset: float
) -> list[str]:
    """What to change, one sentence each; the most important first."""
    said = []
    rollout = rule.rollout
    assert rollout is not None
    if sound.false_stops.low > float(rollout.alpha):
        said.append(
            f"Sound candidates were stopped more often than alpha ({rollout.alpha}) allows: something in this"
            " traffic hits one arm alone. Look at what fired, and loosen that guard or narrow it to tasks."
        )
    elif sound.false_stops.num == 0:
        said.append(
            f"No sound candidate was stopped in {sound.runs} runs, so the chance is below"
            f" {sound.false_stops.high:.1%}; more --runs would show how far below."
        )
    if bad is not None:
        said += _on_detection(bad, rule, rate, onset)
    said += _on_time(sound, rollout.steps[0].weight, min_seconds)
    return said


def step_powers(rule: Rule, rate: float) -> list[str]:
    """What each step can notice at `rate` requests/s, by the guards' power."""
    rollout = rule.rollout
    assert rollout is not None
    told = []
    for number, step in enumerate(rollout.steps, start=1):
        sends = _sends(rule, step, rate)
        found = detects(rule, step.weight, sends) if step.weight < 100 else ""
        if found:
            told.append(f"Step {number}, {step.weight} %: {sends} candidate requests notice {found}.")
    return told


def _sends(rule: Rule, step: Step, rate: float) -> int:
    """Candidate requests of a step: what its time brings, or what it asks for."""
    asked = step.min_samples if step.min_samples is not None else min_samples(rule, step.weight)
    return max(int(rate * step.weight / 100.0 * step.min_seconds), asked)


def _on_detection(bad: Summary, rule: Rule, rate: float, onset: float) -> list[str]:
    rollout = rule.rollout
    assert rollout is not None
    first = rollout.steps[0]
    sends = _sends(rule, first, rate)
    if bad.detected.total == 0:
        return ["Every run was stopped before the regression began: begin it earlier, with --from."]
    if bad.detected.value < 0.5:
        return [
            f"Most candidates like this are promoted. A step of {first.weight} % for {first.min_seconds} s"
            f" sends about {sends} requests, which can't show so small a difference: raise minSamples or"
            " the weight, or lower maxIncreasePercent if so much is not acceptable."
        ]
    needs = bad.told.median
    if bad.detected.value < 0.95:
        missed = 1.0 / max(1.0 - bad.detected.value, 0.001)
        return [
            f"One in {missed:.0f} such candidates is promoted. Where it is found it takes about {needs:.0f}"
            f" candidate requests: set minSamples of a step above {bad.told.p95:.0f} to find nearly all."
        ]
    if onset <= 0.0 and needs > sends:
        return [
            f"It takes about {needs:.0f} candidate requests to see this, and the first step sends"
            f" {sends}: users of the later steps are exposed too. Set its minSamples to"
            f" {bad.told.p95:.0f}."
        ]
    return []


def _on_time(sound: Summary, weight: int, min_seconds: float) -> list[str]:
    waits = {name: seconds for name, seconds in sound.held.items() if seconds > 0.1 * max(min_seconds, 1.0)}
    if not waits:
        return []
    name, seconds = max(waits.items(), key=lambda item: item[1])
    told = (
        f"A sound candidate is held {seconds:.0f} s by {name}, beyond the {min_seconds:.0f} s of its stages"
    )
    if name == "NoEvidence":
        told += f": begin with more than {weight} %, or ask for fewer samples and see less"
    return [told + "."]
