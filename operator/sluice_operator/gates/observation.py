"""One piece of evidence about one request, whoever saw it.

The pod's stream and the gateway's access log may both speak of a request, and a heartbeat may speak of it
while it still runs. They need not agree or come in order: the gates merge them by (request id, arm), so
that a request counts at most once for each guard. Example: the gateway sees a reset (failed), a second
later the pod's record of the same request arrives with a good time to first token; it stays one bad event.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ArmName(StrEnum):
    """Which arm served."""

    STABLE = "stable"
    CANDIDATE = "candidate"


class Observation(NamedTuple):
    """What was seen of a request, in the order in which it reached the operator.

    Timings should come from one source for both arms (the pods' records); the gateway's attempts then add
    what no pod lives to report: failures. Requests refused with a 4xx are not observations, except a pod's
    own "queue full", which is a failure of the arm.

    A tuple, since thousands are turned into columns at once: read field by field they would take longer to
    read than to judge.
    """

    time: float
    """Arrival at the operator, Unix seconds on the operator's clock."""
    request_id: str
    arm: ArmName
    age_s: float
    """Seconds from the start of the request to this observation; its total time if it has ended."""
    attempt: str = ""
    """Release attempt that the request was sent under; a candidate's observation of another attempt
    counts for nothing."""
    unit: str = ""
    """Hash of the conversation: what assignment to arms is random over. Empty: the request itself."""
    tenant: str = ""
    task: str = ""
    mirror: bool = False
    ttft_s: float | None = None
    """Arrival to first token, seconds; None: not measured."""
    verified_s: float | None = None
    """Arrival to the first of the answer that had passed its rule's contract, seconds; None: nothing has."""
    tpot_s: float | None = None
    """Mean seconds per output token after the first; None under two tokens."""
    jitter_s: float | None = None
    """95th percentile of the gaps between output tokens minus their median, seconds; None under 8 tokens."""
    total_s: float | None = None
    """Whole request, seconds; None: not measured or not ended."""
    busy_s: float | None = None
    """Seconds of the replica that it used: each step's time, shared among the sequences in it."""
    cost: float | None = None
    """Price of that, where the backend names one."""
    prompt_tokens: int = 0
    """Tokens read."""
    cached_tokens: int = 0
    """Of these, found in the prefix cache."""
    output_tokens: int = 0
    """Tokens written."""
    guessed_tokens: int = 0
    """Tokens guessed by speculative decoding."""
    accepted_tokens: int = 0
    """Of these, written."""
    failed: bool = False
    """5xx, reset, timeout, no pod, or the pod's queue full: bad for the error rate and slow for every
    latency guard."""
    cancelled: bool = False
    """The client left: neither an error nor a sample; slow where it had waited past the limit by then."""
    truncated: bool = False
    """The answer hit its length cap, so an incomplete form is no violation."""
    refused: bool = False
    """The model refused to do what was asked."""
    repeated: bool = False
    """The answer repeats a fragment over and over."""
    schema_failed: bool = False
    """The answer broke a JSON schema of its contract, hard or watched."""
    tool_failed: bool = False
    """A tool call's arguments did not validate."""
    interrupted: bool = False
    """It failed after its first byte: somebody has seen half an answer."""
    retried: bool = False
    """The gateway had to send it to another pod."""
    feedback: str = ""
    """What a person said of the answer afterwards: helpful, returned, follow_up or wrong. Such an observation
    says nothing else; its `age_s` goes back to the request."""
    censored: bool = False
    """Still running at `age_s` (heartbeats, and early records of a hard violation)."""
    first_token: bool = False
    """Whether a running request has shown its first token, so that its TTFT is no longer open."""
    hard_violations: tuple[str, ...] = ()
    """Names of hard checks that this answer broke."""
    pair: bool = False
    """A copy that was answered greedily to be compared: it counts for agreement and for nothing else."""
    digest: str = ""
    """Keyed digest of such an answer; equal text, equal digest within one attempt."""
