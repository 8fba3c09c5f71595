"""What a request's new tokens are to its readers: text, up to the token that completes a stop string, and
log-probabilities.

Invariant: what is told of tokens, text and log-probabilities ends at the same token, whether a step had one
or, after right guesses, several.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice_runtime.engine.plan import TokenEvent
from sluice_runtime.engine.request import ActiveRequest
from sluice_runtime.engine.sampler import Sampled
from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import FinishReason, OutputChunk, PositionLogprobs, TokenLogprob


def told(
    active: ActiveRequest, event: TokenEvent, sampled: Sequence[Sampled], tokenizer: Tokenizer, now: float
) -> OutputChunk:
    """The chunk of a step, counted in `active`; of a last one `timing` is missing, and the text that is still
    held back. `sampled`: the event's tokens."""
    reason, num_tokens = event.finish_reason, len(event.token_ids)
    # The token that stops is no text.
    num_texts = num_tokens - (reason is FinishReason.STOP)
    text = ""
    for num, token_id in enumerate(event.token_ids[:num_texts], 1):
        text += active.detokenizer.push((token_id,))
        if active.detokenizer.stopped:
            reason, num_tokens, num_texts = FinishReason.STOP, num, num
            break
    logprobs = None
    if active.request.sampling.logprobs is not None:
        logprobs = _logprobs(sampled[:num_texts], tokenizer)
    active.tokens_arrived(now, num_tokens)
    # All but a step's last token were guessed; a stop string may have cut some of them off.
    active.num_accepted_tokens += min(num_tokens, len(event.token_ids) - 1)
    return OutputChunk(text, event.token_ids[:num_tokens], logprobs, reason)


def _logprobs(sampled: Sequence[Sampled], tokenizer: Tokenizer) -> tuple[PositionLogprobs, ...]:
    def named(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(
            token_id, tokenizer.token_text(token_id), logprob, tokenizer.token_bytes(token_id)
        )

    return tuple(
        PositionLogprobs(
            named(each.token_id, each.chosen_logprob), tuple(named(token_id, v) for token_id, v in each.top)
        )
        for each in sampled
        if each.chosen_logprob is not None
    )
