"""Guesses by a second, small model with the same vocabulary and a paged KV of its own.

The draft reads what it lacks of a request's text (its prompt at first; what was confirmed since, later), then
guesses token by token, all requests in one batch. A guess is drawn with the random number that verification
will use at that position, so the two models agree wherever their distributions nearly do (a coupling as in
arXiv 2408.07978); greedy requests get the draft's best token.

    text the draft has read    [ p p p p o o ]      confirmed
    its KV                     [ p p p p o o | d1 d2 ]   the last guess is never computed
    next time                  [ p p p p o o   d1 x ]    KV is kept as far as the guesses were right

Invariant: a request's blocks are its own; there is no prefix cache here, so nothing passes between tenants.
What the draft does with the target's preemptions and cached prefixes: nothing, it keeps its own count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.draws import draw
from sluice_runtime.engine.logits import GREEDY_BELOW
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.speculation.proposer import Wanted
from sluice_runtime.engine.tokenizer import Tokenizer


class VocabularyDiffers(ValueError):
    """A draft that would speak another language than its target."""


def check_vocabulary(
    target: Tokenizer, draft: Tokenizer, target_ends: frozenset[int], draft_ends: frozenset[int]
) -> None:
    """Raise `VocabularyDiffers` unless each id means the same bytes to both, and the same control tokens and
    ends of sequence."""
    if target.vocab_size != draft.vocab_size:
        raise VocabularyDiffers(f"it has {draft.vocab_size} tokens, the model has {target.vocab_size}")
    if target.special_ids != draft.special_ids:
        token_id = min(target.special_ids ^ draft.special_ids)
        raise VocabularyDiffers(f"token {token_id} is special to one of them only")
    if target_ends != draft_ends:
        raise VocabularyDiffers(
            f"it ends sequences with {sorted(draft_ends)}, the model with {sorted(target_ends)}"
        )
    for token_id in range(target.vocab_size):
        # Special tokens have no bytes; they are told apart by their names.
        if target.token_bytes(token_id) != draft.token_bytes(token_id) or (
            token_id in target.special_ids and target.token_text(token_id) != draft.token_text(token_id)
        ):
            own, other = target.token_text(token_id), draft.token_text(token_id)
            raise VocabularyDiffers(f"token {token_id} is {other!r} to it and {own!r} to the model")


@dataclass(slots=True)
class _Read:
    """What the draft has of one request: KV of `num_computed` tokens, the last of them guesses (`guessed`,
    from position `num_known` on)."""

    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_known: int = 0
    guessed: list[int] = field(default_factory=list)


class Draft:
    """The proposer. `runner` has its KV allocated: `blocks` says how much."""

    def __init__(
        self, runner: ModelRunner, blocks: BlockManager, *, vocab_size: int, max_batch_tokens: int
    ) -> None:
        """`vocab_size`: ids that both models know. `max_batch_tokens`: what the draft may read
        for one proposal, so that a long prompt does not stop the streams; the rest comes later."""
        self.blocks = blocks
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_batch_tokens = max_batch_tokens
        self._read: dict[str, _Read] = {}
        self._asking: set[str] = set()

    def propose(self, wanted: Sequence[Wanted]) -> dict[str, list[int]]:
        self._asking = {each.request_id for each in wanted}
        chunks, ready, budget = [], [], self._max_batch_tokens
        # Those who lack least first: a long prompt must not keep the others from being guessed.
        for each in sorted(wanted, key=self._num_lacking):
            chunk = self._catch_up(each, budget) if budget > 0 else None
            if chunk is None:
                continue
            chunks.append(chunk)
            budget -= len(chunk.token_ids)
            if chunk.samples:
                ready.append(each)
        guesses: dict[str, list[int]] = {each.request_id: [] for each in ready}
        while chunks:
            logits, ids = self._runner.execute(chunks)
            chunks = []
            if ids:
                of = {each.request_id: each for each in ready}
                self._guess(logits, [of[i] for i in ids], guesses)
                chunks = [c for each in ready if (c := self._next_chunk(each, guesses[each.request_id]))]
        for request_id, guessed in guesses.items():
            self._read[request_id].guessed = guessed
        return guesses

    def _num_lacking(self, each: Wanted) -> int:
        read = self._read.get(each.request_id)
        return len(each.token_ids) - (read.num_computed if read is not None else 0)

    def _catch_up(self, each: Wanted, budget: int) -> ScheduledChunk | None:
        """What the draft lacks of the text, or as much as the budget allows; None if that can't be had."""
        read = self._read.setdefault(each.request_id, _Read())
        self._take_back(read, each.token_ids)
        known = len(each.token_ids)
        token_ids = list(each.token_ids[read.num_computed : read.num_computed + budget])
        end = read.num_computed + len(token_ids)
        samples = end == known
        if max(token_ids) >= self._vocab_size:
            return None  # an id beyond the shared vocabulary, from a prompt of ids
        if not self._cover(read, end + (each.num_tokens - 1 if samples else 0)):
            return None
        chunk = ScheduledChunk(each.request_id, token_ids, read.num_computed, read.block_table, samples)
        read.num_computed, read.num_known = end, known
        return chunk

    def _take_back(self, read: _Read, token_ids: Sequence[int]) -> None:
        """Forget KV of guesses that were wrong; at least the last known token is computed again, since its
        logits are wanted."""
        if read.guessed:
            right = 0
            for guess, token_id in zip(read.guessed, token_ids[read.num_known :], strict=False):
                if guess != token_id:
                    break
                right += 1
            read.num_computed = min(read.num_computed, read.num_known + right)
            read.guessed = []
        read.num_computed = min(read.num_computed, len(token_ids) - 1)
        num_blocks = self.blocks.num_blocks_for(read.num_computed)
        self.blocks.release(read.block_table[num_blocks:])
        del read.block_table[num_blocks:]

    def _cover(self, read: _Read, end: int) -> bool:
        missing = self.blocks.num_blocks_for(end) - len(read.block_table)
        if missing > self.blocks.num_available:
            # Who does not ask now (preempted, or switched off since) reads again if it ever does.
            for request_id in [i for i in self._read if i not in self._asking]:
                self.forget(request_id)
        more = self.blocks.allocate(missing) if missing > 0 else []
        if more is None:
            return False
        read.block_table += more
        return True

    def _guess(self, logits: Tensor, wanted: Sequence[Wanted], guesses: dict[str, list[int]]) -> None:
        """One more guess for each row."""
        logits = logits[:, : self._vocab_size].float()
        best = logits.argmax(dim=-1).tolist()
        drawn = [row for row, each in enumerate(wanted) if each.sampling.temperature >= GREEDY_BELOW]
        if drawn:
            uniforms = [wanted[r].uniform(len(guesses[wanted[r].request_id])) for r in drawn]
            tokens = draw(logits[drawn], [wanted[r].sampling for r in drawn], uniforms)
            for row, token_id in zip(drawn, tokens, strict=True):
                best[row] = token_id
        for each, token_id in zip(wanted, best, strict=True):
            guesses[each.request_id].append(token_id)

    def _next_chunk(self, each: Wanted, guessed: Sequence[int]) -> ScheduledChunk | None:
        if len(guessed) >= each.num_tokens:
            return None
        read = self._read[each.request_id]
        start, read.num_computed = read.num_computed, read.num_computed + 1
        return ScheduledChunk(each.request_id, [guessed[-1]], start, read.block_table, True)

    def forget(self, request_id: str) -> None:
        read = self._read.pop(request_id, None)
        if read is not None:
            self.blocks.release(read.block_table)

    @property
    def num_held(self) -> int:
        return len(self._read)

    def check_integrity(self) -> None:
        self.blocks.check_integrity(read.block_table for read in self._read.values())
        for request_id, read in self._read.items():
            needed = self.blocks.num_blocks_for(read.num_computed)
            assert len(read.block_table) >= needed, f"{request_id}: KV without a block"
