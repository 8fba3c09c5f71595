"""The plot of `sluice simulate`: how many rollouts have been stopped or promoted by when.

In the terminal with plotext; as SVG with matplotlib, which only development installs, so it is imported when
it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..simulation.result import Result

Line = tuple[list[float], list[float]]
"""Seconds, and percent of the runs."""


class PlotError(Exception):
    """It can't be drawn or written; the message says what is missing."""


def curves(found: Mapping[str, Sequence[Result]]) -> dict[str, Line]:
    """Cumulative percentages by name; what never happens has no line."""
    lines = {}
    longest = max((one.seconds for results in found.values() for one in results), default=0.0)
    for name, results in found.items():
        ends = {
            f"{name}: stopped": [one.seconds for one in results if one.stopped],
            f"{name}: promoted": [one.seconds for one in results if one.outcome == "promoted"],
        }
        for label, seconds in ends.items():
            if seconds:
                lines[label] = _steps(sorted(seconds), len(results), longest)
    return lines


def terminal_plot(lines: Mapping[str, Line], width: int = 90, height: int = 16) -> str:
    """As text, without colours."""
    if not lines:
        return ""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    for marker, (label, (seconds, percent)) in zip("*o+x", lines.items(), strict=False):
        figure.draw(figure.signal(seconds, percent, marker=marker).lines().label(label))
    figure.label("seconds since the start", "x")
    figure.label("% of rollouts", "y")
    return str(plotext.uncolorize(str(figure.build())))


def write_svg(lines: Mapping[str, Line], file: Path, onset: float | None) -> None:
    """Draws into `file`; a dashed line where the regression begins."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("--svg needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for label, (seconds, percent) in lines.items():
        axes.plot(seconds, percent, label=label)
    if onset is not None:
        axes.axvline(onset, linestyle="--", color="0.6", label="regression begins")
    axes.set(xlabel="seconds since the start", ylabel="% of rollouts", ylim=(0, 102), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(file, format="svg", metadata={"Date": None})
    except OSError as error:
        raise PlotError(f"--svg {file}: {error.strerror}") from None


def _steps(seconds: list[float], total: int, longest: float) -> Line:
    xs, ys = [0.0], [0.0]
    for num, second in enumerate(seconds, start=1):
        xs += [second, second]
        ys += [ys[-1], 100.0 * num / total]
    return [*xs, longest], [*ys, ys[-1]]
