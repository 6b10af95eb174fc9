"""Pictures of what a run found, next to its JSON: seconds of each system, and of whole training runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.figures import Results, spread
from benchmarks.peers.alone import series

OURS = "tierfall"
COLORS = {"durable": "#9db7d5", "training held": "#c0504d", "run": "#9db7d5", "ours": "#2f5f98"}
MISSING = "no plots: matplotlib is not installed (pip install 'tierfall[plot]')"


def write(results: Results, json: Path) -> list[Path]:
    """Draw what there is to draw, and return the files; needs matplotlib."""
    drawn = []
    if results.facts.get("systems"):
        drawn.append(_draw_systems(results, json.with_suffix(".systems.png")))
    if any(name.startswith("training.") for name in results.samples):
        drawn.append(_draw_training(results, json.with_suffix(".training.png")))
    return drawn


def available() -> bool:
    return find_spec("matplotlib") is not None


def _draw_systems(results: Results, path: Path) -> Path:
    systems: dict[str, str] = results.facts["systems"]
    names = list(systems.values())
    figure, axes = _canvas(len(names))
    for what, key, height in (("durable", "save", 0.7), ("training held", "step/held", 0.35)):
        spreads = [spread(results.samples[series(system, key)]) for system in systems]
        _bars(axes, names, spreads, height=height, color=COLORS[what], label=what)
    axes.legend(loc="lower right", frameon=False)
    gib = results.facts["peers_state_bytes"] / 2**30
    axes.set_title(f"One save of {gib:.1f} GiB: until durable, and how long it holds training")
    return _save(figure, path)


def _draw_training(results: Results, path: Path) -> Path:
    runs = {n.partition(".")[2]: v for n, v in results.samples.items() if n.startswith("training.")}
    names = sorted(runs, key=lambda name: spread(runs[name]).median)
    figure, axes = _canvas(len(names))
    for name in names:
        color = COLORS["ours" if name.startswith(OURS) else "run"]
        _bars(axes, [name], [spread(runs[name])], height=0.6, color=color, label=None)
    axes.set_title("Ten training steps with every save durable, in total")
    return _save(figure, path)


def _canvas(rows: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.4 * rows), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("seconds: median, with the least and the most")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.invert_yaxis()
    return figure, axes


def _bars(
    axes: Any, names: list[str], spreads: list[Any], *, height: float, color: str, label: str | None
) -> None:
    medians = [each.median for each in spreads]
    reach = [
        [each.median - each.low for each in spreads],
        [each.high - each.median for each in spreads],
    ]
    style = {"elinewidth": 1, "ecolor": "#444444"}
    axes.barh(names, medians, xerr=reach, height=height, color=color, label=label, error_kw=style)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path
