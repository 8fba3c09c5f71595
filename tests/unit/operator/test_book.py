"""The order of writes: what a crash at any point leaves behind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sluice_operator.api.rulestatus import Phase
from sluice_operator.control.book import Book, Entry
from sluice_operator.control.cache import Cache
from sluice_operator.gates import ArmName, Observation
from sluice_operator.plan.backend_status import PodState
from sluice_operator.plan.observed import PodView, StreamView
from sluice_operator.plan.routes import BackendView, Inputs, plan

NOW = datetime(2026, 11, 30, 8, tzinfo=UTC)
DIGEST = "sha256:" + "1" * 64
ALL = ["Public", "Internal", "Confidential", "Restricted"]
NAME = ("ns", "m")


class Router:
    """Endpoints that are all there and hold all they shall, as a router would tell."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.silent: set[str] = set()
        self.other: set[str] = set()
        """Whose pods tell evidence of another version."""
        self.away: set[str] = set()

    @property
    def plan(self) -> Any:
        pods: dict[str, tuple[PodState, ...]] = {}
        for _ in range(2):
            given = Inputs(
                policies=tuple(self._book.accepted()),
                backends={f"ns/{n}": BackendView(pods.get(f"ns/{n}", ()), DIGEST) for n in "ab"},
            )
            made = plan(given)
            pods = {
                f"ns/{n}": (
                    PodState(
                        PodView(n, "ns", n, ip="10.0.0.1", phase="Running", ready=n not in self.away),
                        StreamView(
                            n not in self.silent,
                            DIGEST,
                            frozenset(made.configs[f"ns/{n}"]),
                            unreadable="old" if n in self.other else "",
                        ),
                    ),
                )
                for n in "ab"
            }
        return made

    def reached(self, cluster: str) -> int:
        return 1


def backend(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", "resourceVersion": "1", "creationTimestamp": "1"},
        "spec": {"model": {"hostPath": {"path": "/m"}}, "fitness": {"dataClasses": ALL}},
        "status": {"identity": {"digest": DIGEST[:-1] + ("a" if name == "a" else "b"), "recordedAt": "1"}},
    }


def policy(version: int, generation: int = 1, **rule: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "m",
            "namespace": "ns",
            "resourceVersion": str(version),
            "generation": generation,
            "creationTimestamp": "2",
            "uid": "u",
        },
        "spec": {
            "model": "m",
            "rules": [{"name": "all", "target": {"backend": "a"}, "contract": CONTRACT, **rule}],
        },
    }


CONTRACT = {"checks": [{"name": "c", "mustMatch": "x"}]}
ROLLOUT = {"candidate": {"backend": "b"}, "steps": [{"weight": 10, "minSeconds": 60, "minSamples": 50}]}


def started() -> tuple[Cache, Book, Entry]:
    cache = Cache()
    book = Book(cache)
    book.router = Router(book)  # type: ignore[assignment]
    book.warm = True
    for name in "ab":
        cache.put("InferenceBackend", backend(name))
    cache.put("RoutePolicy", policy(1, rollout=ROLLOUT))
    assert book.consider(NAME)
    return cache, book, book.entries[NAME]


def stepped() -> tuple[Cache, Book, Entry]:
    """At 10 %, persisted."""
    cache, book, entry = started()
    for i in range(4):
        book.decide(entry, NOW + timedelta(seconds=i))
        book.apply_pending(entry, dict(entry.pending), NOW + timedelta(seconds=i))
    assert entry.rules["all"].weight == 10
    return cache, book, entry


def bad(at: datetime, attempt: str) -> Observation:
    return Observation(
        time=at.timestamp(),
        request_id="r",
        arm=ArmName.CANDIDATE,
        age_s=0.1,
        attempt=attempt,
        ttft_s=0.1,
        total_s=0.1,
        hard_violations=("c",),
    )


