"""Who owns which KV block; exists so that KV memory is accounted for in one place, without torch.

Invariant (`check_integrity`): every block is in exactly one of three states.

    free        no reference, no key      in `_free`
    cached      no reference, has a key   in one tier of `_evictable`, least recently used first
    referenced  one reference for each block table it stands in; may have a key too

Cached blocks are evicted by value: those of low-priority requests, then those that nobody has asked for
again, then those that somebody has (LOW, ONCE, SHARED). SHARED holds at most three quarters of all blocks:
beyond that its least recently used go down a tier, so that yesterday's favourite prefix leaves in the end.

The prefix cache maps a key to a block. Keys chain: key(i) = SHA-256(scope, key(i-1), tokens of block i), each
field length-prefixed, so a block is found only by the same scope with the same whole prefix. On a hit scope,
parent and tokens are compared as well: a collision is a miss, never another caller's KV.

What is evicted may go on in host memory (host_tier.py), under the same key and found by the same comparison.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from sluice_runtime.engine.host_tier import LOW, ONCE, SHARED, Content, HostTier, KvMoves

ROOT_KEY = b""


def block_key(scope: str, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block holding `tokens` after the prefix that `parent` names."""
    digest = hashlib.sha256()
    for part in (scope.encode(), parent, array("q", tokens).tobytes()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class BlockManager:
    """Allocates `num_blocks` blocks of `block_size` tokens. Not thread-safe: the engine's thread owns it.

    `host` is the second tier, of `num_host_slots`. With it, who allocates takes the copies (`take_moves`) and
    does them before the blocks are used.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_slots: int = 0) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_refs = [0] * num_blocks
        self._content: list[Content | None] = [None] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._tier = [ONCE] * num_blocks
        self._evictable: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._max_shared = max(1, num_blocks * 3 // 4)
        self._by_key: dict[bytes, int] = {}
        self.host = HostTier(num_host_slots)
        self.num_evictions_total = 0

    @property
    def num_used(self) -> int:
        """Blocks that some request references."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now, evicting cached ones if need be."""
        return len(self._free) + sum(map(len, self._evictable))

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache can find, referenced or not."""
        return len(self._by_key)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, scope: str, keys: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """Blocks that hold the longest cached prefix of `token_ids`, of which `keys` are the full blocks'
        keys."""
        found: list[int] = []
        parent = ROOT_KEY
        for i, key in enumerate(keys):
            block = self._by_key.get(key)
            if block is None:
                break
            if self._content[block] != self._wanted(key, scope, parent, token_ids, i):
                break
            found.append(block)
            parent = key
        return found

    def find_offloaded(
        self, scope: str, keys: Sequence[bytes], token_ids: Sequence[int], first: int
    ) -> list[int]:
        """Slots of host memory that go on with the prefix from full block `first`; as `find_prefix`."""
        found: list[int] = []
        for i in range(first, len(keys) if self.host.num_slots else 0):
            if keys[i] in self._by_key:
                break
            parent = keys[i - 1] if i else ROOT_KEY
            slot = self.host.find(self._wanted(keys[i], scope, parent, token_ids, i))
            if slot is None:
                break
            found.append(slot)
        return found

    def _wanted(self, key: bytes, scope: str, parent: bytes, token_ids: Sequence[int], i: int) -> Content:
        """What full block `i` of a prefix must hold to be a hit."""
        return Content(key, scope, parent, tuple(token_ids[i * self.block_size : (i + 1) * self.block_size]))

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these count as available: nobody references them."""
        return sum(1 for block in blocks if self._num_refs[block] == 0)

    def num_exclusive(self, block_table: Sequence[int]) -> int:
        """How many of these become available when their one owner lets go."""
        return sum(1 for block in block_table if self._num_refs[block] == 1)

    def allocate(
        self, num_blocks: int, prefix: Sequence[int] = (), *, asked_again: bool = True
    ) -> list[int] | None:
        """A block table of `num_blocks`, starting with the cached blocks of `prefix`; None if there is no
        room. `asked_again`: it is another request than the one that filled the prefix."""
        num_new = num_blocks - len(prefix)
        if num_new < 0 or num_new + self.num_idle(prefix) > self.num_available:
            return None
        for block in prefix:
            self._evictable[self._tier[block]].pop(block, None)
            self._num_refs[block] += 1
            if asked_again:
                self._tier[block] = SHARED
        return [*prefix, *(self._take() for _ in range(num_new))]

    def restore(self, slots: Sequence[int], *, asked_again: bool = True) -> list[int]:
        """Blocks that will hold what stands in these slots once the copies are done; each has one reference.
        As many must be available."""
        self.host.hold(slots)
        value = SHARED if asked_again else ONCE
        blocks = []
        for slot in slots:
            block, content = self._take(), self.host.content(slot)
            self.host.restore(slot, block, value)
            self.publish(block, content.key, content.scope, content.parent, content.tokens)
            self._tier[block] = value
            blocks.append(block)
        return blocks

    def take_moves(self) -> KvMoves:
        """What must be copied between device and host before the blocks handed out are used."""
        return self.host.take_moves()

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = next(tier for tier in self._evictable if tier).popitem(last=False)
            content = self._content[block]
            assert content is not None
            self.host.evicted(block, content, self._tier[block])
            del self._by_key[content.key]
            self._content[block] = None
            self.num_evictions_total += 1
        self._num_refs[block] = 1
        self._tier[block] = ONCE
        return block

    def release(self, block_table: Sequence[int]) -> None:
        """Give back one reference of each block. The tail becomes evictable first: a prefix outlives what
        follows it."""
        for block in reversed(block_table):
            if self._num_refs[block] < 1:
                raise AssertionError(f"block {block} released more often than it was referenced")
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                if self._content[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[self._tier[block]][block] = None
        shared = self._evictable[SHARED]
        while len(shared) > self._max_shared:
            block, _ = shared.popitem(last=False)
            self._tier[block] = ONCE
            self._evictable[ONCE][block] = None

    def publish(
        self,
        block: int,
        key: bytes,
        scope: str,
        parent: bytes,
        tokens: Sequence[int],
        *,
        low_priority: bool = False,
    ) -> None:
        """Let the prefix cache find a referenced block whose KV is complete; the first block of a key
        stays."""
        if self._num_refs[block] < 1:
            raise AssertionError(f"block {block} published without an owner")
        if key in self._by_key or self._content[block] is not None:
            return
        self._by_key[key] = block
        self._content[block] = Content(key, scope, parent, tuple(tokens))
        self._tier[block] = LOW if low_priority else ONCE

    def clear_cache(self) -> None:
        """Forget all cached prefixes; blocks in use stay in use, but can no longer be found."""
        for tier in self._evictable:
            self._free.extend(tier)
            tier.clear()
        for block in self._by_key.values():
            self._content[block] = None
        self._by_key.clear()
        self.host.clear()

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless `block_tables` account for every reference and each block has one
        state."""
        num_refs = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            for block in table:
                num_refs[block] += 1
        assert num_refs == self._num_refs, f"references: tables say {num_refs}, manager says {self._num_refs}"
        free, evictable = set(self._free), {block for tier in self._evictable for block in tier}
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(self.num_blocks):
            content = self._content[block]
            idle = num_refs[block] == 0
            assert (block in free) == (idle and content is None), f"block {block}: wrongly (not) free"
            assert (block in evictable) == (idle and content is not None), (
                f"block {block}: wrongly (not) evictable"
            )
            assert (block in self._evictable[self._tier[block]]) == (block in evictable), f"{block}: its tier"
            assert content is None or self._by_key.get(content.key) == block, (
                f"block {block}: key points elsewhere"
            )
        assert len(self._by_key) == sum(c is not None for c in self._content), "a key without a block"
        self.host.check_integrity()
