"""Tiers that are full, slow, failing, away or too small: training goes on, it is said, nothing committed is lost."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, files_below, state_of, step_in, steps_on, wait_until
from tierfall.backends import wrap
from tierfall.backends.posix_writer import PosixWriter
from tierfall.core.errors import (
    BackendError,
    CapacityError,
    FlushError,
    RestoreError,
    StepError,
    TierfallError,
)

MakeConfig = Callable[..., dict[str, Any]]
BIG = 80_000  # 320 KB of tensors


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once: what is waited for here is never the passing of time."""
    monkeypatch.setattr("tierfall.core.scheduler.lane.FIRST_RETRY_S", 0.01)
    monkeypatch.setattr("tierfall.core.scheduler.coordinator.LONGEST_RETRY_S", 0.05)
    real = wrap.wrap
    monkeypatch.setattr(
        "tierfall.session.wrap", lambda inner, **more: real(inner, sleep=lambda s: None, **more)
    )


class Medium:
    """Lets calls on the files below one folder fail with an errno, as often as it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = str(folder)
        self._monkeypatch = monkeypatch
        self._left: dict[str, int] = {}
        self.struck: list[str] = []
        self.passed: list[str] = []

    def fail(self, call: str, number: int, times: int) -> None:
        """Let ``os.<call>`` on files fail ``times`` times; ``struck`` and ``passed`` name the files."""
        real = getattr(os, call)
        self._left[call] = times

        def stand_in(descriptor: int, *args: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if os.path.isdir(path) or not path.startswith(self._folder):
                return real(descriptor, *args)
            if self._left[call] > 0:
                self._left[call] -= 1
                self.struck.append(path)
                raise OSError(number, os.strerror(number))
            self.passed.append(path)
            return real(descriptor, *args)

        self._monkeypatch.setattr(os, call, stand_in)

    def heal(self) -> None:
        self._left = dict.fromkeys(self._left, 0)


@pytest.fixture
def slow_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Medium:
    return Medium(tmp_path / "slow" / "run" / "step-", monkeypatch)


def small_disk(folder: Path, size: str) -> None:
    """Mount a file system of its own, or skip."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount does not work here: {done.stderr.strip()}")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    folder = tmp_path / "disk"
    mounted: list[Path] = []

    def make(size: str) -> Path:
        small_disk(folder, size)
        mounted.append(folder)
        return folder

    yield make
    for each in mounted:
        subprocess.run(["umount", "-l", str(each)], check=True)


