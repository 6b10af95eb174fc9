"""What each tier gets, in which order, what is given up, and what is finished later."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.contract.faulty import Faulty
from tests.contract.kit import Place, restored, save_steps, state_of, wait_until
from tierfall.errors import CapacityError, FlushError

SOON_S = 20.0
SLOW = {"bandwidth": "10kB/s"}


def away(place: Place, tier: str) -> None:
    """The tier's folder is not there, as one that is not mounted."""
    (place.root / tier).rename(place.root / f"{tier}-away")


def back(place: Place, tier: str) -> None:
    (place.root / f"{tier}-away").rename(place.root / tier)


def in_order_of_commit(place: Place, tier: str) -> list[int]:
    """The steps of a tier in the order in which it got them."""
    folders = sorted(place.folders(tier), key=lambda f: (f / "commit.json").stat().st_mtime_ns)
    return [int(folder.name[5:13]) for folder in folders]


# Which checkpoints a tier gets -----------------------------------------------------------------------


def test_every_counts_the_saved_checkpoints_over_restarts(place: Place) -> None:
    place.config(disk={}, pfs={"flush": {"every": 3}})
    place.save(10, 20)
    with place.open() as ckpt:
        restored(ckpt)
        assert ckpt.save(30, state_of(30), block=True).tiers == ("disk", "pfs")
        assert ckpt.save(40, state_of(40), block=True).tiers == ("disk",)
    with place.open() as ckpt:
        restored(ckpt)
        save_steps(ckpt, 50, 60, 70)
    assert place.steps("disk") == [10, 20, 30, 40, 50, 60, 70]
    assert place.steps("pfs") == [30, 60]


def test_what_a_start_left_unfinished_the_next_one_finishes(place: Place) -> None:
    """By memory if it is there, else from the tier that has it; in their order."""
    place.config(disk={}, pfs={})
    place.save(1)
    place.config(disk={}, pfs=SLOW, max_wait="100ms")
    with place.open() as ckpt:
        restored(ckpt)
        for step in (2, 3):
            ckpt.save(step, state_of(step)).wait("disk", timeout=SOON_S)
        assert [c.owed for c in ckpt.checkpoints()] == [(), ("pfs",), ("pfs",)]
    assert place.steps("pfs") == [1]
    shutil.rmtree(place.memory / "run", ignore_errors=True)
    place.config(disk={}, pfs={})
    with place.open() as ckpt:
        assert restored(ckpt).step == 3
        assert ckpt.drain().left == ()
    assert in_order_of_commit(place, "pfs") == [1, 2, 3]


# Order -----------------------------------------------------------------------------------------------


def test_in_order_is_the_default_and_newest_first_begins_with_the_newest(
    place: Place, store: Faulty
) -> None:
    """Both get all of them."""
    for name, flush in (("a", {}), ("b", {"order": "newest_first"})):
        place.config(disk={}, store=store.tier(flush=flush), run=name)
        with place.open() as ckpt:
            ckpt.save(1, state_of(1), block=True)
            store.set("hang", "step-00000002", call="put")
            ckpt.save(2, state_of(2)).wait("disk", timeout=SOON_S)
            wait_until(lambda: store.struck("hang"), "the copy of step 2 has begun")
            handles = [ckpt.save(step, state_of(step)) for step in (3, 4, 5)]
            for handle in handles:
                handle.wait("disk", timeout=SOON_S)
            store.heal()
            for handle in handles:
                handle.wait("store", timeout=SOON_S)
        records = (store.folder / name).glob("step-*/commit.json")
        order = [
            int(p.parent.name[5:13]) for p in sorted(records, key=lambda p: p.stat().st_mtime_ns)
        ]
        assert order == ([1, 2, 5, 4, 3] if name == "b" else [1, 2, 3, 4, 5])


