"""The timeline as a picture: a lane for the training steps and one for each tier; below, the losses.

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


def draw(trainers: Sequence[Trainer], alone: Trainer) -> Figure:
    """Draw the four trainers over the same seconds, with what befell them; below, the losses of the first two on those
    of ``alone``, which trained without tierfall and without a kill."""
    figure = Figure(figsize=(9.0, 5.6), dpi=200, layout="constrained")
    axes, losses = figure.subplots(2, height_ratios=(5, 3))
    first, again, damaged, elsewhere = trainers
    zero_s, names = first.began_s, ("training", *TIERS)
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
    for what, time_s, side in (
        ("SIGKILL", first.over_s, "center"),
        ("byte flipped", damaged.began_s, "right"),  # away from the next one
        ("node lost", elsewhere.began_s, "left"),
    ):
        axes.axvline(time_s - zero_s, color=RED, linewidth=1.2)
        axes.text(time_s - zero_s, -0.6, what, ha=side, va="bottom", color=RED)
    axes.set_yticks(range(len(names)), labels=names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    colors = {"life of a process": LIGHT_GREY, "step": GREY, **COLORS}
    patches = [Patch(color=color, label=what) for what, color in colors.items()]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": len(patches)}
    axes.legend(handles=patches, frameon=False, handlelength=1.2, **below)
    runs = {
        "without tierfall and without a kill": (alone, "#f5cf7b", 5.0),
        "before the kill": (first, RED, 1.2),
        "after the restore": (again, COLORS["restore"], 1.2),
    }
    for label, (trainer, color, width) in runs.items():
        points = [(line["step"], float.fromhex(line["loss"])) for line in trainer.of("step")]
        losses.plot(*zip(*points, strict=True), color=color, linewidth=width, label=label)
    losses.set(xlabel="training step", ylabel="loss")
    losses.legend(frameon=False)
    return figure
