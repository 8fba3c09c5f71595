"""What a replica's memory goes to, from config.json and the engine's settings, before anything is applied.

    limit   ┃ weights ┃ context ┃ activations ┃ workspace ┃ reserve ┃ ← what is left is the KV budget

The runtime computes activations, workspace and KV by the same formulas from what it has loaded, and refuses
to start beyond them; `docs/contracts/budget.json` holds examples that both sides are tested on. By hand:
SmolLM2-135M has 30 layers of 3 KV heads of 64: a token is 30 × 3 × (64 + 64) × 2 = 23,040 bytes of bfloat16.

Pure. All sizes are bytes. What can't be told from the configuration is a `BudgetError`, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .stored import stored_form

MI = 2**20
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

CONTEXT_BYTES = 434 * MI
"""Interpreter, torch and transformers before any weight, on a CPU; measured (docs/engine-scheduling.md)."""
HALF_CONTEXT_BYTES = 30 * MI
"""What half precision adds: between what our own kernels take (14 MiB) and what torch's do (46)."""
TOKENIZER_BYTES = 1024
"""For each entry of the vocabulary."""
DRAFT_TOKENIZER_BYTES = 512
"""The same of a draft's: a second tokenizer in a process takes 450 (measured)."""
RESERVE_PERCENT = 5
SCALE_BYTES = 2
"""Of the scale that each key and each value of a KV head has where KV is quantised to a byte."""
INT4_GROUP = 32
"""Weights of 4 bits that share a scale and an offset, where quantised at load."""
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
    """Settings that memory follows from; as in backend.json. `stored`: bits and group of weights that are
    quantised in their files."""

    dtype: str
    quantization: str
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    block_size: int
    kv_cache_bytes: int
    tensor_parallel: int = 1
    kv_cache_dtype: str = "Auto"
    stored: tuple[int, int] | None = None
    kv_offload_bytes: int = 0
    num_guesses: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """The model that guesses for a replica's: its config.json, and what its files hold, where they were
    read."""

    config: Mapping[str, Any]
    num_parameters: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A causal decoder's sizes. `ffn` is the widest that one token's feed-forward part becomes. `draft`: of
    the model that guesses for this one, whose KV holds the same tokens in as many blocks."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    draft: Shape | None = None

    def of_rank(self, num_ranks: int) -> Shape:
        """What one of `num_ranks` processes computes. Raises BudgetError where they can't share alike."""
        wrong = {"heads": self.heads, "key/value heads": self.kv_heads, "feed-forward width": self.ffn}
        for name, size in wrong.items():
            if size % num_ranks:
                raise BudgetError(
                    f"spec.engine.tensorParallel {num_ranks} does not divide this model's {size} {name}: give"
                    " another number"
                )
        heads, kv_heads = self.heads // num_ranks, self.kv_heads // num_ranks
        return replace(self, heads=heads, kv_heads=kv_heads, ffn=self.ffn // num_ranks)


@dataclass(frozen=True, slots=True)
class Budget:
    """Where a replica's bytes go, or each rank's where several share it. `kv_budget` is the most that its KV
    may be, None where no limit is known; `num_blocks` and `kv_tokens` follow from what it is. `host_pool`
    keeps what the prefix cache evicts; 0 where it is not of this memory, but of an accelerator's host.
    `draft_weights` are among `weights`, and a draft's KV in `bytes_per_token` and `kv_cache`."""

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
    host_pool: int = 0
    draft_weights: int = 0

    @property
    def total(self) -> int:
        """What the replica occupies at its worst, the reserve aside."""
        steady = self.weights + self.context + self.kv_cache + self.host_pool
        return steady + self.activations + self.workspace

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


def kv_bytes_per_token(shape: Shape, dtype: str, kv_cache_dtype: str = "Auto") -> int:
    """KV of one token in all layers, the draft's too."""
    draft = 0 if shape.draft is None else kv_bytes_per_token(shape.draft, dtype, kv_cache_dtype)
    return _own_per_token(shape, dtype, kv_cache_dtype) + draft


def _own_per_token(shape: Shape, dtype: str, kv_cache_dtype: str = "Auto") -> int:
    per_head = shape.head_dim * DTYPE_BYTES[dtype]
    if kv_cache_dtype != "Auto":
        per_head = shape.head_dim + SCALE_BYTES
    return shape.layers * 2 * shape.kv_heads * per_head


def _gathered_per_token(shape: Shape, engine: Engine) -> int:
    """What gathering a token of each own layer takes: quantised pages as they are, and then decoded."""
    stored = 0
    if engine.kv_cache_dtype != "Auto":
        stored = _own_per_token(shape, engine.dtype, engine.kv_cache_dtype)
    return _own_per_token(shape, engine.dtype) + stored


def activation_bytes(shape: Shape, engine: Engine) -> int:
    """The most that one step holds beside KV: a layer's intermediate values of every token, scores of a tile
    of a prompt's queries, and logits of every sequence, also in float32. A draft runs before its model, not
    beside it."""
    if shape.draft is not None:
        guessing = activation_bytes(shape.draft, replace(engine, num_guesses=0))
        return max(guessing, activation_bytes(replace(shape, draft=None), engine))
    size, tokens = DTYPE_BYTES[engine.dtype], engine.max_batch_tokens
    width = 4 * shape.hidden + 3 * shape.ffn + 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    scores = 2 * shape.heads * min(TILE, tokens) * engine.max_model_len
    # Each guess of speculative decoding is one more row.
    rows = min(engine.max_num_seqs * (1 + engine.num_guesses), max(tokens, engine.max_num_seqs))
    logits = rows * shape.vocab * (size + 4)
    return (tokens * width + scores) * size + logits


def workspace_bytes(shape: Shape, engine: Engine, kv_tokens: int) -> int:
    """Pages of one layer, gathered for attention: the context of all that run, half as much again for
    padding, a quarter for growth. A draft keeps its own."""
    tokens = min(engine.max_num_seqs * engine.max_model_len, kv_tokens)
    own = tokens * _gathered_per_token(shape, engine) // shape.layers * 15 // 8
    return own + (0 if shape.draft is None else workspace_bytes(shape.draft, engine, kv_tokens))


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


def parameters(
    config: Mapping[str, Any], shape: Shape, num_parameters: int | None = None, *, packed: bool = False
) -> Parameters:
    """Weights by kind. `num_parameters`: what the files hold, where they were read; of `packed` files that
    is a number of words, several weights each, and says nothing. Raises BudgetError."""
    known = shape.model_type in _DENSE | _SPARSE
    if packed and not known:
        raise BudgetError(f"{shape.model_type or 'this model'}: its weights are packed, and can't be counted")
    if packed:
        num_parameters = None
    if not known and num_parameters is None:
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

    On a CPU a head that shares the embedding's weights is laid out a second time. Int8 and W8A8 keep a byte
    for each weight of a plain product, Int4 half of one, and scale and offset for each group; its head is
    Int8.
    """
    size = DTYPE_BYTES[engine.dtype]
    if engine.tensor_parallel > 1:
        # Nothing is laid out anew. Norms are whole on each rank, but a sparse model's others are its experts.
        shared = counted.others if shape.model_type in _SPARSE else 0
        split = counted.total - counted.others + shared
        return (split // engine.tensor_parallel + counted.others - shared) * size
    kept = (counted.embedding + counted.others) * size
    head = counted.embedding
    if engine.quantization in ("Int8", "W8A8"):
        return kept + counted.linear + head
    if engine.quantization == "Int4":
        return kept + _grouped_bytes(counted.linear, 4, INT4_GROUP, size) + head
    packed = counted.head or (head if engine.dtype == "bfloat16" and not accelerated else 0)
    if engine.stored is not None:
        return kept + _grouped_bytes(counted.linear, *engine.stored, size) + packed * size
    return kept + (counted.linear + packed) * size


def _grouped_bytes(num: int, bits: int, group: int, size: int) -> int:
    """Weights of `bits` bits, of which each `group` shares a scale and an offset of `size` bytes; a group of
    0 is all inputs, whose scales are not counted."""
    return num * bits // 8 + (num * 2 * size // group if group else 0)


def _stored(config: Mapping[str, Any]) -> tuple[int, int] | None:
    try:
        return stored_form(config)
    except ValueError as error:
        raise BudgetError(str(error)) from None


def _check_stored(engine: Engine) -> None:
    """Refuses what would quantise twice, or split what is known only whole, as the runtime does."""
    if engine.stored is None:
        return
    for field, value, only in (
        ("quantization", engine.quantization, "None"),
        ("tensorParallel", engine.tensor_parallel, 1),
    ):
        if value != only:
            raise BudgetError(f"spec.engine.{field} must be {only}: the weights are quantised in their files")


def budget(
    config: Mapping[str, Any],
    engine: Engine,
    *,
    memory_bytes: int | None,
    num_parameters: int | None = None,
    accelerated: bool = False,
    draft: Draft | None = None,
) -> Budget:
    """A replica's budget under a limit of `memory_bytes` (None: no limit): of each rank, where there are
    several. On an accelerator the limit is that of one; on a CPU the ranks share it. Raises BudgetError."""
    whole, num_ranks = shape_of(config), engine.tensor_parallel
    engine = replace(engine, stored=_stored(config))
    _check_stored(engine)
    counted = parameters(config, whole, num_parameters, packed=engine.stored is not None)
    weights = weight_bytes(counted, whole, engine, accelerated)
    shape = whole.of_rank(num_ranks)
    draft_weights = draft_vocab = 0
    if draft is not None:
        guessing, draft_weights = _drafting(draft, engine, accelerated)
        shape, draft_vocab = replace(shape, draft=guessing), guessing.vocab
    per_token = kv_bytes_per_token(shape, engine.dtype, engine.kv_cache_dtype)
    if memory_bytes is not None and not accelerated:
        memory_bytes //= num_ranks
    weights += draft_weights
    context = CONTEXT_BYTES + TOKENIZER_BYTES * shape.vocab + DRAFT_TOKENIZER_BYTES * draft_vocab
    if engine.dtype != "float32":
        context += HALF_CONTEXT_BYTES
    activations = activation_bytes(shape, engine)
    num_blocks = engine.kv_cache_bytes // num_ranks // (per_token * engine.block_size)
    kv_tokens = num_blocks * engine.block_size
    reserve = 0 if memory_bytes is None else memory_bytes * RESERVE_PERCENT // 100
    host_pool = 0 if accelerated else engine.kv_offload_bytes // num_ranks
    kv_budget = None
    if memory_bytes is not None:
        left = memory_bytes - weights - context - activations - reserve - host_pool
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
        host_pool,
        draft_weights,
    )


def _drafting(draft: Draft, engine: Engine, accelerated: bool) -> tuple[Shape, int]:
    """A draft's shape and weights: of its model's dtype, and as its files are. Raises BudgetError."""
    if engine.tensor_parallel > 1:
        raise BudgetError("spec.engine.speculation.method Draft does not go with tensorParallel above 1")
    try:
        shape = shape_of(draft.config)
        as_stored = replace(engine, quantization="None", stored=_stored(draft.config))
        packed = as_stored.stored is not None
        counted = parameters(draft.config, shape, draft.num_parameters, packed=packed)
    except BudgetError as error:
        told = str(error).replace("--model-dir", "--draft-dir")
        raise BudgetError(f"spec.engine.speculation.draft: {told}") from None
    return shape, weight_bytes(counted, shape, as_stored, accelerated)


def max_kv_bytes(shape: Shape, engine: Engine, left: int) -> int:
    """The most KV that fits into `left` beside the workspace that grows with it, in whole blocks."""
    per_token = kv_bytes_per_token(shape, engine.dtype, engine.kv_cache_dtype)
    most = workspace_bytes(shape, engine, engine.max_num_seqs * engine.max_model_len)
    # Either the workspace has its full size, or it is 15/8 of what a layer's share of the KV becomes.
    num_layers, gathered = shape.layers, _gathered_per_token(shape, engine)
    if shape.draft is not None:
        gathered = gathered * shape.draft.layers + _gathered_per_token(shape.draft, engine) * num_layers
        num_layers *= shape.draft.layers
    kv_share, workspace_share = num_layers * 8 * per_token, 15 * gathered
    kv = max(left - most, left * kv_share // (kv_share + workspace_share))
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
