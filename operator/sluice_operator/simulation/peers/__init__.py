"""The rollout tools that people use today, on the same traffic: thresholds looked at once an interval.

Models written from documentation and from reading how the tools behave, not from their code. Each asks a
Prometheus that knows only what was scraped, and routes the same trace by its own weights.
"""

from .argo import ARGO_DOCUMENTED, ARGO_FASTEST, ARGO_QUICK, Argo
from .argo import run as run_argo
from .flagger import FLAGGER_DOCUMENTED, FLAGGER_FASTEST, FLAGGER_QUICK, Flagger
from .flagger import run as run_flagger

__all__ = [
    "ARGO_DOCUMENTED",
    "ARGO_FASTEST",
    "ARGO_QUICK",
    "FLAGGER_DOCUMENTED",
    "FLAGGER_FASTEST",
    "FLAGGER_QUICK",
    "Argo",
    "Flagger",
    "run_argo",
    "run_flagger",
]