def test_an_increase_waits_until_it_is_persisted() -> None:
    _, book, entry = started()
    for i in range(4):
        book.decide(entry, NOW + timedelta(seconds=i))
    assert entry.rules["all"].weight == 0
    assert entry.pending["all"].weight == 10
    assert book.apply_pending(entry, dict(entry.pending), NOW)
    assert entry.rules["all"].weight == 10
    assert not entry.pending


def test_a_reduction_is_in_force_at_once_and_told_once() -> None:
    _, book, entry = stepped()
    entry.news.clear()
    now = NOW + timedelta(seconds=10)
    book.observe(entry, entry.spec.rules[0], [bad(now, entry.rules["all"].attempt)], now)  # type: ignore[union-attr]
    assert book.decide(entry, now, only="all")
    assert entry.rules["all"].phase is Phase.ROLLED_BACK
    assert entry.rules["all"].weight == 0
    assert entry.urgent
    assert len(entry.news) == 1
    assert not book.decide(entry, now, only="all"), "deciding again changes nothing"
    assert len(entry.news) == 1


def test_an_increase_on_its_way_is_void_after_a_human_edit() -> None:
    cache, book, entry = started()
    for i in range(4):
        book.decide(entry, NOW + timedelta(seconds=i))
    on_its_way = dict(entry.pending)
    cache.put("RoutePolicy", policy(2, 2, rollout={**ROLLOUT, "abort": True}))
    book.consider(NAME)
    book.decide(entry, NOW)
    assert not book.apply_pending(entry, on_its_way, NOW), (
        "its status was written, but something else was decided"
    )
    assert entry.rules["all"].weight == 0
    assert entry.rules["all"].phase is Phase.ABORTED


def test_a_bad_edit_leaves_what_was_accepted_and_a_restart_knows_it() -> None:
    cache, book, entry = stepped()
    cache.put("RoutePolicy", policy(3, 2, target={"backend": "none"}))
    assert not book.consider(NAME)
    assert (entry.accepted, entry.generation) == (1, 2)
    assert entry.problems[0].reason == "BackendNotFound"
    after = Book(cache)
    after.restore(
        [
            {
                "metadata": {"namespace": "ns", "ownerReferences": [{"name": "m", "uid": "u"}]},
                "revision": 1,
                "data": {"spec": entry.spec.model_dump(by_alias=True, mode="json")},
            }
        ]
    )  # type: ignore[union-attr]
    after.consider(NAME)
    assert after.entries[NAME].spec == entry.spec
    assert after.entries[NAME].accepted == 1


def test_an_abort_is_in_force_whatever_else_is_wrong_with_the_spec() -> None:
    """Somebody has deleted a suite, or broken another rule, hours ago."""
    cache, book, entry = stepped()
    broken = policy(3, 2, rollout={**ROLLOUT, "abort": True})
    broken["spec"]["rules"].append({"name": "other", "target": {"backend": "none"}})
    cache.put("RoutePolicy", broken)
    assert book.consider(NAME)
    assert book.decide(entry, NOW + timedelta(seconds=9))
    assert (entry.rules["all"].phase, entry.rules["all"].weight) == (Phase.ABORTED, 0)
    assert (entry.accepted, entry.generation, entry.withdrawn) == (1, 2, ("abort of rule all",))
    assert entry.whole is not None
    assert entry.whole.rules[0].rollout is not None
    assert not entry.whole.rules[0].rollout.abort, "a restart reads it as it was accepted"
    broken["spec"]["rules"].pop()
    broken["metadata"] |= {"generation": 3, "resourceVersion": "4"}
    cache.put("RoutePolicy", broken)
    assert not book.consider(NAME), "the same is in force"
    assert (entry.accepted, entry.withdrawn) == (3, ())


def test_a_policy_made_anew_inherits_nothing() -> None:
    cache, book, _ = stepped()
    cache.drop("RoutePolicy", NAME, 8)
    assert book.consider(NAME)
    assert NAME not in book.entries
    again = policy(9, rollout=ROLLOUT)
    again["metadata"] |= {"creationTimestamp": "3", "uid": "v"}
    cache.put("RoutePolicy", again)
    book.consider(NAME)
    assert book.entries[NAME].rules == {}


