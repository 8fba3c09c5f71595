"""Plain data that the engine and its callers exchange; exists so that neither side imports the other's
machinery.

Invariant: nothing here imports torch, reads a clock or starts a thread. All times are seconds of
`time.monotonic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

MAX_TOP_LOGPROBS = 20
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class FinishReason(StrEnum):
    """Why a request ended. `STOP` covers end-of-sequence, stop ids and stop strings. `REFUSED`: it lost its
    place in the queue to another tenant's request before it had started (places.py)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    DEADLINE = "deadline"
    REFUSED = "refused"


class InvalidRequest(ValueError):
    """A request that can never run, found before anything was queued. `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLong(InvalidRequest):
    """Prompt plus `max_tokens` exceeds what one request may hold: the context, or the whole KV cache if that
    is less."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        param = "messages" if num_prompt_tokens >= max_model_len else "max_tokens"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the prompt, {max_tokens} in "
            "the completion). Please reduce the length of the prompt or max_tokens.",
            param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class QueueFull(Exception):
    """The bounded queue has no room. `num_waiting` is what stands in it; try again later (HTTP 429)."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"the engine's queue is full ({num_waiting} requests waiting)")
        self.num_waiting = num_waiting


class Matcher(Protocol):
    """One answer's place in its grammar. Belongs to the engine's thread."""

    def fill_mask(self, row: Any) -> None:
        """Write which tokens may come next into `row`: int32, bit i of word w for token 32 w + i."""

    def consume(self, token_id: int) -> None:
        """Go on past this token. Raises ValueError if the grammar does not allow it."""


class Grammar(Protocol):
    """What an answer may look like, compiled. May be shared by the choices of a request."""

    def matcher(self) -> Matcher: ...


class EngineStopped(Exception):
    """The engine was not started, was stopped, or its loop has died (HTTP 503)."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens for one request. The fields mean what OpenAI's of the same name mean.

    `temperature` 0 is greedy. `top_k` 0 and `min_p` 0 are off. `stop` strings never appear in the output.
    Presence and frequency penalties are taken off tokens of the output; `repetition_penalty` divides what
    speaks for a token of prompt or output (1 is off), as in transformers. `logprobs`: None for none, n for
    the chosen token and the n best (0 to 20). `stop_token_ids` end the output without being part of its text;
    they are counted as output tokens, like end-of-sequence.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    logprobs: int | None = None
    ignore_eos: bool = False

    def greedy(self) -> SamplingParams:
        """The same length, stops and bias, but always the likeliest token: two runs can be compared."""
        return replace(
            self,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=None,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
        )


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to generate.

    `scope` keys the prefix cache: requests of different scopes never share a block. The server derives it
    from who the caller is, never from the body. `prefix_cache=False` neither reads nor fills the cache.
    `grammar` leaves only tokens that it allows; it ends with end-of-sequence.
    `deadline` is in seconds of `time.monotonic`; past it the request ends with `FinishReason.DEADLINE`.
    `tenant` is whose share of the engine it uses, `weight` how large that share is beside others', and while
    `max_running` of the tenant's requests that have such a cap run, it waits. When KV is short, the lowest
    `priority` gives way first; it does not move a request in the queue. `task` is what it is for, as the
    gateway has checked; `speculation=False` lets nothing be guessed for it (speculation/). One that
    `keeps_place` never ends with `FinishReason.REFUSED`: it goes on with an answer that has begun.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    scope: str
    prefix_cache: bool = True
    deadline: float | None = None
    tenant: str = ""
    weight: float = 1.0
    max_running: int | None = None
    priority: int = 0
    grammar: Grammar | None = None
    task: str = ""
    speculation: bool = True
    keeps_place: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability: finite, natural log, at least -9999. `data` is the token's own
    bytes."""

    token_id: int
    token: str
    logprob: float
    data: bytes


@dataclass(frozen=True)
class PositionLogprobs:
    """Log-probabilities at one output position: the chosen token, and the best ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class RequestTiming:
    """Stage times of one request, in seconds, and its token counts.

    `queue_s`: submit to admission. `prefill_s`: admission to first token. `ttft_s`: submit to first token
    (their sum). `tpot_s`: mean time per output token after the first, None below two tokens. `max_itl_s`:
    longest gap between two output tokens, 0 below two. `jitter_s`: 95th percentile of these gaps minus their
    median, None under 8 tokens. `busy_s`: its share of the time of all steps that it was in, by its tokens
    among those of the step. A request that ended before a stage holds None for it. `num_guessed_tokens` were
    guessed and put to the test (speculation/); `num_accepted_tokens`, of these, are in its output.
    """

    queue_s: float | None
    prefill_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    max_itl_s: float
    total_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    jitter_s: float | None = None
    busy_s: float | None = None
    num_guessed_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True)
