"""One piece of evidence about one request, whoever saw it.

The pod's stream and the gateway's access log may both speak of a request, and a heartbeat may speak of it
while it still runs. They need not agree or come in order: the gates merge them by (request id, arm), so
that a request counts at most once for each guard. Example: the gateway sees a reset (failed), a second
later the pod's record of the same request arrives with a good time to first token; it stays one bad event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ArmName(StrEnum):
    """Which arm served."""

    STABLE = "stable"
    CANDIDATE = "candidate"


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of a request, in the order in which it reached the operator.

    Timings should come from one source for both arms (the pods' records); the gateway's attempts then add
    what no pod lives to report: failures. Requests refused with a 4xx are not observations, except a pod's
    own "queue full", which is a failure of the arm.
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
    tpot_s: float | None = None
    """Mean seconds per output token after the first; None under two tokens."""
    total_s: float | None = None
    """Whole request, seconds; None: not measured or not ended."""
    failed: bool = False
    """5xx, reset, timeout, no pod, or the pod's queue full: bad for the error rate and slow for every
    latency guard."""
    cancelled: bool = False
    """The client left: neither an error nor a sample; slow where it had waited past the limit by then."""
    truncated: bool = False
    """The answer hit its length cap, so an incomplete form is no violation."""
    censored: bool = False
    """Still running at `age_s` (heartbeats, and early records of a hard violation)."""
    first_token: bool = False
    """Whether a running request has shown its first token, so that its TTFT is no longer open."""
    hard_violations: tuple[str, ...] = ()
    """Names of hard checks that this answer broke."""
