"""The timeline as a picture: losses above, and below them a row for the training steps and one for each tier.

It only draws the data of ``timeline``. It needs matplotlib, and is imported only where that is installed.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tierfall.demo.timeline import Bar, Kind, Timeline

INCHES = (9.0, 4.4)
DOTS_PER_INCH = 200
TRAINING = "training"
HEIGHT = 0.56
COLORS = {
    Kind.CAPTURE: "#7f8fa6",
    Kind.FLUSH: "#3d7ab8",
    Kind.CUT: "#f2c1bd",
    Kind.RESTORE: "#2e9e5b",
}
EDGES = {**COLORS, Kind.FLUSH: "#234f7d", Kind.CUT: "#c0392b"}
LOSS_COLOR, STEP_COLOR, LIFE_COLOR, MOMENT_COLOR = "#444444", "#555555", "#ececec", "#c0392b"
LABEL_SHARE = 0.012
"""A bar shorter than this share of the time has no step number, unless it is a restore."""


def write_picture(timeline: Timeline, path: Path) -> None:
    """Write the picture as PNG. Raises OSError where the file cannot be written."""
    draw(timeline).savefig(path, format="png", dpi=DOTS_PER_INCH)


def draw(timeline: Timeline) -> Figure:
    """Draw losses and lanes, one below the other, over the same seconds."""
    figure = Figure(figsize=INCHES, layout="constrained")
    losses, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.6))
    end_s = max(process.end_s for process in timeline.processes)
    lanes.set_xlim(-0.01 * end_s, 1.01 * end_s)
    _draw_losses(losses, timeline)
    _draw_lanes(lanes, timeline, end_s)
    for time_s, what in timeline.moments:
        for axes in (losses, lanes):
            axes.axvline(time_s, color=MOMENT_COLOR, linewidth=1.2)
        losses.annotate(
            what,
            (time_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            color=MOMENT_COLOR,
            fontsize=8,
        )
    return figure


def _draw_losses(axes: Axes, timeline: Timeline) -> None:
    for process in timeline.processes:
        axes.plot(
            [time_s for time_s, _ in process.steps],
            [loss for _, loss in process.steps],
            color=LOSS_COLOR,
            linewidth=1.0,
        )
    axes.set_ylabel("loss", fontsize=9)
    axes.tick_params(labelsize=8)
    _unframe(axes)


def _draw_lanes(axes: Axes, timeline: Timeline, end_s: float) -> None:
    names = (TRAINING, *timeline.tiers)
    _draw_training(axes, timeline)
    for bar in timeline.bars:
        _draw_bar(axes, bar, names.index(bar.tier), end_s)
    axes.set_yticks(range(len(names)), labels=names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("seconds", fontsize=9)
    axes.tick_params(labelsize=8, axis="x")
    axes.tick_params(length=0, axis="y")
    used = [kind for kind in Kind if any(bar.kind is kind for bar in timeline.bars)]
    axes.legend(
        handles=[Patch(color=COLORS[kind], label=str(kind)) for kind in used],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.22),
        ncols=len(used),
        frameon=False,
        fontsize=8,
    )
    _unframe(axes)


def _draw_training(axes: Axes, timeline: Timeline) -> None:
    """Show each process as a band, and each step as a tick."""
    for process in timeline.processes:
        axes.barh(
            0,
            process.end_s - process.begin_s,
            left=process.begin_s,
            height=0.8,
            color=LIFE_COLOR,
            edgecolor="white",
            linewidth=2.0,
        )
        times = [time_s for time_s, _ in process.steps]
        axes.vlines(times, -HEIGHT / 2, HEIGHT / 2, color=STEP_COLOR, linewidth=0.6)


def _draw_bar(axes: Axes, bar: Bar, lane: int, end_s: float) -> None:
    width_s = bar.end_s - bar.begin_s
    color = COLORS[bar.kind]
    axes.barh(
        lane,
        width_s,
        left=bar.begin_s,
        height=HEIGHT,
        color=color,
        edgecolor=EDGES[bar.kind],
        linewidth=0.8,
        label=str(bar.kind),
    )
    if bar.kind is Kind.RESTORE or width_s >= LABEL_SHARE * end_s:
        axes.annotate(
            str(bar.step),
            # What follows a restore at once has its own number.
            (bar.begin_s + width_s / (1 if bar.kind is Kind.RESTORE else 2), lane - HEIGHT / 2),
            xytext=(0, 1),
            textcoords="offset points",
            ha="right" if bar.kind is Kind.RESTORE else "center",
            va="bottom",
            fontsize=7,
            color=color if bar.kind is Kind.RESTORE else STEP_COLOR,
        )


def _unframe(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
