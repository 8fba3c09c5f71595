"""A request and the prefix cache: which blocks it finds there, and which it gives. Pure, as blocks.py is.

Invariant: a block is given only when all of its tokens are computed, under a key over the scope and all
tokens up to its last.
"""

from __future__ import annotations

from sluice_runtime.engine.blocks import ROOT_KEY, BlockManager, block_key
from sluice_runtime.engine.plan import RequestState


def find(blocks: BlockManager, state: RequestState) -> tuple[list[int], list[int]]:
    """Blocks that hold the beginning of a request, and slots of host memory that go on with it."""
    request = state.request
    if not request.prefix_cache:
        return [], []
    # The last token is always computed: its logits give the next one.
    num_full = (len(state.token_ids) - 1) // blocks.block_size
    _extend_keys(state, blocks.block_size, num_full)
    keys = state.block_keys[:num_full]
    prefix = blocks.find_prefix(request.scope, keys, state.token_ids)
    return prefix, blocks.find_offloaded(request.scope, keys, state.token_ids, len(prefix))


def publish(blocks: BlockManager, state: RequestState) -> None:
    """Let others find what has been computed since the last time."""
    if not state.request.prefix_cache:
        return
    size, scope = blocks.block_size, state.request.scope
    num_full = state.num_computed_tokens // size
    _extend_keys(state, size, num_full)
    low = state.request.priority < 0
    for i in range(state.num_published, num_full):
        parent = state.block_keys[i - 1] if i else ROOT_KEY
        tokens = state.token_ids[i * size : (i + 1) * size]
        blocks.publish(state.block_table[i], state.block_keys[i], scope, parent, tokens, low_priority=low)
    state.num_published = max(state.num_published, num_full)


def _extend_keys(state: RequestState, size: int, num_blocks: int) -> None:
    while len(state.block_keys) < num_blocks:
        i = len(state.block_keys)
        parent = state.block_keys[-1] if i else ROOT_KEY
        state.block_keys.append(
            block_key(state.request.scope, parent, state.token_ids[i * size : (i + 1) * size])
        )
