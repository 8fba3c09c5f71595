"""Whether a candidate is worse than stable, as evidence arrives: sequential guards and hard gates, pure and
without a clock.

The loop that uses them::

    gate = align(None, rule, status, now)                 # at start, from the checkpoint in status
    gate = fold(gate, observations)                       # as they arrive
    decision = decide(policy, rule, status, gate, world, now)
    gate = align(gate, rule, decision.status, now)        # follows stage, weight and restarts of evidence
"""

from .gate import align, belongs, checkpoint, deafen, fold, take_query, verdict
from .observation import ArmName, Observation
from .state import GateState, Verdict

__all__ = [
    "ArmName",
    "GateState",
    "Observation",
    "Verdict",
    "align",
    "belongs",
    "checkpoint",
    "deafen",
    "fold",
    "take_query",
    "verdict",
]
