"""A commit record counts once it would survive a power cut: not where the fsync of its folder failed, nor where whoever
wrote it died before that.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.media import Medium
from tests.steps import blank, state_of, step_in, steps_on

MakeConfig = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("impatient")


@dataclass
class Folders:
    """Fsyncs of step folders that have a commit record, in order; ``failing`` says how often that of a step fails."""

    monkeypatch: pytest.MonkeyPatch
    failing: dict[int, int] = field(default_factory=dict)
    synced: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    records: list[tuple[int, int]] = field(default_factory=list)
    """Which file the commit record was at each of these fsyncs, failed ones included."""

    def __post_init__(self) -> None:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            record = path / "commit.json"
            if not (path.name.startswith("step-") and record.exists()):
                real(descriptor)
                return
            step = int(path.name.split("-")[1])
            status = record.stat()
            self.records.append((status.st_ino, status.st_ctime_ns))
            if self.failing.get(step, 0) > 0:
                self.failing[step] -= 1
                self.failed.append(step)
                raise OSError(errno.EIO, "Input/output error")
            real(descriptor)
            self.synced.append(step)

        self.monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Folders:
    return Folders(monkeypatch)


@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_whose_last_fsync_failed_is_reported_once_its_record_was_written_anew(
    make_config: MakeConfig, tmp_path: Path, folders: Folders, times: int
) -> None:
    folders.failing[1] = times
    with tierfall.open(make_config()) as ckpt:
        handle = ckpt.save(1, state_of(1))
        handle.wait("disk")
        assert folders.failed == [1] * times
        assert folders.synced == [1], "nothing was durable yet"
        assert len(set(folders.records)) == times + 1, "a second fsync of the same entry would lie"
        assert ckpt.statistics().flush_failures["disk"] == times
    assert steps_on(tmp_path / "disk") == [1]


def test_a_start_syncs_the_folder_of_each_record_that_it_finds_once(
    make_config: MakeConfig, folders: Folders
) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
    folders.synced.clear()
    with tierfall.open(make_config()) as ckpt:
        assert sorted(folders.synced) == [1, 2, 3]
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 3
        ckpt.save(4, state_of(4), block=True)
        ckpt.drain()
    assert sorted(folders.synced) == [1, 2, 3, 4]


def test_what_cannot_be_synced_is_no_reason_to_drop_another_and_is_restored_all_the_same(
    make_config: MakeConfig,
    tmp_path: Path,
    folders: Folders,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    folders.failing[2] = 10**9
    caplog.set_level(logging.WARNING, logger="tierfall")
    with tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt:
        assert "2@1 may not survive a power cut, so nothing relies on it there" in caplog.text
        ckpt.drain()
        assert steps_on(tmp_path / "disk") == [1, 2], "the older one is the newest that is durable"
        (newest,) = (c for c in ckpt.checkpoints() if c.step == 2)
        assert "may not survive a power cut" in newest.copies["disk"].damage
        state = blank()
        restored = ckpt.restore(state)
        assert restored is not None
        assert (restored.step, step_in(state)) == (2, 2)
        ckpt.save(3, state_of(3), block=True)
        ckpt.drain()
        assert 3 in steps_on(tmp_path / "disk")


def test_memory_keeps_an_image_whose_record_on_disk_may_be_lost(
    make_config: MakeConfig, tmp_path: Path, folders: Folders
) -> None:
    """Its writer died before the last fsync; this start cannot make up for it, and the next one can."""
    config = make_config(host={"on_close": "keep"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    folders.failing[1] = 1
    with tierfall.open(config) as ckpt:
        (found,) = ckpt.checkpoints()
        assert "host" in found.copies
        assert any(copy.damage for copy in found.copies.values())
    with tierfall.open(config) as ckpt:
        (found,) = ckpt.checkpoints()
        assert found.copies["disk"].damage is None


def test_a_failed_fsync_writes_the_copy_anew(
    make_config: MakeConfig,
    tmp_path: Path,
    slow_medium: Medium,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pages of a failed fsync may be gone and clean: nothing of that file is ever used."""
    with tierfall.open(make_config(disk={}, slow={})) as ckpt:
        slow_medium.fail("fsync", errno.EIO, times=1)
        handle = ckpt.save(1, state_of(1), block=True)
        assert handle.outcome == "saved"
        assert ckpt.statistics().flush_failures["slow"] == 1
    assert len(slow_medium.struck) == 1
    assert slow_medium.struck[0] not in slow_medium.passed
    assert len(slow_medium.passed) == 3  # another image, its manifest, the commit record
    assert "flush of 1@1 to slow failed (try 1)" in caplog.text
    assert steps_on(tmp_path / "slow") == [1]