def test_a_policy_made_anew_within_the_same_second_inherits_nothing() -> None:
    """Deletion and creation arrive in either order: only the uid tells."""
    cache, book, _ = stepped()
    again = policy(9, rollout=ROLLOUT)
    again["metadata"] |= {"uid": "v"}
    cache.put("RoutePolicy", again)
    book.consider(NAME)
    assert book.entries[NAME].rules == {}


def test_what_was_rolled_back_stays_so_when_the_spec_is_not_understood() -> None:
    """A newer schema, an older operator: it starts and knows the spec only from the revision."""
    cache, _, _ = stepped()
    odd = policy(9, 2)
    odd["spec"]["surprise"] = 1
    odd["status"] = {"rules": [{"name": "all", "phase": "RolledBack", "rejected": ["x"]}]}
    cache.put("RoutePolicy", odd)
    after = Book(cache)
    after.consider(NAME)
    assert after.entries[NAME].rules["all"].rejected == ["x"]
    assert after.entries[NAME].problems


def test_a_record_that_makes_no_sense_ends_nothing() -> None:
    _, book, entry = stepped()
    rule = entry.spec.rules[0]  # type: ignore[union-attr]
    nonsense = bad(NOW, entry.rules["all"].attempt).__class__(
        time=NOW.timestamp(), request_id="x", arm=ArmName.STABLE, age_s="long", hard_violations=None,  # type: ignore[arg-type]
    )  # fmt: skip
    book.observe(entry, rule, [nonsense], NOW)
    now = NOW + timedelta(seconds=10)
    book.observe(entry, rule, [bad(now, entry.rules["all"].attempt)], now)
    assert book.decide(entry, now)
    assert entry.rules["all"].phase is Phase.ROLLED_BACK


def seconds(book: Book, entry: Entry, number: int) -> None:
    for i in range(number):
        now = NOW + timedelta(seconds=20 + i)
        book.decide(entry, now)
        book.apply_pending(entry, dict(entry.pending), now)


def test_a_lost_stream_moves_no_traffic_for_seconds_and_the_candidates_away_after_that() -> None:
    for silent in "ab":
        _, book, entry = stepped()
        book.router.silent = {silent}  # type: ignore[union-attr]
        seconds(book, entry, 15)
        assert entry.rules["all"].weight == 10, silent
        assert entry.rules["all"].stable.backend == "a"
        seconds(book, entry, 20)
        assert (entry.rules["all"].weight, entry.rules["all"].held) == (0, "EvidenceNotLive"), silent
        book.router.silent = set()  # type: ignore[union-attr]
        seconds(book, entry, 20)
        assert entry.rules["all"].weight == 10, silent


def test_evidence_of_another_version_is_none_and_the_hold_says_whose_it_is() -> None:
    for others in ({"a"}, {"b"}, {"a", "b"}):
        _, book, entry = stepped()
        book.router.other = others  # type: ignore[union-attr]
        seconds(book, entry, 1)
        assert entry.rules["all"].weight == 10, "an operator that was upgraded a moment ago moves no traffic"
        seconds(book, entry, 20)
        rule = entry.rules["all"]
        assert (rule.weight, rule.held) == (0, "EvidenceUnreadable")
        assert f"pods of {' and '.join(sorted(others))} tell" in rule.held_message
        book.router.other = set()  # type: ignore[union-attr]
        seconds(book, entry, 20)
        assert entry.rules["all"].weight == 10


def test_a_clock_that_was_set_back_leaves_no_candidate_unheard() -> None:
    _, book, entry = stepped()
    book.router.silent = {"b"}  # type: ignore[union-attr]
    book.decide(entry, NOW + timedelta(hours=1))
    seconds(book, entry, 20)
    assert entry.rules["all"].weight == 0


def test_a_stable_arm_that_is_down_does_not_get_the_candidates_traffic_too() -> None:
    _, book, entry = stepped()
    book.router.away = {"a"}  # type: ignore[union-attr]
    seconds(book, entry, 60)
    assert entry.rules["all"].weight == 10
