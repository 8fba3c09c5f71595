"""Tiny random models, a byte tokenizer, and plain `generate` as the oracle."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sluice_runtime.engine import native
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import EngineConfig, EngineRequest, SamplingParams
from sluice_runtime.models import LoadedModel, ModelSource

VOCAB_SIZE = 300
MAX_POSITIONS = 256
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "gemma": ("Gemma", {}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma3-window": (
        "Gemma3",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2-softcap": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
}


@dataclass
class Oracle:
    """A model twice: `model` is for the engine, `reference` answers with plain `generate`."""

    model: Any
    reference: Any
    num_near_ties: int = 0
    _answers: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        key = (prompt, max_tokens)
        if key not in self._answers:
            ids = torch.tensor([prompt])
            output = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            self._answers[key] = output[0, len(prompt) :].tolist()
        return self._answers[key]

    def assert_same(self, prompt: tuple[int, ...], got: list[int]) -> None:
        """Token for token, except after a position where the two best logits are closer than 1e-4."""
        want = self.greedy(prompt, len(got)) if got else []
        if got == want:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        with torch.inference_mode():
            logits = self.reference(torch.tensor([[*prompt, *want[:at]]])).logits[0, -1]
        best = logits.topk(2).values
        assert float(best[0] - best[1]) < 1e-4, f"differs at {at}: got {got}, want {want}"
        self.num_near_ties += 1


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads compute; back to one afterwards."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def books_are_right(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test each scheduler that it made must be sound, and hold no KV unless somebody runs."""
    made: list[Scheduler] = []
    original = Scheduler.__init__

    def init(self: Scheduler, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Scheduler, "__init__", init)
    yield
    for scheduler in made:
        scheduler.check_integrity()
        assert scheduler.num_running or scheduler.blocks.num_used == 0


def make_oracle(architecture: str) -> Oracle:
    name, options = ARCHITECTURES[architecture]
    text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**_SIZES, **options})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    return Oracle(model, reference)


@pytest.fixture(scope="session")
def oracles() -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def get(architecture: str) -> Oracle:
        if architecture not in made:
            made[architecture] = make_oracle(architecture)
        return made[architecture]

    return get


@pytest.fixture(scope="session")
def llama(oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles("llama")


@pytest.fixture
def runner(llama: Oracle) -> ModelRunner:
    return ModelRunner(llama.model, block_size=4)


@pytest.fixture(scope="session")
def hf_tokenizer() -> Any:
    """One token a byte, with <|im_start|> and <|im_end|> special and <think> added but not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="session")
def tokenizer(hf_tokenizer: Any) -> Tokenizer:
    return Tokenizer(hf_tokenizer)


def loaded(model: Any, tokenizer: Tokenizer, eos: frozenset[int] = frozenset()) -> LoadedModel:
    return LoadedModel(model, tokenizer, "sha256:test", 0, MAX_POSITIONS, eos, ModelSource())


@pytest.fixture
def make_engine(llama: Oracle, tokenizer: Tokenizer) -> Iterator[Callable[..., Engine]]:
    """Started engines; at the end each must be alive, sound, and back at its baseline."""
    engines: list[Engine] = []

    def make(
        *, model: Any = None, eos: frozenset[int] = frozenset(), draft: Any = None, **config: Any
    ) -> Engine:
        options: dict[str, Any] = {"num_kv_blocks": 256, "block_size": 4, "num_threads": 1} | config
        drafting = None if draft is None else loaded(draft, tokenizer, eos)
        engine = Engine(loaded(model or llama.model, tokenizer, eos), EngineConfig(**options), draft=drafting)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        assert engine.healthy()
        engine.stop()
        assert engine.load().kv_blocks_used == 0
        assert engine.load().num_running == engine.load().num_waiting == 0
        engine._scheduler.check_integrity()
        if engine._speculator is not None:
            engine._speculator.check_integrity()
            assert engine._speculator.num_held == 0


_OWN_FIELDS = ("deadline", "prefix_cache", "tenant", "weight", "priority", "grammar", "task", "speculation")


def request(
    request_id: str, prompt: tuple[int, ...], max_tokens: int = 8, *, scope: str = "s", **sampling: Any
) -> EngineRequest:
    """A greedy request unless `sampling` says otherwise."""
    own = {k: sampling.pop(k) for k in _OWN_FIELDS if k in sampling}
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    return EngineRequest(request_id, prompt, params, scope, **own)


@pytest.fixture(name="request_of")
def request_of_fixture() -> Callable[..., EngineRequest]:
    return request


@pytest.fixture(scope="module", params=[0, 1], ids=["pairs", "float32"])
def multiplied(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each way of the kernels to multiply bfloat16, whichever is the faster here."""
    library = native.library()
    if library is None:
        yield
        return
    library.sluice_choose_products(request.param)
    yield
    library.sluice_choose_products(-1)
