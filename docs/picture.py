"""Draw the README's picture from a demo's timeline: ``make demo`` writes ``demo.json`` into the cache.

    python docs/picture.py demo.json docs/rollback.svg

Each dot is a request of the demo as its client saw it, by the arm that answered.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib import ticker

BEFORE, AFTER = 10, 12
"""Seconds shown before the first move and after the last."""


def main(source: Path, target: Path) -> None:
    """One SVG."""
    facts = json.loads(source.read_text())["facts"]["picture"]
    (began, _, _), (ended, _, why) = facts["moves"]
    mpl.rcParams |= {
        "svg.hashsalt": "sluice",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    figure, axes = plt.subplots(figsize=(8.2, 3.1), layout="constrained")
    for candidate, colour, label in ((False, "#4878a8", "stable"), (True, "#d1495b", "candidate")):
        dots = [
            (at - began, took)
            for at, took, arm in facts["samples"]
            if arm is candidate and began - BEFORE < at < ended + AFTER
        ]
        axes.scatter(*zip(*dots, strict=True), s=14, color=colour, label=label, zorder=3)
    axes.axvspan(0, ended - began, color="#d1495b", alpha=0.08, lw=0)
    axes.set(
        yscale="log",
        xlabel="seconds since the step began",
        ylabel="request, seconds",
        xlim=(-BEFORE, ended - began + AFTER),
    )
    axes.yaxis.set_major_locator(ticker.FixedLocator([0.3, 0.5, 1, 2, 3, 5, 10, 20]))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set_title(
        "A slow version gets 25 % of real traffic, and is rolled back by itself", loc="left", fontsize=10
    )
    axes.annotate(
        f"rolled back after {ended - began:.0f} s\n" + textwrap.fill(why, 42),
        (ended - began, axes.get_ylim()[1]),
        xytext=(6, -4),
        textcoords="offset points",
        va="top",
        fontsize=7.5,
    )
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
