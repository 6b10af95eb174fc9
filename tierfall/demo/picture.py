"""The timeline as a picture: a lane for the training steps and one for each tier.

It needs matplotlib, and is imported only where that is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tierfall.demo.story import HOST, TIERS, Trainer

CUT = "flush cut off by the kill"
COLORS = {"capture": "#7f8fa6", "flush": "#3d7ab8", CUT: "#f2c1bd", "restore": "#2e9e5b"}
GREY, LIGHT_GREY, RED = "#444444", "#ececec", "#c0392b"
Bar = tuple[str, str, float, float]
"""A tier, what was done on it, from when, and to when."""


def bars_of(trainer: Trainer) -> Iterator[Bar]:
    """Yield a bar from each event that reports a begin to the one that reports its end, or to the kill."""
    begun: dict[tuple[str, int], float] = {}
    for line in trainer.lines:
        tier, now_s = line.get("tier", HOST), line["wall_time_s"]
        copy = tier, line.get("step", 0)
        match line["kind"]:
            case "save_begun" | "flush_begun":
                begun[copy] = now_s
            case "captured" | "committed" if copy in begun:
                what = "capture" if line["kind"] == "captured" else "flush"
                yield tier, what, begun.pop(copy), now_s
            case "restored":
                for source in line["sources"]:
                    yield source, "restore", now_s - line["seconds"], now_s
    for (tier, _), begin_s in begun.items():
        if trainer.was_killed and tier != HOST:
            yield tier, CUT, begin_s, trainer.over_s


def draw(trainers: Sequence[Trainer]) -> Figure:
    """Draw the four trainers over the same seconds, with what befell them."""
    figure = Figure(figsize=(9.0, 3.6), dpi=200, layout="constrained")
    axes, zero_s, names = figure.subplots(), trainers[0].began_s, ("training", *TIERS)
    for trainer in trainers:
        times = [line["wall_time_s"] - zero_s for line in trainer.of("step")]
        life_s = trainer.over_s - trainer.began_s
        axes.barh(0, life_s, left=trainer.began_s - zero_s, color=LIGHT_GREY)
        axes.vlines(times, -0.28, 0.28, color=GREY, linewidth=0.6)
        bars = sorted(bars_of(trainer), key=lambda bar: bar[1] == "restore")  # these above others
        for tier, what, begin_s, end_s in bars:
            lane, left_s, color = names.index(tier), begin_s - zero_s, COLORS[what]
            edge = RED if what == CUT else color
            axes.barh(lane, end_s - begin_s, 0.56, left_s, color=color, edgecolor=edge)
    first, _, damaged, elsewhere = trainers
    when = {
        "SIGKILL": first.over_s,
        "byte flipped": damaged.began_s,
        "node lost": elsewhere.began_s,
    }
    for what, time_s in when.items():
        axes.axvline(time_s - zero_s, color=RED, linewidth=1.2)
        axes.text(time_s - zero_s, -0.55, what, ha="center", color=RED)
    axes.set_yticks(range(len(names)), labels=names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    handles = [Patch(color=color, label=what) for what, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure
