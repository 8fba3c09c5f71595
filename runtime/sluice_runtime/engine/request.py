"""A request while the engine has it: what it may ask for, what has come out of it, and how long each stage
took.

Invariant: `validate` refuses everything that could fail later for reasons that lie in the request alone, so
the loop meets only requests that can run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice_runtime.engine.detokenizer import Detokenizer
from sluice_runtime.engine.jitter import Gaps
from sluice_runtime.engine.types import (
    MAX_TOP_LOGPROBS,
    EngineRequest,
    InvalidRequest,
    OutputChunk,
    RequestTiming,
    RequestTooLong,
)

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_REPETITION_PENALTY = 10


def validate(request: EngineRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise `InvalidRequest` (with `param`) or `RequestTooLong`. `vocab_size` is the model's, not the
    tokenizer's."""
    sampling = request.sampling
    for good, param, message in (
        (len(request.prompt_ids) > 0, "prompt", "the prompt is empty"),
        (sampling.max_tokens >= 1, "max_tokens", "max_tokens must be at least 1"),
        (
            math.isfinite(sampling.temperature) and sampling.temperature >= 0,
            "temperature",
            "must be at least 0",
        ),
        (0 < sampling.top_p <= 1, "top_p", "top_p must be above 0 and at most 1"),
        (sampling.top_k >= 0, "top_k", "top_k must be at least 0"),
        (0 <= sampling.min_p <= 1, "min_p", "min_p must be between 0 and 1"),
        (-2 <= sampling.presence_penalty <= 2, "presence_penalty", "must be between -2 and 2"),
        (-2 <= sampling.frequency_penalty <= 2, "frequency_penalty", "must be between -2 and 2"),
        (
            0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            "must be above 0 and at most 10",
        ),
        (
            sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_TOP_LOGPROBS,
            "logprobs",
            "must be 0 to 20",
        ),
        (len(sampling.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} stop strings"),
        (
            all(0 < len(s) <= MAX_STOP_LENGTH for s in sampling.stop),
            "stop",
            "a stop string is empty or too long",
        ),
        (all(0 <= t < vocab_size for t in sampling.logit_bias), "logit_bias", "a token id is out of range"),
        (
            all(-100 <= b <= 100 for b in sampling.logit_bias.values()),
            "logit_bias",
            "must be between -100 and 100",
        ),
        (
            request.grammar is None or not sampling.ignore_eos,
            "ignore_eos",
            "an answer of a given form ends by itself",
        ),
        (math.isfinite(request.weight) and request.weight > 0, "weight", "must be above 0"),
        (request.max_running is None or request.max_running >= 1, "max_running", "must be at least 1"),
        (min(request.prompt_ids, default=0) >= 0, "prompt", "a token id is out of range"),
        (max(request.prompt_ids, default=0) < vocab_size, "prompt", "a token id is out of range"),
    ):
        if not good:
            raise InvalidRequest(message if param in message else f"{param}: {message}", param)
    if len(request.prompt_ids) + sampling.max_tokens > max_model_len:
        raise RequestTooLong(len(request.prompt_ids), sampling.max_tokens, max_model_len)


@dataclass
class ActiveRequest:
    """The engine's side of a request. `deliver_to` receives its chunks on the asyncio loop `loop`."""

    request: EngineRequest
    detokenizer: Detokenizer
    loop: asyncio.AbstractEventLoop
    deliver_to: Callable[[OutputChunk], None]
    submitted_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    max_itl_s: float = 0.0
    gaps: Gaps = field(default_factory=Gaps)
    busy_s: float = 0.0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_guessed_tokens: int = 0
    num_accepted_tokens: int = 0

    def tokens_arrived(self, now: float, num: int) -> None:
        """Tokens of one step: no time passes between them."""
        for _ in range(num):
            self.num_output_tokens += 1
            if self.first_token_at is None:
                self.first_token_at = now
            elif self.last_token_at is not None:
                gap = now - self.last_token_at
                self.max_itl_s = max(self.max_itl_s, gap)
                self.gaps.add(gap)
            self.last_token_at = now

    def timing(self, now: float) -> RequestTiming:
        admitted, first, last = self.admitted_at, self.first_token_at, self.last_token_at
        tpot_s = None
        if first is not None and last is not None and self.num_output_tokens > 1:
            tpot_s = (last - first) / (self.num_output_tokens - 1)
        return RequestTiming(
            queue_s=None if admitted is None else admitted - self.submitted_at,
            prefill_s=None if first is None or admitted is None else first - admitted,
            ttft_s=None if first is None else first - self.submitted_at,
            tpot_s=tpot_s,
            max_itl_s=self.max_itl_s,
            total_s=now - self.submitted_at,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            jitter_s=self.gaps.jitter_s(),
            busy_s=None if admitted is None else self.busy_s,
            num_guessed_tokens=self.num_guessed_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )
