"""Tiers that cannot be used, fail or are unreachable: training continues, the log reports them, no committed
checkpoint is lost."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.media import Medium
from tests.steps import blank, files_below, state_of, step_in, steps_on, wait_until
from tierfall.core.types.errors import (
    BackendError,
    FlushError,
    RestoreError,
    StepError,
    TierfallError,
)
from tierfall.core.types.values import SaveOutcome

MakeConfig = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("impatient")


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


# A copy that cannot be written -------------------------------------------------------------------


def put_in_its_place(folder: Path, what: str) -> None:
    """Replace a checkpoint's folder, as people do to move it to another disk, or by mistake."""
    elsewhere = folder.parent.parent.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    if folder.exists():
        folder.rename(elsewhere / folder.name)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
    if what == "link":
        folder.symlink_to(elsewhere / folder.name)
    else:
        folder.write_text("somebody else's")


@pytest.mark.parametrize("what", ["link", "file"])
def test_a_folder_that_was_replaced_keeps_no_other_checkpoint_off_its_tier(
    what: str, make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(disk={}, slow={})
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
    folder = tmp_path / "slow" / "run" / "step-00000003-a0001"
    put_in_its_place(folder, what)
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 3
        for step in (4, 5):
            ckpt.save(step, state_of(step)).wait("slow", timeout=30)
        ckpt.drain(10.0)
        third = next(info for info in ckpt.checkpoints() if info.step == 3)
        hint = "put the folder itself there" if what == "link" else "move it away"
        assert hint in third.damage["slow"]
        assert folder.name in third.damage["slow"]
        assert hint in caplog.text
        assert "slow" not in third.tiers
        assert third.owed == ()
    assert "could not delete" not in caplog.text
    assert steps_on(tmp_path / "disk") == [1, 2, 3, 4, 5]
    if what == "file":
        assert folder.read_text() == "somebody else's"
    folder.unlink()
    assert steps_on(tmp_path / "slow") == [1, 2, 4, 5]
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        wait_until(lambda: steps_on(tmp_path / "slow") == [1, 2, 3, 4, 5], "it is brought")
        assert ckpt.statistics().set_aside_copies == 0


@pytest.mark.parametrize("what", ["link", "file"])
def test_a_step_whose_folder_was_replaced_is_reported_and_keeps_no_other_from_being_read(
    what: str, make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(disk={})
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
    for step in (1, 3):
        put_in_its_place(tmp_path / "disk" / "run" / f"step-0000000{step}-a0001", what)
    hint = "put the folder itself there" if what == "link" else "move it away"
    for step in (1, 3):
        with pytest.raises(
            RestoreError, match=f"step-0000000{step}-a0001 is a .*{hint}"
        ) as messages:
            tierfall.load(config, step=step)
        assert f"step-0000000{4 - step}" not in str(messages.value)
    with tierfall.open(config) as ckpt:
        assert f"step-00000003-a0001 is a {'symbolic link' if what == 'link' else what}" in (
            caplog.text
        )
        with pytest.raises(RestoreError, match=f"step-00000001-a0001 is a .*{hint}"):
            ckpt.restore(blank(), step=1)
        state = blank()
        if what == "link":  # it may be whole
            with pytest.raises(RestoreError, match=f"{hint}.*unreachable='ignore'"):
                ckpt.restore(state)
        report = ckpt.restore(state, unreachable="ignore")
        assert report is not None
        assert step_in(state) == 2
        assert any("step-00000003-a0001" in each.reason for each in report.fallbacks)
        ckpt.save(4, state_of(4), block=True)
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(blank(), step=4) is not None


def test_what_only_memory_has_of_a_copy_that_is_set_aside_outlives_close(
    make_config: MakeConfig, tmp_path: Path, memory: Path
) -> None:
    config = make_config(slow={})
    with tierfall.open(config) as ckpt:
        put_in_its_place(tmp_path / "slow" / "run" / "step-00000001-a0001", "file")
        handle = ckpt.save(1, state_of(1))
        ckpt.save(2, state_of(2)).wait("slow", timeout=30)
        wait_until(lambda: "set aside" in str(handle.exception()), "it is told")
        with pytest.raises(FlushError, match=r"flush of 1@1 to slow is set aside"):
            handle.wait("slow")
    assert steps_on(tmp_path / "slow") == [2]
    (tmp_path / "slow" / "run" / "step-00000001-a0001").unlink()
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 2
        wait_until(lambda: steps_on(tmp_path / "slow") == [1, 2], "it is brought")


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
        error = handle.exception()
        assert isinstance(error, FlushError)
        assert isinstance(error.__cause__, BackendError)
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
        second = ckpt.save(2, state_of(2))
        wait_until(lambda: second.outcome is SaveOutcome.SAVED, "the tier has it all")
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
    assert any("still owed: 1@1 to slow" in r.getMessage() for r in caplog.records)
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


def test_a_start_without_a_tier_restores_only_when_asked_to(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The far tier cannot be listed, and has something newer than the near one."""
    config = make_config(disk={"flush": {"every": 2}}, far={}, max_wait="2s")
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
        unknown = pytest.raises(RestoreError, match="far could not be read, so it is not known")
        with tierfall.open(config) as ckpt, unknown:
            ckpt.restore(blank(), unreachable="ignore")
        with tierfall.open(config, fresh=True) as ckpt:
            ckpt.save(1, state_of(1)).wait("disk")
    with pytest.MonkeyPatch.context() as patch:
        cannot_be_listed(tmp_path / "disk", patch)
        with tierfall.open(config) as ckpt:
            state = blank()
            ckpt.restore(state, unreachable="ignore")
            assert step_in(state) == 1
    assert steps_on(tmp_path / "disk") == [1]