# A path that cannot be used ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nothing/can/be/made/here"])
def test_a_path_that_cannot_be_a_tier(path: str, make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("somebody else's")
    place = tmp_path / path
    with pytest.raises(TierfallError, match=r"open: tier disk: .*" + place.name):
        tierfall.open(make_config(disk={"path": str(place)}))
    assert (tmp_path / "file").read_text() == "somebody else's"
    with tierfall.open(make_config()) as ckpt:  # nothing of the failed start is in the way
        ckpt.save(1, state_of(1), block=True)
    assert steps_on(tmp_path / "disk") == [1]


# A full disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_tier_that_fills_up_is_skipped_and_said_and_tried_again(
    call: str,
    make_config: MakeConfig,
    tmp_path: Path,
    slow_medium: Medium,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It alone survives the loss of the node, so its newest stays whatever room is needed."""
    with tierfall.open(make_config(disk={}, slow={"shared": True})) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        slow_medium.fail(call, errno.ENOSPC, times=10**9)
        for step in (2, 3, 4):
            ckpt.save(step, state_of(step)).wait("disk")
        handle = ckpt.save(5, state_of(5))
        handle.wait("disk")
        wait_until(lambda: handle.exception() is not None or "slow" in caplog.text, "it is said")
        assert "slow" in caplog.text
        assert "room" in caplog.text
        assert steps_on(tmp_path / "disk") == [1, 2, 3, 4, 5]
        assert steps_on(tmp_path / "slow") == [1]
        slow_medium.heal()
        wait_until(lambda: handle.done("slow"), "the copy lands")
        handle.wait("slow")
        assert handle.outcome == "saved"
    assert steps_on(tmp_path / "slow") == [1, 2, 3, 4, 5]


def test_room_on_a_disk_that_is_really_full_is_made_by_dropping_the_oldest(
    make_config: MakeConfig, mount: Callable[[str], Path]
) -> None:
    disk = mount("1200k")
    with tierfall.open(make_config()) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, state_of(step, elements=BIG), block=True)
            assert step in steps_on(disk)
        assert ckpt.statistics().given_up_copies == 0
    held = steps_on(disk)
    assert held[-1] == 7
    assert held == list(range(held[0], 8))
    assert len(held) < 7
    with tierfall.open(make_config()) as ckpt:
        state = blank(elements=BIG)
        ckpt.restore(state)
        assert step_in(state) == 7


def test_a_disk_that_others_filled_is_used_again_when_they_leave(
    make_config: MakeConfig, mount: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk = mount("1200k")
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1, elements=BIG), block=True)
        (disk / "filler").write_bytes(bytes(700 << 10))
        handle = ckpt.save(2, state_of(2, elements=BIG))
        wait_until(lambda: handle.exception() is not None, "it is said")
        error = handle.exception()
        assert isinstance(error, CapacityError)
        assert "flush of 2@1 to disk" in str(error)
        assert "free the disk" in str(error)
        assert steps_on(disk) == [1]
        assert ckpt.save(3, state_of(3, elements=BIG)).outcome in ("pending", "failed")
        (disk / "filler").unlink()
        wait_until(lambda: handle.done("disk"), "the copy lands")
        ckpt.drain()
    assert 3 in steps_on(disk)


def test_an_image_whose_manifest_found_no_room_is_not_left_in_the_way(
    make_config: MakeConfig, mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes one image and its records, no second image beside it."""
    disk = mount("600k")
    real = PosixWriter._reserve
    refused: list[str] = []

    def reserve(writer: PosixWriter) -> None:
        if "/step-" in writer._key and writer._key.endswith("-00001.json") and not refused:
            refused.append(writer._key)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(writer)

    def translating(writer: PosixWriter) -> None:
        try:
            reserve(writer)
        except OSError as error:
            raise tierfall.errors.StorageFullError(str(error)) from error

    monkeypatch.setattr(PosixWriter, "_reserve", translating)
    with tierfall.open(make_config()) as ckpt:
        handle = ckpt.save(1, state_of(1, elements=BIG))
        wait_until(lambda: handle.done("disk"), "the copy lands", timeout_s=10.0)
    assert refused
    assert steps_on(disk) == [1]


def test_a_start_on_a_full_disk_goes_on_without_it(
    make_config: MakeConfig, tmp_path: Path, mount: Callable[[str], Path]
) -> None:
    """An attempt's record does not fit: that is no reason not to train."""
    disk = mount("400k")
    config = make_config(fast={}, disk={"path": str(disk)})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    _fill(disk / "filler")
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 1
        ckpt.save(2, state_of(2)).wait("fast")
        (disk / "filler").unlink()
        handle = ckpt.save(3, state_of(3))
        wait_until(lambda: handle.done("disk"), "the copy lands")
    assert steps_on(tmp_path / "fast") == [1, 2, 3]
    assert 3 in steps_on(disk)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(path).f_bavail == 0


# A medium that fails -----------------------------------------------------------------------------


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
        assert ckpt.statistics().flush_failures == 1
    assert len(slow_medium.struck) == 1
    assert slow_medium.struck[0] not in slow_medium.passed
    assert len(slow_medium.passed) == 3  # another image, its manifest, the commit record
    assert "flush of 1@1 to slow failed (try 1)" in caplog.text
    assert steps_on(tmp_path / "slow") == [1]


def test_a_medium_that_keeps_failing_is_reported_and_loses_nothing(
    make_config: MakeConfig, tmp_path: Path, slow_medium: Medium
) -> None:
    with tierfall.open(make_config(disk={}, slow={}, max_wait="1s")) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        slow_medium.fail("fsync", errno.EIO, times=10**9)
        handle = ckpt.save(2, state_of(2))
        with pytest.raises(FlushError, match=r"flush of 2@1 to slow failed.*[Ii]nput/output"):
            handle.wait("slow")
        assert isinstance(handle.exception(), FlushError)
        assert isinstance(handle.exception().__cause__, BackendError)
        handle.wait("disk")
        report = ckpt.drain(5.0)
        assert report.left == ((2, 1, "slow"),)
    assert steps_on(tmp_path / "slow") == [1]
    slow_medium.heal()
    with tierfall.open(make_config(disk={}, slow={})) as ckpt:
        ckpt.drain()
    assert steps_on(tmp_path / "slow") == [1, 2]


def test_on_error_raise_gives_the_loop_the_original_exception_once(
    make_config: MakeConfig, tmp_path: Path, slow_medium: Medium
) -> None:
    config = make_config(disk={}, slow={}, max_wait="1s", on_error="raise")
    with tierfall.open(config) as ckpt:
        slow_medium.fail("fsync", errno.EIO, times=10**9)
        handle = ckpt.save(1, state_of(1))
        wait_until(lambda: handle.exception() is not None, "it is reported")
        with pytest.raises(FlushError, match="flush of 1@1 to slow") as caught:
            ckpt.save(2, state_of(2))
        assert caught.value is handle.exception()
        slow_medium.heal()
        ckpt.save(2, state_of(2), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2]
    assert steps_on(tmp_path / "slow") == [1, 2]


def test_on_error_raise_reaches_a_loop_that_saves_no_more(
    make_config: MakeConfig, tmp_path: Path, slow_medium: Medium
) -> None:
    config = make_config(disk={}, slow={}, max_wait="1s", on_error="raise")
    ckpt = tierfall.open(config)
    slow_medium.fail("fsync", errno.EIO, times=10**9)
    handle = ckpt.save(1, state_of(1))
    wait_until(lambda: handle.exception() is not None, "it is reported")
    with pytest.raises(FlushError, match="flush of 1@1 to slow"):
        ckpt.close()
    assert steps_on(tmp_path / "disk") == [1]


def test_on_error_warn_logs_and_goes_on(
    make_config: MakeConfig,
    tmp_path: Path,
    slow_medium: Medium,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tierfall.open(make_config(disk={}, slow={}, max_wait="1s")) as ckpt:
        slow_medium.fail("fsync", errno.EIO, times=10**9)
        handle = ckpt.save(1, state_of(1))
        wait_until(lambda: handle.exception() is not None, "it is reported")
        ckpt.save(2, state_of(2)).wait("disk")
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert any("flush of 1@1 to slow failed" in text for text in errors)
    assert any("copies are still owed (1@1 to slow" in r.getMessage() for r in caplog.records)
    assert steps_on(tmp_path / "disk") == [1, 2]


# A tier that cannot be asked ---------------------------------------------------------------------


def test_a_tier_that_is_away_is_never_taken_for_empty(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """As after an unmount: another folder stands where the tier's was."""
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        os.rename(tmp_path / "disk", tmp_path / "elsewhere")
        (tmp_path / "disk").mkdir()
        state = blank()
        with pytest.raises(
            RestoreError,
            match=r"tier disk could not be read and may hold something newer.*unreachable='ignore'",
        ):
            ckpt.restore(state)
        assert step_in(state) == -1
        report = ckpt.restore(state, unreachable="ignore")
        assert report is not None
        assert step_in(state) == 1
        assert [source.tier for source in report.sources] == ["host"]
        assert any("disk" in fallback.what for fallback in report.fallbacks)
        assert os.listdir(tmp_path / "disk") == []
        (tmp_path / "disk").rmdir()
        os.rename(tmp_path / "elsewhere", tmp_path / "disk")
        ckpt.save(2, state_of(2), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2]


def cannot_be_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every listing below a folder fail as an ailing medium does."""
    real = os.scandir

    def away(place: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)
        if path.startswith(str(folder)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(place)

    monkeypatch.setattr(os, "scandir", away)


def test_a_start_without_a_tier_restores_only_when_told_to(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The far tier cannot be listed, and has something newer than the near one."""
    config = make_config(disk={"flush": {"every": 2}}, far={})
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
    before = files_below(tmp_path / "far")
    cannot_be_listed(tmp_path / "far", monkeypatch)
    with tierfall.open(config) as ckpt:
        state = blank()
        with pytest.raises(RestoreError, match="tier far could not be read"):
            ckpt.restore(state)
        with pytest.raises(StepError, match="a tier could not be asked"):
            ckpt.save(4, state_of(4))
        named = ckpt.restore(state, step=2)
        assert named is not None
        assert step_in(state) == 2
        report = ckpt.restore(state, unreachable="ignore")
        assert report is not None
        assert (report.step, step_in(state)) == (2, 2)
    monkeypatch.undo()
    after = files_below(tmp_path / "far")
    assert {name: after.get(name) for name in before} == before
    assert steps_on(tmp_path / "far") == [1, 2, 3]


def test_memory_of_a_start_that_reached_other_tiers_is_not_taken_for_foreign(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """The first start reaches one tier only, the second only the other: nobody has said that an attempt is unknown."""
    config = make_config(disk={}, far={}, max_wait="1s")
    with pytest.MonkeyPatch.context() as patch:
        cannot_be_listed(tmp_path / "far", patch)
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank(), unreachable="ignore")
            ckpt.save(1, state_of(1)).wait("disk")
    with pytest.MonkeyPatch.context() as patch:
        cannot_be_listed(tmp_path / "disk", patch)
        with tierfall.open(config) as ckpt:
            state = blank()
            ckpt.restore(state, unreachable="ignore")
            assert step_in(state) == 1
    assert steps_on(tmp_path / "disk") == [1]


# Room --------------------------------------------------------------------------------------------


def test_memory_too_small_for_one_image_names_both_numbers(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config(host={"capacity": "120KiB"})) as ckpt:
        with pytest.raises(
            CapacityError, match=r"tier host: one checkpoint takes .*\(\d+ bytes\).*122880 bytes"
        ):
            ckpt.save(1, state_of(1))
        ckpt.save(1, {"extra": {"step": 1}}, block=True)
    assert len(list((tmp_path / "disk").rglob("commit.json"))) == 1


def test_a_tier_too_small_for_one_image_names_both_numbers(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={}, tiny={"capacity": "64KiB"})
    with tierfall.open(config) as ckpt:
        with pytest.raises(
            CapacityError, match=r"\(\d+ bytes\), tier tiny has a capacity of .*65536 bytes.*raise"
        ):
            ckpt.save(1, state_of(1))
        assert not list(tmp_path.rglob("*.safetensors"))


def test_full_memory_skips_the_save_and_training_goes_on(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only tier below stalls: two images fit, the third save is skipped after max_wait, and said."""
    flow = threading.Event()
    real = PosixWriter.write

    def stalling(writer: PosixWriter, offset: int, view: memoryview) -> None:
        if "/step-" in writer._key:
            assert flow.wait(60.0)
        real(writer, offset, view)

    monkeypatch.setattr(PosixWriter, "write", stalling)
    with tierfall.open(make_config(host={"capacity": "360KiB"}, max_wait="0.2s")) as ckpt:
        first = ckpt.save(1, state_of(1))
        second = ckpt.save(2, state_of(2))
        third = ckpt.save(3, state_of(3))
        assert (first.outcome, second.outcome, third.outcome) == ("pending", "pending", "skipped")
        error = third.exception()
        assert isinstance(error, CapacityError)
        for part in ("step 3", "tier host", "max_wait (0.2 s)", "owed to disk", "skipped"):
            assert part in str(error)
        with pytest.raises(CapacityError, match="step 3"):
            third.wait()
        assert ckpt.statistics().skipped_saves == 1
        flow.set()
        second.wait()
        ckpt.save(4, state_of(4), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2, 4]


def test_full_memory_raises_where_that_is_asked_for(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = threading.Event()
    real = PosixWriter.publish

    def stalling(writer: PosixWriter) -> None:
        if "/step-" in writer._key:
            assert flow.wait(60.0)
        real(writer)

    monkeypatch.setattr(PosixWriter, "publish", stalling)
    config = make_config(host={"capacity": "360KiB"}, max_wait="0.2s", on_error="raise")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1))
        second = ckpt.save(2, state_of(2))
        with pytest.raises(CapacityError, match="save of step 3"):
            ckpt.save(3, state_of(3))
        flow.set()
        second.wait()
        ckpt.save(3, state_of(3), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2, 3]


def test_a_tier_full_of_pinned_checkpoints_takes_no_more_and_drops_none(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={}, small={"capacity": "400KiB"})
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
            ckpt.pin(step)
        handle = ckpt.save(3, state_of(3))
        with pytest.raises(CapacityError, match=r"flush of 3@1 to small.*unpin some"):
            handle.wait("small")
        handle.wait("disk")
        assert steps_on(tmp_path / "small") == [1, 2]
        ckpt.unpin(1)
        wait_until(lambda: handle.done("small"), "room is made")
    assert steps_on(tmp_path / "small") == [2, 3]
    assert steps_on(tmp_path / "disk") == [1, 2, 3]
