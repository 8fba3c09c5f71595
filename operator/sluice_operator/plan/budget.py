"""What a replica's memory goes to, from config.json and the engine's settings, before anything is applied.

    limit   ┃ weights ┃ context ┃ activations ┃ workspace ┃ reserve ┃ ← what is left is the KV budget

The runtime computes activations, workspace and KV by the same formulas from what it has loaded, and refuses
to start beyond them; `docs/contracts/budget.json` holds examples that both sides are tested on. By hand:
SmolLM2-135M has 30 layers of 3 KV heads of 64: a token is 30 × 3 × (64 + 64) × 2 = 23,040 bytes of bfloat16.

Pure. All sizes are bytes. What can't be told from the configuration is a `BudgetError`, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MI = 2**20
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

CONTEXT_BYTES = 434 * MI
"""Interpreter, torch and transformers before any weight, on a CPU; measured (docs/engine-scheduling.md)."""
HALF_CONTEXT_BYTES = 46 * MI
"""What the kernels of half precision add to it."""
TOKENIZER_BYTES = 1024
"""For each entry of the vocabulary."""
RESERVE_PERCENT = 5
TILE = 128
"""Queries of a prompt that attend at once."""

_DENSE = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3", "granite"}
)
_SPARSE = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})


class BudgetError(ValueError):
    """The budget can't be told; the message names the field and the next step."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Settings that memory follows from; as in backend.json."""

    dtype: str
    int8: bool
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    block_size: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A causal decoder's sizes. `ffn` is the widest that one token's feed-forward part becomes."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """Where a replica's bytes go. `kv_budget` is the most that `kvCacheMemory` may be, None where no limit is
    known; `num_blocks` and `kv_tokens` follow from what it is."""

    bytes_per_token: int
    weights: int
    context: int
    activations: int
    workspace: int
    reserve: int
    kv_cache: int
    num_blocks: int
    kv_tokens: int
    kv_budget: int | None

    @property
    def total(self) -> int:
        """What the replica occupies at its worst, the reserve aside."""
        return self.weights + self.context + self.activations + self.workspace + self.kv_cache

    @property
    def fits(self) -> bool:
        return self.kv_budget is None or self.kv_cache <= self.kv_budget


def shape_of(config: Mapping[str, Any]) -> Shape:
    """A model's sizes from its config.json. Raises BudgetError."""

    def number(*names: str) -> int:
        for name in names:
            if isinstance(config.get(name), int):
                return int(config[name])
        raise BudgetError(f"config.json has no {names[0]}: is it that of a causal language model?")

    model_type = str(config.get("model_type", ""))
    if config.get("kv_lora_rank") is not None:
        raise BudgetError(f"{model_type}: latent attention keeps other KV than this engine; it can't run it")
    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    dense = config.get("intermediate_size") or 4 * hidden
    experts = config.get("num_experts_per_tok")
    ffn = dense
    if isinstance(experts, int):
        sparse = config.get("moe_intermediate_size") or dense
        ffn = experts * sparse + (config.get("shared_expert_intermediate_size") or 0)
    return Shape(
        model_type=model_type,
        hidden=hidden,
        layers=number("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=ffn,
        vocab=number("vocab_size"),
        # What transformers takes where the field is absent.
        tied=bool(config.get("tie_word_embeddings", model_type.startswith("gemma"))),
    )


def kv_bytes_per_token(shape: Shape, dtype: str) -> int:
    """KV of one token in all layers."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * DTYPE_BYTES[dtype]


def activation_bytes(shape: Shape, engine: Engine) -> int:
    """The most that one step holds beside KV: a layer's intermediate values of every token, scores of a tile
    of a prompt's queries, and logits of every sequence, also in float32."""
    size, tokens = DTYPE_BYTES[engine.dtype], engine.max_batch_tokens
    width = 4 * shape.hidden + 3 * shape.ffn + 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    scores = 2 * shape.heads * min(TILE, tokens) * engine.max_model_len
    logits = engine.max_num_seqs * shape.vocab * (size + 4)
    return (tokens * width + scores) * size + logits


def workspace_bytes(shape: Shape, engine: Engine, kv_tokens: int) -> int:
    """Pages of one layer, gathered for attention: the context of all that run, half as much again for
    padding, a quarter for growth."""
    tokens = min(engine.max_num_seqs * engine.max_model_len, kv_tokens)
    return tokens * kv_bytes_per_token(shape, engine.dtype) // shape.layers * 15 // 8


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights: `linear` in the layers' plain products, `head` in the output head, `embedding`, and
    `others` (norms, experts, biases), which stay as they are."""

    linear: int
    head: int
    embedding: int
    others: int

    @property
    def total(self) -> int:
        return self.linear + self.head + self.embedding + self.others


def parameters(config: Mapping[str, Any], shape: Shape, num_parameters: int | None = None) -> Parameters:
    """Weights by kind. `num_parameters`: what the files hold, where they were read. Raises BudgetError."""
    if shape.model_type not in _DENSE | _SPARSE and num_parameters is None:
        raise BudgetError(
            f"{shape.model_type or 'this model'}: its weights can't be counted from config.json alone:"
            " give --model-dir with the safetensors files too"
        )
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    dense = 3 * shape.hidden * (config.get("intermediate_size") or 0)
    experts = 0
    if shape.model_type in _SPARSE:
        dense, experts = _sparse(config, shape)
    embedding = shape.vocab * shape.hidden
    linear, others = shape.layers * (attention + dense), shape.layers * (experts + 2 * shape.hidden)
    head = 0 if shape.tied else embedding
    if num_parameters is not None:
        others = max(0, num_parameters - linear - embedding - head)
    return Parameters(linear, head, embedding, others)


def _sparse(config: Mapping[str, Any], shape: Shape) -> tuple[int, int]:
    """A layer's plain products beside attention, and its experts."""
    num = config.get("num_local_experts") or config.get("num_experts")
    if not isinstance(num, int):
        raise BudgetError("config.json has no num_experts: give --model-dir with the safetensors files too")
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or 0
    return 3 * shape.hidden * shared, num * (3 * shape.hidden * width + shape.hidden)


def weight_bytes(counted: Parameters, shape: Shape, engine: Engine, accelerated: bool = False) -> int:
    """What weights occupy once they are laid out to compute.

    On a CPU a head that shares the embedding's weights is laid out a second time. Int8 keeps a byte for each
    weight of a plain product, and one product of each form converted.
    """
    size = DTYPE_BYTES[engine.dtype]
    kept = (counted.embedding + counted.others) * size
    head = counted.embedding
    if engine.int8:
        forms = head + 2 * shape.hidden * shape.ffn + 2 * shape.hidden * shape.heads * shape.head_dim
        return kept + counted.linear + head + forms * size
    packed = counted.head or (head if engine.dtype == "bfloat16" and not accelerated else 0)
    return kept + (counted.linear + packed) * size


def budget(
    config: Mapping[str, Any],
    engine: Engine,
    *,
    memory_bytes: int | None,
    num_parameters: int | None = None,
    accelerated: bool = False,
) -> Budget:
    """A replica's budget under a limit of `memory_bytes` (None: no limit). Raises BudgetError."""
    shape = shape_of(config)
    per_token = kv_bytes_per_token(shape, engine.dtype)
    weights = weight_bytes(parameters(config, shape, num_parameters), shape, engine, accelerated)
    context = CONTEXT_BYTES + TOKENIZER_BYTES * shape.vocab
    if engine.dtype != "float32":
        context += HALF_CONTEXT_BYTES
    activations = activation_bytes(shape, engine)
    num_blocks = engine.kv_cache_bytes // (per_token * engine.block_size)
    kv_tokens = num_blocks * engine.block_size
    reserve = 0 if memory_bytes is None else memory_bytes * RESERVE_PERCENT // 100
    kv_budget = None
    if memory_bytes is not None:
        left = memory_bytes - weights - context - activations - reserve
        kv_budget = max_kv_bytes(shape, engine, max(0, left))
    return Budget(
        per_token,
        weights,
        context,
        activations,
        workspace_bytes(shape, engine, kv_tokens),
        reserve,
        kv_tokens * per_token,
        num_blocks,
        kv_tokens,
        kv_budget,
    )


def max_kv_bytes(shape: Shape, engine: Engine, left: int) -> int:
    """The most KV that fits into `left` beside the workspace that grows with it, in whole blocks."""
    per_token = kv_bytes_per_token(shape, engine.dtype)
    most = workspace_bytes(shape, engine, engine.max_num_seqs * engine.max_model_len)
    # Either the workspace has its full size, or it is 15/8 of a layer's share of the KV.
    kv = max(left - most, left * shape.layers * 8 // (shape.layers * 8 + 15))
    block = per_token * engine.block_size
    return max(0, kv) // block * block


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Sequences of one length at once. `certain` have room up to their last token; blocks are taken as tokens
    come, so `typical` is what half-grown answers leave room for; both within `maxNumSeqs`."""

    certain: int
    typical: int


def concurrency(found: Budget, engine: Engine, num_prompt: int, num_output: int) -> Concurrency:
    """How many run at once. Raises BudgetError where one alone is too long."""
    longest = min(engine.max_model_len, found.kv_tokens)
    if num_prompt + num_output > longest:
        raise BudgetError(
            f"--prompt {num_prompt} and --output {num_output} are {num_prompt + num_output} tokens, and one"
            f" request may have {longest}: raise spec.engine.maxModelLen or kvCacheMemory"
        )

    def fit(num_tokens: int) -> int:
        return min(engine.max_num_seqs, found.num_blocks // -(-num_tokens // engine.block_size))

    return Concurrency(fit(num_prompt + num_output), fit(num_prompt + -(-num_output // 2)))
