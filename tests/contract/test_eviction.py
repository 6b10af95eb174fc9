"""What a tier deletes if its capacity, or its disk, is short; what it never deletes; what memory evicts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.faulty import Faulty
from tests.contract.kit import Place, save_steps, state_of, wait_until
from tierfall.errors import CapacityError

SOON_S = 20.0
THREE = {"capacity": "480KiB"}
"""Room for three checkpoints of ``state_of``."""


# Which go first --------------------------------------------------------------------------------------


def test_the_oldest_makes_room_for_the_next(place: Place) -> None:
    place.config(disk=THREE)
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2, 3)
        assert place.steps() == [1, 2, 3]
        save_steps(ckpt, 4)
        assert place.steps() == [2, 3, 4]
        assert sum(ckpt.statistics().deleted_copies.values()) == 1


def test_watermarks_make_room_in_few_rounds(place: Place) -> None:
    """Above 90 % of ten images, deletions down to 50 %."""
    place.config(disk={"capacity": "1460KiB", "evict": {"high": "90%", "low": "50%"}})
    held = []
    with place.open() as ckpt:
        for step in range(1, 16):
            save_steps(ckpt, step)
            held.append(len(place.folders()))
    drops = [a - b for a, b in pairwise(held) if b < a]
    assert drops
    assert all(drop >= 2 for drop in drops)
    assert max(held) <= 9
    assert place.steps()[-1] == 15


def test_a_full_tier_deletes_what_a_rule_would_keep_if_nothing_else_is_left(place: Place) -> None:
    place.config(disk={**THREE, "retain": {"last": 10}})
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2, 3, 4, 5)
    assert place.steps() == [3, 4, 5]


def test_what_no_rule_keeps_makes_room_before_what_one_keeps(place: Place, store: Faulty) -> None:
    """Nothing else has deleted step 2 yet: a deletion first reads what is decided, which the store holds up."""
    rules = {**THREE, "retain": {"tags": ["keep"]}}
    place.config(store=store.tier(**rules))
    with place.open() as ckpt:
        save_steps(ckpt, 1, tags=["keep"])
        save_steps(ckpt, 2)
        store.set("hang", "decided", call="list")
        save_steps(ckpt, 3)
        assert store.steps() == [1, 2, 3]
        last = ckpt.save(4, state_of(4))
        store.heal()
        last.wait("store", SOON_S)
    assert store.steps() == [1, 4]


def test_cheapest_deletes_first_what_another_tier_has_as_safely_and_oldest_the_oldest(
    place: Place,
) -> None:
    """Step 1 is on this tier alone; the other has all later ones."""
    for order, wanted in (("cheapest", [1, 4, 5]), ("oldest", [3, 4, 5])):
        a = {**THREE, "path": str(place.root / order), "evict": {"order": order}}
        b = {"path": str(place.root / f"{order}-other"), "flush": {"every": 2}}
        place.config(a=a, b=b, run=order)
        with place.open() as ckpt:
            save_steps(ckpt, 1)
            for step in (2, 3):
                save_steps(ckpt, step)
                place.cli("copy", str(step), "--to", "b", code=-1)
            save_steps(ckpt, 4, 5)
        found = sorted(
            int(p.parent.name[5:13])
            for p in (place.root / order / order).glob("step-*/commit.json")
        )
        assert found[-1] == 5
        assert (1 in found) == (1 in wanted), (order, found)


# What never goes -------------------------------------------------------------------------------------


def test_a_pin_makes_no_room_and_its_removal_does_at_once(place: Place) -> None:
    place.config(disk={"capacity": "330KiB"})
    with place.open() as ckpt:
        for step in (1, 2):
            save_steps(ckpt, step)
            ckpt.pin(step)
        third = ckpt.save(3, state_of(3))
        with pytest.raises(CapacityError, match=r"(?s)disk.*unpin"):
            third.wait(timeout=SOON_S)
        assert place.steps() == [1, 2]
        ckpt.unpin(1)
        wait_until(lambda: third.done("disk"), "the unpinned one makes room")
        assert place.steps() == [2, 3]


def test_what_a_slower_tier_is_owed_makes_no_room_until_it_has_it(
    place: Place, store: Faulty
) -> None:
    place.config(
        host={"capacity": "400KiB"},
        disk={"capacity": "330KiB"},
        store=store.tier(),
    )
    with place.open() as ckpt:
        store.set("refuse", "step-")
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait("disk", timeout=SOON_S)
        third = ckpt.save(3, state_of(3))
        wait_until(lambda: third.exception() is not None, "there is no room")
        assert place.steps("disk") == [1, 2]
        store.heal()
        ckpt.drain(deadline=SOON_S)
        wait_until(lambda: third.done("disk"), "step 1 gives way")
    assert store.steps() == [1, 2, 3]
    assert place.steps("disk") == [2, 3]


def test_room_is_never_made_by_the_only_copy_that_survives_a_loss(place: Place) -> None:
    place.config(
        disk={}, pfs={"shared": True, "capacity": "200KiB", "flush": {"every": 2}}, max_wait="1s"
    )
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2)
        third = ckpt.save(3, state_of(3))
        third.wait("disk", timeout=SOON_S)
        fourth = ckpt.save(4, state_of(4))
        fourth.wait("disk", timeout=SOON_S)
        with pytest.raises(CapacityError, match="pfs"):
            fourth.wait("pfs", timeout=SOON_S)
        assert place.steps("pfs") == [2]
        assert place.steps("disk") == [1, 2, 3, 4]


def test_memory_evicts_only_what_no_tier_needs_any_more(place: Place) -> None:
    """With room for two images, ten saves pass through it; none is lost, and the newest stays."""
    place.config(host={"capacity": "400KiB"}, disk={}, pfs={})
    with place.open() as ckpt:
        for step in range(1, 11):
            ckpt.save(step, state_of(step))
        assert ckpt.drain().left == ()
        assert ckpt.statistics().skipped_saves == 0
        assert "host" in ckpt.checkpoints()[-1].copies
        assert "host" not in ckpt.checkpoints()[0].copies
    assert place.steps("disk") == place.steps("pfs") == list(range(1, 11))


# A disk that is full ---------------------------------------------------------------------------------


def test_a_full_disk_deletes_the_oldest_for_each_new_one_and_reports_it_once(
    place: Place, mount: Callable[[Path, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    mount(place.root / "disk", "600k")
    place.config()
    with place.open() as ckpt:
        save_steps(ckpt, *range(1, 11))
        wait_until(lambda: "full" in caplog.text, "it is logged")
        assert not any(ckpt.statistics().given_up_copies.values())
    warned = [r for r in caplog.records if r.levelname == "WARNING" and "full" in r.getMessage()]
    assert len(warned) == 1
    assert "disk" in warned[0].getMessage()
    held = place.steps()
    assert held == list(range(held[0], 11))
    assert 1 < len(held) < 6


def test_a_disk_that_others_fill_is_reported_and_gets_what_it_is_owed_later(
    place: Place, mount: Callable[[Path, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The other tier gets every step; nothing of this one is damaged."""
    disk = place.root / "disk"
    mount(disk, "500k")
    place.config(disk={"shared": True}, other={})
    with place.open() as ckpt:
        save_steps(ckpt, 1)
        (disk / "theirs").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
        handle = ckpt.save(2, state_of(2))
        handle.wait("other", timeout=SOON_S)
        wait_until(lambda: handle.exception() is not None, "it has no room")
        assert "disk" in str(handle.exception())
        assert place.steps("disk") == [1]
        (disk / "theirs").unlink()
        assert ckpt.drain(deadline=SOON_S).left == ()
    assert place.steps("disk") == place.steps("other") == [1, 2]
    assert place.restored().step == 2