def test_newest_first_gives_up_what_retention_would_delete_at_once(
    place: Place, store: Faulty
) -> None:
    """Its handle raises a FlushError with the reason; that is no failure."""
    place.config(
        disk={},
        store=store.tier(flush={"order": "newest_first"}, retain={"last": 1}),
        on_error="raise",
    )
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        store.set("hang", "step-00000002", call="put")
        handles = {}
        for step in (2, 3, 4):
            handles[step] = ckpt.save(step, state_of(step))
            handles[step].wait("disk", timeout=SOON_S)
        store.heal()
        handles[4].wait("store", timeout=SOON_S)
        with pytest.raises(FlushError, match="store"):
            handles[3].wait("store", timeout=SOON_S)
        assert ckpt.statistics().given_up_copies["store"] >= 1
        ckpt.save(5, state_of(5), block=True)
    assert store.steps() == [5]
    assert place.steps("disk") == [1, 2, 3, 4, 5]


def test_a_tier_further_behind_than_within_is_reported_once_and_counted(
    place: Place, store: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    place.config(disk={}, store=store.tier(flush={"within": "300ms"}))
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        before = ckpt.statistics().late["store"]  # 0, unless this machine stood still
        store.set("hang", "step-00000002", call="put")
        ckpt.save(2, state_of(2)).wait("disk", timeout=SOON_S)
        wait_until(lambda: ckpt.statistics().late["store"] > before, "it is late")
        assert ckpt.statistics().behind_seconds["store"] > 0.3
        store.heal()
        assert ckpt.drain(deadline=SOON_S).left == ()
        assert ckpt.statistics().behind_seconds["store"] == 0
        assert ckpt.statistics().late["store"] == before + 1
    late = [r for r in caplog.records if "flush.within" in r.getMessage()]
    assert len(late) == before + 1
    assert "store" in late[0].getMessage()


# Memory that is full ---------------------------------------------------------------------------------


TWO = {"capacity": "400KiB"}
"""Room for two images."""


def test_supersede_gives_up_the_oldest_that_only_waits(place: Place, store: Faulty) -> None:
    """Neither the one that is being copied, nor a newer one that waits, too."""
    host = {"capacity": "800KiB", "when_full": "supersede"}
    place.config(host=host, store=store.tier())
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        store.set("hang", "step-00000002", call="put")
        handles = {2: ckpt.save(2, state_of(2))}
        wait_until(lambda: store.struck("hang"), "the copy of step 2 has begun")
        while not any(handle.outcome == "superseded" for handle in handles.values()):
            step = max(handles) + 1
            assert step < 12, "five images fit"
            handles[step] = ckpt.save(step, state_of(step))
        outcomes = {step: handle.outcome for step, handle in handles.items()}
        assert outcomes.pop(3) == "superseded"
        assert set(outcomes.values()) == {"pending"}
        assert len(outcomes) > 3
        for wait in (handles[3].wait, handles[3].captured):
            with pytest.raises(CapacityError, match=f"superseded by step {step}"):
                wait()
        store.heal()
        handles[step].wait(timeout=SOON_S)
        assert ckpt.statistics().superseded_saves == 1
    assert store.steps() == [1, 2, *range(4, step + 1)]


def test_a_tiers_own_when_full_gives_up_copies_to_it_alone(place: Place, store: Faulty) -> None:
    """The other tier gets all of them."""
    place.config(host=TWO, disk={}, store=store.tier(when_full="supersede"))
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        store.set("hang", "step-00000002", call="put")
        ckpt.save(2, state_of(2)).wait("disk", timeout=SOON_S)
        wait_until(lambda: store.struck("hang"), "the copy of step 2 has begun")
        for step in range(3, 8):
            ckpt.save(step, state_of(step)).wait("disk", timeout=SOON_S)
        store.heal()
        assert ckpt.drain(deadline=SOON_S).left == ()
    assert place.steps("disk") == list(range(1, 8))
    assert store.steps()[-1] == 7


# A tier that fails -----------------------------------------------------------------------------------


def test_a_tier_that_fails_holds_up_neither_training_nor_other_tiers(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported, counted and retried; once it works it gets all that it is owed."""
    place.config(disk={}, pfs={})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        away(place, "pfs")
        for step in (2, 3):
            ckpt.save(step, state_of(step)).wait("disk", timeout=SOON_S)
        wait_until(lambda: any(ckpt.statistics().flush_failures.values()), "it is counted")
        wait_until(lambda: "pfs" in caplog.text, "it is logged")
        back(place, "pfs")
        assert ckpt.drain(deadline=SOON_S).left == ()
    assert place.steps("pfs") == [1, 2, 3]


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_a_step_that_cannot_be_written_keeps_no_other_from_the_tier(
    place: Place, obstacle: str
) -> None:
    """Its copy is left to the next start, which makes it once the obstacle is gone."""
    place.config(disk={}, pfs={})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        there = place.root / "pfs/run/step-00000002-a0001"
        if obstacle == "file":
            there.write_text("mine")
        else:
            (place.root / "elsewhere").mkdir()
            there.symlink_to(place.root / "elsewhere")
        second = ckpt.save(2, state_of(2))
        for step in range(3, 6):
            ckpt.save(step, state_of(step)).wait("pfs", timeout=SOON_S)
        with pytest.raises(FlushError):
            second.wait("pfs", timeout=SOON_S)
        wait_until(lambda: sum(ckpt.statistics().set_aside_copies.values()) == 1, "it is set aside")
        assert "pfs" in ckpt.checkpoints()[1].set_aside
    if obstacle == "file":
        assert there.read_text() == "mine"
    else:
        assert list((place.root / "elsewhere").iterdir()) == []
    there.unlink()
    with place.open() as ckpt:
        assert restored(ckpt).step == 5
        assert ckpt.drain(deadline=SOON_S).left == ()
    assert place.steps("pfs") == [1, 2, 3, 4, 5]


# The end ---------------------------------------------------------------------------------------------


def test_a_drain_forecasts_what_can_arrive_before_its_deadline(place: Place) -> None:
    place.config(disk={}, pfs={"bandwidth": "100kB/s"}, max_wait="300ms")
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2, elements=400_000)).wait("disk", timeout=SOON_S)
        report = ckpt.drain(deadline=0.3)
        assert report.left == ((2, 1, "pfs"),)
        assert report.seconds < 10
        (forecast,) = [f for f in report.forecast if f.tier == "pfs"]
        assert (forecast.step, forecast.attempt, forecast.arrives) == (2, 1, False)
        assert forecast.left_bytes > 1_000_000


def test_close_waits_for_max_wait_and_leaves_the_rest_in_memory(
    place: Place, store: Faulty
) -> None:
    """``tierfall drain`` brings it to its tier, and frees the memory."""
    disk = {"flush": {"every": 2}}
    place.config(disk=disk, store=store.tier(), max_wait="300ms")
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        store.set("refuse")
        for step in (2, 3, 4):
            handle = ckpt.save(step, state_of(step))
            handle.captured(timeout=SOON_S)
        handle.wait("disk", timeout=SOON_S)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert place.ls()["3@1"] == {"host": "sealed"}, "also what is older than what the disk has"
    assert place.json("drain", "--deadline", "100ms", code=1)["problems"]
    store.heal()
    place.json("drain")
    assert store.steps() == [1, 2, 3, 4]
    assert "host" not in place.ls()["3@1"]
    assert not [p for p in Path(place.memory).rglob("*") if p.stat().st_size > 100_000]


def test_close_tries_a_tier_once_more_that_was_failing(place: Place, store: Faulty) -> None:
    place.config(store=store.tier())
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        store.set("refuse")
        handle = ckpt.save(2, state_of(2))
        wait_until(lambda: any(ckpt.statistics().flush_failures.values()), "it fails")
        assert not handle.done()
        store.heal()
    assert store.steps() == [1, 2]
