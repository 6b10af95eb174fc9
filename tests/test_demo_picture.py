"""The demo's timeline from chosen event lines: which bars it has, their times, and what is drawn."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle

from tierfall.core.types.values import CheckpointId
from tierfall.demo import picture
from tierfall.demo.process import Act, Line
from tierfall.demo.timeline import Bar, Kind, Process, Timeline, make_timeline

TIERS = ("host", "fast", "store")


def line(at_s: float, kind: str, step: int = 1, tier: str | None = None, **more: Any) -> Line:
    where = {} if tier is None else {"tier": tier}
    return {"wall_time_s": at_s, "kind": kind, "step": step, "attempt": 1, **where, **more}


def act_of(*lines: Line, began_s: float = 100.0, killed_s: float | None = None) -> Act:
    killed = killed_s is not None
    return Act(began_s=began_s, over_s=killed_s or 200.0, was_killed=killed, lines=list(lines))


def bars_of(
    act: Act, *, found: Collection[tuple[CheckpointId, str]] = ()
) -> list[tuple[str, Kind, int, float, float]]:
    bars = make_timeline([act], found=found).bars
    return [(bar.tier, bar.kind, bar.step, bar.begin_s, bar.end_s) for bar in bars]


# The data ---------------------------------------------------------------------------------------------


def test_a_bar_goes_from_the_beginning_of_a_capture_or_flush_to_its_end() -> None:
    act = act_of(
        line(101, "save_begun"),
        line(101.5, "flush_begun", tier="store"),
        line(102, "captured"),
        line(103, "committed", tier="store"),
        line(104, "flush_begun", 2, tier="fast"),
        line(105, "flush_failed", 2, tier="fast"),
        line(106, "flush_begun", 2, tier="fast"),
        line(107, "committed", 2, tier="fast"),
    )
    assert bars_of(act) == [
        ("host", Kind.CAPTURE, 1, 1.0, 2.0),
        ("store", Kind.FLUSH, 1, 1.5, 3.0),
        ("fast", Kind.FLUSH, 2, 6.0, 7.0),
    ]


def test_what_was_on_its_way_at_the_kill_is_cut_off_there_unless_it_was_found_whole() -> None:
    lines = line(102, "flush_begun", tier="fast"), line(103, "flush_begun", tier="store")
    killed = act_of(*lines, killed_s=104.0)
    cut = ("store", Kind.CUT, 1, 3.0, 4.0)
    assert bars_of(killed) == [("fast", Kind.CUT, 1, 2.0, 4.0), cut]
    found = {(CheckpointId(1, 1), "fast")}
    assert bars_of(killed, found=found) == [("fast", Kind.FLUSH, 1, 2.0, 4.0), cut]
    assert bars_of(act_of(*lines)) == []


def test_a_restore_stands_on_each_tier_that_it_read() -> None:
    act = act_of(line(103, "restored", 7, seconds=0.5, sources={"fast": 9, "store": 1}))
    assert bars_of(act) == [(tier, Kind.RESTORE, 7, 2.5, 3.0) for tier in ("fast", "store")]


def test_steps_lives_and_moments_are_counted_from_the_first_start() -> None:
    def step(at_s: float, loss: float) -> Line:
        return line(at_s, "step", loss=loss.hex())

    first = act_of(step(101, 2.5), step(102, 2.25), killed_s=103.0)
    again = act_of(step(111, 2.25), began_s=110.0)
    timeline = make_timeline([first, again], found=(), moments=[(150, "flood")])
    assert timeline.processes == (
        Process(begin_s=0.0, end_s=3.0, steps=((1.0, 2.5), (2.0, 2.25))),
        Process(begin_s=10.0, end_s=100.0, steps=((11.0, 2.25),)),
    )
    assert timeline.moments == ((3.0, "SIGKILL"), (50.0, "flood"))


# What is drawn ----------------------------------------------------------------------------------------

DRAWN = Timeline(
    tiers=TIERS,
    bars=(
        Bar(tier="host", kind=Kind.CAPTURE, step=1, begin_s=1.0, end_s=1.1),
        Bar(tier="store", kind=Kind.FLUSH, step=1, begin_s=1.0, end_s=4.0),
        Bar(tier="store", kind=Kind.CUT, step=2, begin_s=4.0, end_s=5.0),
        Bar(tier="fast", kind=Kind.RESTORE, step=1, begin_s=7.0, end_s=7.1),
    ),
    processes=(
        Process(begin_s=0.0, end_s=5.0, steps=((1.0, 3.0), (2.0, 2.0))),
        Process(begin_s=6.0, end_s=20.0, steps=()),
    ),
    moments=((5.0, "SIGKILL"),),
)


@pytest.fixture
def panels() -> tuple[Axes, Axes]:
    losses, lanes = picture.draw(DRAWN).axes
    return losses, lanes


def lane_names(lanes: Axes) -> dict[int, str]:
    labels = [label.get_text() for label in lanes.get_yticklabels()]
    return dict(zip(map(int, lanes.get_yticks()), labels, strict=True))


def test_picture_has_a_lane_for_the_training_and_one_for_each_tier_downwards(
    panels: tuple[Axes, Axes],
) -> None:
    _, lanes = panels
    assert lane_names(lanes) == {0: "training", 1: "host", 2: "fast", 3: "store"}
    bottom, top = lanes.get_ylim()
    assert bottom > top


def test_each_bar_is_drawn_in_its_lane_for_its_time(panels: tuple[Axes, Axes]) -> None:
    _, lanes = panels
    names = lane_names(lanes)
    drawn = []
    for container in lanes.containers:
        assert isinstance(container, BarContainer)
        for patch in container.patches:
            assert isinstance(patch, Rectangle)
            lane = names[round(patch.get_y() + patch.get_height() / 2)]
            begin_s, end_s = patch.get_x(), patch.get_x() + patch.get_width()
            drawn.append((lane, container.get_label(), round(begin_s, 6), round(end_s, 6)))
    bars = [(bar.tier, str(bar.kind), bar.begin_s, bar.end_s) for bar in DRAWN.bars]
    assert [one for one in drawn if one[0] != "training"] == bars
    assert [one[2:] for one in drawn if one[0] == "training"] == [(0.0, 5.0), (6.0, 20.0)]


def test_losses_steps_and_moments_stand_at_their_times(panels: tuple[Axes, Axes]) -> None:
    losses, lanes = panels
    curves = [curve.get_xydata().tolist() for curve in losses.lines]  # type: ignore[union-attr]
    assert [[1.0, 3.0], [2.0, 2.0]] in curves
    for axes in panels:
        assert [5.0, 5.0] in [list(curve.get_xdata()) for curve in axes.lines]
    assert "SIGKILL" in [text.get_text() for text in losses.texts]
    ticks = lanes.collections[0].get_paths()
    assert [path.vertices[0][0] for path in ticks] == [1.0, 2.0]


def test_wide_bars_and_every_restore_name_their_step(panels: tuple[Axes, Axes]) -> None:
    """A capture of a hundredth of the time is too narrow for a number; what was restored is always said."""
    _, lanes = panels
    assert sorted(text.get_text() for text in lanes.texts) == ["1", "1", "2"]


def test_only_what_is_there_is_explained(panels: tuple[Axes, Axes]) -> None:
    legend = panels[1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [str(kind) for kind in Kind]
    without = picture.draw(
        Timeline(tiers=TIERS, bars=DRAWN.bars[:2], processes=DRAWN.processes, moments=())
    )
    legend = without.axes[1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["capture", "flush"]