def test_a_disk_keeps_its_share_free_beside_what_others_write_there(
    place: Place, mount: Callable[[Path, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """No write fails for it. The newest checkpoint stays, and then the disk gets no other."""
    disk = place.root / "disk"
    mount(disk, "2000k")
    place.config(disk={"keep_free": "50%", "shared": True}, other={})

    def free_bytes() -> int:
        return os.statvfs(disk).f_bavail * 4096

    with place.open() as ckpt:
        held = []
        for step in range(1, 12):
            if step == 11:
                (disk / "theirs").write_bytes(bytes(400 << 10))
            ckpt.save(step, state_of(step)).wait("disk", timeout=SOON_S)
            assert free_bytes() >= 960 << 10  # records beside the images are not counted
            held.append(place.steps("disk"))
            assert held[-1] == list(range(held[-1][0], step + 1))
        assert 1 < len(held[-1]) < len(held[-2]) < 8
        assert ckpt.statistics().flush_failures.get("disk", 0) == 0
        assert not [r for r in caplog.records if "room" in r.getMessage()]
        (disk / "theirs").write_bytes(bytes(free_bytes()))
        handle = ckpt.save(12, state_of(12))
        handle.wait("other", timeout=SOON_S)
        wait_until(lambda: handle.exception() is not None, "it has no room")
        assert "keep_free" in str(handle.exception())
        assert place.steps("disk") == [11]
        (disk / "theirs").unlink()
        assert ckpt.drain(deadline=SOON_S).left == ()
    assert place.steps("disk") == [11, 12]


def test_a_deletion_that_the_disk_shows_late_is_not_followed_by_another(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, seen = place.root / "disk", list[tuple[float, int]]()

    def late(folder: Any) -> SimpleNamespace:
        """A disk of 2 MB; what was deleted within the last 0.3 s still takes room there."""
        used = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file())
        seen.append((time.monotonic(), used))
        used = max(size for at, size in seen if at > time.monotonic() - 0.3)
        return SimpleNamespace(f_frsize=1000, f_blocks=2000, f_bavail=2000 - used // 1000)

    place.config(disk={"keep_free": "1MB"})
    with place.open() as ckpt:
        monkeypatch.setattr("os.statvfs", late)
        held = []
        for step in range(1, 9):
            ckpt.save(step, state_of(step)).wait("disk", timeout=SOON_S)
            held.append(len(place.steps()))
        monkeypatch.undo()
    assert held == [min(step, max(held)) for step in range(1, 9)]
    assert 3 < max(held) < 8


def test_what_another_rank_has_written_of_a_copy_takes_no_room_from_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = place.root / "disk"

    def half_full(folder: Any) -> SimpleNamespace:
        used = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file())
        return SimpleNamespace(f_frsize=1000, f_blocks=2000, f_bavail=2000 - used // 1000)

    place.config(disk={"keep_free": "1MB"})
    with place.open() as ckpt:
        monkeypatch.setattr("os.statvfs", half_full)
        save_steps(ckpt, 1, 2, 3)
        (image,) = (disk / "run/step-00000001-a0001").glob("*.safetensors")
        room_bytes = (half_full(disk).f_bavail - 1000) * 1000
        part = disk / "run/step-00000004-a0001/rank-00001-of-00002.safetensors"
        part.parent.mkdir()
        part.write_bytes(bytes(room_bytes - image.stat().st_size // 2))
        ckpt.save(4, state_of(4)).wait("disk", timeout=SOON_S)
        monkeypatch.undo()
        assert place.steps() == [1, 2, 3, 4]


def test_a_store_without_room_deletes_what_its_rules_allow(place: Place, store: Faulty) -> None:
    place.config(store=store.tier())
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2)
        store.set("full", "step-00000003")
        handle = ckpt.save(3, state_of(3))
        wait_until(lambda: 1 not in store.steps(), "the oldest goes")
        assert 2 in store.steps()
        store.heal()
        assert ckpt.drain(deadline=SOON_S).left == ()
        assert handle.outcome == "saved"
    assert store.steps() == [2, 3]
