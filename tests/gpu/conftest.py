"""An engine on the first CUDA device, with a tokenizer of a byte a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.tokenizer import Tokenizer as EngineTokenizer
from sluice_runtime.engine.types import EngineConfig
from sluice_runtime.models import LoadedModel, ModelSource


@pytest.fixture
def engine_of() -> Iterator[Callable[[Any], Engine]]:
    engines: list[Engine] = []

    def make(model: Any) -> Engine:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        backend.decoder = decoders.ByteLevel()
        tokenizer = EngineTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
        source = ModelSource(device="cuda")
        loaded = LoadedModel(model, tokenizer, "sha256:test", 0, 4096, frozenset(), source)
        engine = Engine(
            loaded, EngineConfig(block_size=256, num_kv_blocks=160, device="cuda", max_num_seqs=16)
        )
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()
        assert engine.load().kv_blocks_used == 0