class OutputChunk:
    """What one engine step adds to a request.

    `text` is whole UTF-8 and may lag behind `token_ids` (characters cut across tokens and possible stop
    strings are held back), and may be empty. `logprobs` has one entry per token id (none for the id that ends
    an answer: it is no text), or is None if not asked for. The last chunk, and only that, has `finish_reason`
    and `timing`; it may hold text and tokens too. `error` is a short message for `FinishReason.ERROR`,
    without internals.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    timing: RequestTiming | None = None


class KvCacheDtype(StrEnum):
    """What pages of KV hold: the model's dtype, or 8 bits a value and a scale for each token of each head."""

    AUTO = "Auto"
    INT8 = "Int8"
    FP8 = "Fp8"


class SpeculationMethod(StrEnum):
    """Who guesses: the request's own text, or a draft model."""

    SUFFIX = "Suffix"
    DRAFT = "Draft"


MAX_GUESSES = 16


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: `num_tokens` is the most that is guessed for a step of a request. `always`: not
    only while it pays; for tests and measurements."""

    method: SpeculationMethod
    num_tokens: int = 4
    always: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= MAX_GUESSES:
            raise ValueError(f"speculation.num_tokens must be 1 to {MAX_GUESSES}")


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    Give `num_kv_blocks`, or `kv_cache_bytes`, or neither (what capacity.py says is left, at most what
    `max_num_seqs` full contexts need). `max_model_len` None takes the model's own. `max_batch_tokens` is the
    token budget of one step. `max_queue` bounds requests beyond the `max_num_seqs` that can run.
    `num_threads` None takes the cgroup's CPU quota, at least 1. `num_ranks` processes share model and KV
    (parallel.py): `kv_cache_bytes` is what all of them hold together; of each block each has its share.
    `kv_cache_dtype`: what pages hold (pages.py). `kv_offload_bytes` of host memory, of all ranks together,
    keep what the prefix cache evicts (host_tier.py); 0 is off.
    """

    max_num_seqs: int = 16
    max_batch_tokens: int = 512
    block_size: int = 16
    kv_cache_bytes: int | None = None
    num_kv_blocks: int | None = None
    max_model_len: int | None = None
    max_queue: int = 64
    num_threads: int | None = None
    device: str = "cpu"
    num_ranks: int = 1
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    kv_offload_bytes: int = 0
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_num_seqs < 1 or self.max_queue < 0:
            raise ValueError("block_size and max_num_seqs must be at least 1, max_queue at least 0")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                "max_batch_tokens must be at least max_num_seqs, or running requests would starve"
            )
        if self.kv_cache_bytes is not None and self.num_kv_blocks is not None:
            raise ValueError("give kv_cache_bytes or num_kv_blocks, not both")
        if self.kv_offload_bytes < 0:
            raise ValueError("kv_offload_bytes must be at least 0")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2")


@dataclass(frozen=True, slots=True)
class SpeculationLoad:
    """Counts since start. `drafted` and `right`: guesses put to the test, and right ones, by position.
    `num_stream_forwards`: times that the model looked at a running stream, which gave `num_stream_tokens`.
    `num_workloads_on`, `num_workloads_off`: where guessing proved faster, and where not (controller.py)."""

    drafted: tuple[int, ...]
    right: tuple[int, ...]
    num_stream_forwards: int
    num_stream_tokens: int
    num_workloads_on: int
    num_workloads_off: int

    @property
    def acceptance_rate(self) -> float | None:
        """Share of guesses that were right; None before the first."""
        return sum(self.right) / sum(self.drafted) if any(self.drafted) else None

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens that a stream gets from one look of the model: 1 without speculation."""
        return self.num_stream_tokens / self.num_stream_forwards if self.num_stream_forwards else None


@dataclass(frozen=True)
class EngineLoad:
    """A snapshot of what the engine carries, safe to take from any thread. Totals count since start."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    num_cached_blocks: int
    last_step_age_s: float
    tokens_per_s: float
    tokens_generated_total: int
    prompt_tokens_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    num_steps_total: int
    num_requests_total: int
    num_displaced_total: int = 0
    num_preemptions_total: int = 0
    num_recomputed_tokens_total: int = 0
    num_evictions_total: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    num_offloaded_blocks_total: int = 0
    num_restored_blocks_total: int = 0
    speculation: SpeculationLoad | None = None


@dataclass(frozen=True)
class RunningAge:
    """A request that has not ended: seconds since it was submitted, and whether its first token is out."""

    request_id: str
    age_s: float
    has_first_token: bool
