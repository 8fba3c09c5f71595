"""The prefix cache's second tier: which evicted block stands in which slot of host memory. Pure, as blocks.py
is: what is copied where is said here, before a step, and done by who runs it.

    device   [ b0 | b1 | b2 ]   evicted: out, b1 → s0 (before anything overwrites b1)
    host     [ s0 | s1 ]        found again: back, s0 → a block just taken (before the step that reads it)

A slot keeps its content when it is copied back: to evict that block once more costs nothing. Slots go by
value as blocks do: contents that nobody asked for again, then those that somebody has, each least recently
used first; contents of low-priority requests are not kept at all.

Invariant: until the copies of a step are taken over by who does them, no slot that one of them reads or
writes gets another content. All copies out come before all copies back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

LOW, ONCE, SHARED = range(3)


@dataclass(frozen=True, slots=True)
class Content:
    """What a cached block holds: enough to prove a hit."""

    key: bytes
    scope: str
    parent: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvMoves:
    """Copies to do before a step, as pairs of block and slot: all of `out` first, then all of `back`."""

    out: tuple[tuple[int, int], ...] = ()
    back: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.out or self.back)


NO_MOVES = KvMoves()


class HostTier:
    """`num_slots` slots of a block each; 0 keeps nothing. Belongs to a `BlockManager`."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._content: list[Content | None] = [None] * num_slots
        self._by_key: dict[bytes, int] = {}
        self._free: deque[int] = deque(range(num_slots))
        self._once: OrderedDict[int, None] = OrderedDict()
        self._shared: OrderedDict[int, None] = OrderedDict()
        self._max_shared = max(1, num_slots * 3 // 4)
        self._out: dict[int, int] = {}
        self._back: dict[int, int] = {}
        self._held: set[int] = set()
        self.num_offloaded_total = 0
        self.num_restored_total = 0

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return len(self._by_key)

    def find(self, content: Content) -> int | None:
        """The slot that holds just this."""
        slot = self._by_key.get(content.key)
        return slot if slot is not None and self._content[slot] == content else None

    def content(self, slot: int) -> Content:
        content = self._content[slot]
        assert content is not None, f"slot {slot} is empty"
        return content

    def evicted(self, block: int, content: Content, value: int) -> None:
        """`block` loses its content on the device: keep it, if it is worth it and there is room."""
        known = self._by_key.get(content.key)
        if known is not None:
            self._touch(known, value)
            return
        slot = self._take() if value != LOW else None
        if slot is None:
            return
        self._content[slot] = content
        self._by_key[content.key] = slot
        self._touch(slot, value)
        self._out[slot] = block
        self.num_offloaded_total += 1

    def hold(self, slots: Sequence[int]) -> None:
        """These are about to be copied back: they keep their contents until the copies are taken over."""
        self._held.update(slots)

    def restore(self, slot: int, block: int, value: int) -> None:
        """Copy a held slot back into `block`."""
        assert slot in self._held, f"slot {slot} is copied back and not held"
        self._touch(slot, value)
        self._back[block] = slot
        self.num_restored_total += 1

    def take_moves(self) -> KvMoves:
        """The copies to do now; who takes them does them before anything else touches KV."""
        if not (self._out or self._back or self._held):
            return NO_MOVES
        moves = KvMoves(tuple((block, slot) for slot, block in self._out.items()), tuple(self._back.items()))
        self._out, self._back, self._held = {}, {}, set()
        return moves

    def clear(self) -> None:
        """Forget all contents. Copies back into blocks that are in use are still done."""
        needed = set(self._back.values())
        self._out = {slot: block for slot, block in self._out.items() if slot in needed}
        self._content = [None] * self.num_slots
        self._by_key.clear()
        self._once.clear()
        self._shared.clear()
        self._free = deque(range(self.num_slots))

    def _touch(self, slot: int, value: int) -> None:
        if value == SHARED or slot in self._shared:
            self._once.pop(slot, None)
            self._shared[slot] = None
            self._shared.move_to_end(slot)
        else:
            self._once[slot] = None
            self._once.move_to_end(slot)
        while len(self._shared) > self._max_shared:
            oldest, _ = self._shared.popitem(last=False)
            self._once[oldest] = None

    def _take(self) -> int | None:
        """An empty slot, of the least valuable content if need be; None if copies need them all."""

        def is_still(slot: int) -> bool:
            return slot not in self._held and slot not in self._out

        free = next(filter(is_still, self._free), None)
        if free is not None:
            self._free.remove(free)
            return free
        for order in (self._once, self._shared):
            slot = next(filter(is_still, order), None)
            if slot is not None:
                del order[slot], self._by_key[self.content(slot).key]
                self._content[slot] = None
                return slot
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot is empty or holds what its one key says."""
        free, used = set(self._free), [*self._once, *self._shared]
        assert len(free) == len(self._free), "a slot is free twice"
        assert len(set(used)) == len(used), "a slot is ranked twice"
        assert free.isdisjoint(used), "a slot is free and used"
        assert free | set(used) == set(range(self.num_slots)), "a slot is lost"
        for slot, content in enumerate(self._content):
            assert (content is None) == (slot in free), f"slot {slot}: wrongly (not) free"
            assert content is None or self._by_key.get(content.key) == slot, f"slot {slot}: key elsewhere"
        assert len(self._by_key) == len(used), "a key without a slot"
        assert set(self._back.values()) <= self._held, "a copy back of a slot that is not held"
