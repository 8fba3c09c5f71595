"""The real server over the real engine with a tiny random model, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sluice_runtime.api.app import api_app
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import EngineConfig
from sluice_runtime.models import LoadedModel, ModelSource
from sluice_runtime.server import bind, listening
from sluice_runtime.state import Identity, Runtime, Settings

EOS = 257
MAX_POSITIONS = 2048
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> call with <tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n{{ c['function'] | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte; its template knows tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    hf: Any = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    return Tokenizer(hf)


def tiny_engine(**config: Any) -> Engine:
    """Not started. A Llama with random weights, which says anything with about the same chance."""
    torch.manual_seed(7)
    shape = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(shape).eval()
    loaded = LoadedModel(
        model, byte_tokenizer(), "sha256:test", 0, MAX_POSITIONS, frozenset({EOS}), ModelSource()
    )
    options: dict[str, Any] = {
        "num_kv_blocks": 1024,
        "block_size": 16,
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_queue": 64,
    }
    return Engine(loaded, EngineConfig(**(options | config)))


@dataclass
class Server:
    """A running server: where it listens, and what is behind it."""

    url: str
    engine: Engine
    runtime: Runtime


async def _serve(engine: Engine, started: Future[Server], stop: asyncio.Event) -> None:
    runtime = Runtime(Settings("tiny", None, None))
    digest = "sha256:" + "1" * 64
    runtime.become_ready(engine, Identity(digest, digest, digest))
    async with listening((api_app(runtime), bind("127.0.0.1", 0)), None) as ports:
        started.set_result(Server(f"http://127.0.0.1:{ports.api}", engine, runtime))
        await stop.wait()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """In a thread of its own, as a client in the same loop would hide a loop that is blocked."""
    engine = tiny_engine()
    engine.start()
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), Future[Server]()
    thread = threading.Thread(target=loop.run_until_complete, args=(_serve(engine, started, stop),))
    thread.start()
    try:
        yield started.result(timeout=120)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=120)
        loop.close()
        assert engine.healthy(), "the loop lives, whatever was asked"
        engine.stop()
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.kv_blocks_used) == (0, 0, 0)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as api:
        yield api
