"""The timeline, from times that a test chose: which bars it has, from when to when; and what of it is drawn."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle

from tierfall.demo import picture
from tierfall.demo.events import Ended, Event, Looked, Restored, Saved, Started, StepDone, TierNow
from tierfall.demo.stage import Act
from tierfall.demo.timeline import Bar, Kind, Moment, Process, Step, Timeline, make_timeline

TIERS = ("host", "fast", "store")


def tier(*whole: str, arriving: str | None = None) -> TierNow:
    return TierNow(whole=whole, arriving=arriving, arrived_bytes=0, moved_bytes=0)


def looked(time_s: float, **tiers: TierNow) -> Looked:
    return Looked(time_s=time_s, tiers=tiers)


def saved(checkpoint: str, began_s: float, captured_s: float | None, **durable_s: float) -> Saved:
    return Saved(checkpoint=checkpoint, began_s=began_s, captured_s=captured_s, durable_s=durable_s)


def step_done(step: int, time_s: float, loss: float) -> StepDone:
    return StepDone(step=step, loss=loss.hex(), seconds=0.1, time_s=time_s, tiers={}, totals=None)


def started(step: int, time_s: float, seconds: float, bytes_from: Mapping[str, int]) -> Started:
    restored = Restored(
        step=step,
        attempt=1,
        seconds=seconds,
        time_s=time_s,
        sources=tuple(("shard", tier, count) for tier, count in bytes_from.items()),
        fallbacks=(),
    )
    return Started(parameters=1, restored=restored, fingerprint="")


def act_of(*events: Event, began_s: float = 100.0, killed_s: float | None = None) -> Act:
    act = Act(began_s=began_s, over_s=200.0, killed_s=killed_s)
    for event in events:
        act.add(event)
    return act


def bars_of(
    act: Act, *, on: str, found: frozenset[tuple[str, str]] = frozenset()
) -> list[tuple[Kind, int, float, float]]:
    timeline = make_timeline(TIERS, [act], found=found)
    return [(bar.kind, bar.step, bar.begin_s, bar.end_s) for bar in timeline.bars if bar.tier == on]


# The data ---------------------------------------------------------------------------------------------


def test_a_capture_goes_from_the_call_of_save_until_it_is_sealed() -> None:
    act = act_of(looked(101), saved("1@1", 102, None), saved("1@1", 102, 0.25))
    assert bars_of(act, on="host") == [(Kind.CAPTURE, 1, 2.0, 2.25)]


def test_a_flush_begins_when_the_one_before_it_is_done() -> None:
    act = act_of(
        looked(101),
        saved("1@1", 102, 0.1, store=2.0),
        saved("2@1", 103, 0.1, store=2.5),
        saved("3@1", 108, 0.1, store=1.0),
    )
    assert bars_of(act, on="store") == [
        (Kind.FLUSH, 1, 2.0, 4.0),
        (Kind.FLUSH, 2, 4.0, 5.5),
        (Kind.FLUSH, 3, 8.0, 9.0),
    ]
    assert bars_of(act, on="fast") == []


def test_what_was_on_its_way_at_the_kill_is_cut_off_there() -> None:
    events = [
        looked(101),
        saved("1@1", 102, 0.5, fast=1.0),
        looked(103, store=tier(arriving="1@1"), fast=tier("1@1")),
    ]
    killed = act_of(*events, killed_s=104.0)
    assert bars_of(killed, on="store") == [(Kind.CUT, 1, 2.0, 4.0)]
    assert bars_of(killed, on="fast") == [(Kind.FLUSH, 1, 2.0, 3.0)]
    assert bars_of(act_of(*events), on="store") == []


def test_what_was_found_whole_after_the_kill_was_whole_by_then() -> None:
    act = act_of(
        looked(101),
        saved("1@1", 102, None),
        looked(103, fast=tier(arriving="1@1")),
        killed_s=104.0,
    )
    found = frozenset([("1@1", "host"), ("1@1", "fast"), ("0@1", "fast")])
    assert bars_of(act, on="host") == []
    assert bars_of(act, on="fast") == [(Kind.CUT, 1, 2.0, 4.0)]
    assert bars_of(act, on="host", found=found) == [(Kind.CAPTURE, 1, 2.0, 4.0)]
    assert bars_of(act, on="fast", found=found) == [(Kind.FLUSH, 1, 2.0, 4.0)]


def test_what_an_earlier_process_owed_is_brought_from_the_opening_on() -> None:
    """Nobody tells when such a copy is committed: it ends when it is first seen whole."""
    act = act_of(
        looked(101, store=tier("1@1", arriving="2@1")),
        looked(102, store=tier("1@1", arriving="2@1")),
        looked(103, store=tier("1@1", "2@1")),
        Ended(fingerprint="", time_s=104, tiers={"store": tier("1@1", "2@1")}, totals=None),
    )
    assert bars_of(act, on="store") == [(Kind.FLUSH, 2, 1.0, 3.0)]


def test_a_commit_is_as_exact_as_it_was_told_whatever_was_seen_later() -> None:
    act = act_of(
        looked(101),
        looked(105, store=tier("1@1")),
        saved("1@1", 102, 0.1, store=1.5),
    )
    assert bars_of(act, on="store") == [(Kind.FLUSH, 1, 2.0, 3.5)]


def test_a_restore_stands_on_each_tier_that_it_read() -> None:
    act = act_of(looked(101), started(7, 103, 0.5, {"fast": 9, "store": 1}))
    expected = [(Kind.RESTORE, 7, 2.5, 3.0)]
    assert bars_of(act, on="fast") == bars_of(act, on="store") == expected
    assert bars_of(act, on="host") == []


def test_steps_lives_and_moments_are_counted_from_the_first_start() -> None:
    first = act_of(step_done(1, 101, 2.5), step_done(2, 102, 2.25), killed_s=103.0)
    again = act_of(step_done(2, 111, 2.25), began_s=110.0)
    timeline = make_timeline(
        TIERS, [first, again], found=frozenset(), moments=[Moment(time_s=150, what="flood")]
    )
    assert timeline.processes == (
        Process(
            begin_s=0.0,
            end_s=3.0,
            steps=(Step(step=1, time_s=1, loss=2.5), Step(step=2, time_s=2, loss=2.25)),
        ),
        Process(begin_s=10.0, end_s=100.0, steps=(Step(step=2, time_s=11, loss=2.25),)),
    )
    assert timeline.moments == (
        Moment(time_s=3.0, what="SIGKILL"),
        Moment(time_s=50.0, what="flood"),
    )


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
        Process(
            begin_s=0.0,
            end_s=5.0,
            steps=(Step(step=1, time_s=1.0, loss=3.0), Step(step=2, time_s=2.0, loss=2.0)),
        ),
        Process(begin_s=6.0, end_s=20.0, steps=()),
    ),
    moments=(Moment(time_s=5.0, what="SIGKILL"),),
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
    curves = [line.get_xydata().tolist() for line in losses.lines]  # type: ignore[union-attr]
    assert [[1.0, 3.0], [2.0, 2.0]] in curves
    for axes in panels:
        assert [5.0, 5.0] in [list(line.get_xdata()) for line in axes.lines]
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
