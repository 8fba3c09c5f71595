"""Puts speculation together for an engine, or says why it can't be had.

Invariant: each refusal names the setting that has to change.
"""

from __future__ import annotations

from sluice_runtime.engine import support
from sluice_runtime.engine.attention import UnsupportedAttention
from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.speculation.controller import Always, Controller
from sluice_runtime.engine.speculation.draft import Draft, VocabularyDiffers, check_vocabulary
from sluice_runtime.engine.speculation.proposer import Proposer
from sluice_runtime.engine.speculation.speculator import Speculator
from sluice_runtime.engine.speculation.suffix import Suffix
from sluice_runtime.engine.types import EngineConfig, Speculation, SpeculationMethod
from sluice_runtime.engine.varlen import VarlenRunner
from sluice_runtime.models import LoadedModel, UnsupportedModel

DRAFT_FIELD = "engine.speculation.draft"


def draft_runner(
    target: LoadedModel, draft: LoadedModel | None, config: EngineConfig, context: int
) -> ModelRunner | None:
    """Runs the draft model, if there is to be one. Raises `UnsupportedModel`."""
    wanted = config.speculation is not None and config.speculation.method is SpeculationMethod.DRAFT
    if wanted != (draft is not None):
        raise UnsupportedModel(f"{DRAFT_FIELD}: a draft model comes with method Draft, and only with it")
    if draft is None:
        return None
    try:
        check_vocabulary(target.tokenizer, draft.tokenizer, target.eos_token_ids, draft.eos_token_ids)
        if draft.max_position_embeddings < context:
            reach = draft.max_position_embeddings
            raise UnsupportedModel(f"{DRAFT_FIELD}: it reads {reach} tokens, maxModelLen is {context}")
        return VarlenRunner(draft.model, config.block_size, config.kv_cache_dtype)
    except (VocabularyDiffers, UnsupportedAttention) as error:
        raise UnsupportedModel(f"{DRAFT_FIELD}: {error}") from error


def speculator(
    speculation: Speculation,
    config: EngineConfig,
    runner: ModelRunner | None,
    *,
    num_blocks: int,
    context: int,
    vocab_size: int,
) -> Speculator:
    """`runner`: the draft's, if any, which gets as many blocks of KV as the target; `context` and
    `vocab_size`: the target's. Raises `UnsupportedModel`."""
    proposer: Proposer = Suffix()
    if runner is not None:
        runner.allocate_kv(num_blocks)
        try:
            support.check_answers(runner, num_blocks)
        except UnsupportedAttention as error:
            raise UnsupportedModel(f"{DRAFT_FIELD}: {error}") from error
        runner.prepare(config.max_num_seqs, context)
        # Models of a family are padded to different sizes beyond the vocabulary that they share.
        known = min(vocab_size, int(runner.model.get_input_embeddings().num_embeddings))
        blocks = BlockManager(num_blocks, config.block_size)
        proposer = Draft(runner, blocks, vocab_size=known, max_batch_tokens=config.max_batch_tokens)
    num_tokens = speculation.num_tokens
    controller = Always(num_tokens) if speculation.always else Controller(num_tokens)
    return Speculator(proposer, controller, num_tokens)
