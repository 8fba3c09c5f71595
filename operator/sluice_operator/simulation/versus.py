"""The same traces through several tools, side by side.

Invariant: every tool meets the same requests, with the same regression from the same second on; only the
weights, and so who is exposed, are its own. The peers need a fixed latency limit: they get a multiple of
stable's true p99 on such traffic, which is the best anybody could have configured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..api.routepolicy import Rule
from .campaign import Scenario, Tool, judge
from .drive import Pace
from .peers import (
    ARGO_DOCUMENTED,
    ARGO_FASTEST,
    ARGO_QUICK,
    FLAGGER_DOCUMENTED,
    FLAGGER_FASTEST,
    FLAGGER_QUICK,
    Argo,
    Flagger,
)
from .regression import Regression, regress
from .result import Result
from .summary import Summary, summarise
from .traffic import Traffic, make_trace

PEERS: Mapping[str, Flagger | Argo] = {
    "Flagger as documented": FLAGGER_DOCUMENTED,
    "Flagger every 10 s": FLAGGER_QUICK,
    "Flagger at its fastest": FLAGGER_FASTEST,
    "Argo as documented": ARGO_DOCUMENTED,
    "Argo every 10 s": ARGO_QUICK,
    "Argo at its fastest": ARGO_FASTEST,
}
HEADROOM = (1.2, 2.0)
"""Their limits over stable's p99: tight, which is our guards' tolerance, and loose."""

_CALM_S = 1200.0


@dataclass(frozen=True)
class Bout:
    """What is put through all of them."""

    traffic: Traffic
    seconds: float
    """As long as the slowest peer takes."""
    ours: Rule
    ours_s: float
    """How much of the trace our rollout can need."""
    regression: Regression
    seed: int

    def round(self, index: int) -> dict[str, Result]:
        """One trace, by tool."""
        trace = make_trace(self.traffic, self.seconds, self.seed, index)
        trace = regress(trace, self.regression, self.seed, index)
        pace = Pace(turn_s=2.0, exact=bool(self.regression.changes))
        found = {}
        for name, tool in self.tools().items():
            scenario = Scenario(self.traffic, self.seconds, tool, self.regression, pace)
            found[name] = judge(scenario, trace.until(self.ours_s) if isinstance(tool, Rule) else trace)
        return found

    def tools(self) -> dict[str, Tool]:
        """By name; a peer once for each limit."""
        calm = make_trace(self.traffic, _CALM_S, self.seed, 1_000_000)
        p99 = float(np.quantile(calm.stable.total, 0.99))
        found: dict[str, Tool] = {"Sluice": self.ours}
        for headroom in HEADROOM:
            for name, peer in PEERS.items():
                found[f"{name}, p99 ×{headroom:g}"] = replace(peer, max_duration_s=headroom * p99)
        return found


def by_tool(rounds: Sequence[Mapping[str, Result]], onset: float | None) -> dict[str, Summary]:
    """A summary for each tool."""
    return {name: summarise([one[name] for one in rounds], onset) for name in rounds[0]}
