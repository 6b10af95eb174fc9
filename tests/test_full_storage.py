"""Tiers that are full or too small: room is made, or the error says how much is missing, and training continues."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.media import Medium
from tests.memory_store import MemoryStore
from tests.steps import blank, state_of, step_in, steps_on, wait_until
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.posix.writer import PosixWriter
from tierfall.core.types.errors import CapacityError, StorageFullError
from tierfall.session.session import Session

MakeConfig = Callable[..., dict[str, Any]]
BIG = 80_000  # 320 KB of tensors
pytestmark = pytest.mark.usefixtures("impatient")


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


# A full disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_tier_that_fills_up_is_skipped_and_reported_and_tried_again(
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


def test_a_full_disk_is_reported_when_it_begins_and_when_it_ends(
    make_config: MakeConfig, mount: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Three fit. The warning names what is deleted and what is kept; later saves add none."""
    disk = mount("1500k")

    def texts(level: int) -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == level and "full" in r.msg]

    caplog.set_level(logging.INFO, "tierfall")
    with tierfall.open(make_config()) as ckpt:
        for step in range(10, 100, 10):
            ckpt.save(step, state_of(step, elements=BIG), block=True)
        (begin,) = texts(logging.WARNING)
        assert "tier disk is full, and deletes older checkpoints for each new one" in begin
        assert "Deleted: 10@1" in begin
        assert "Kept: 30@1, 20@1." in begin
        assert "No space left on device" in begin
        assert steps_on(disk) == [70, 80, 90]
        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        for step in range(100, 150, 10):
            ckpt.save(step, state_of(step, elements=BIG), block=True)
        begin_again, end = texts(logging.WARNING)
        assert begin_again == begin
        assert "tier disk is not full any more" in end
        assert "Deleted before: 10@1, 20@1, 30@1, 40@1 and 2 more" in end
        subprocess.run(["mount", "-o", "remount,size=3500k", str(disk)], check=True)
        ckpt.save(150, state_of(150, elements=BIG), block=True)
        assert len(texts(logging.WARNING)) == 3
        assert "Deleted: 70@1" in texts(logging.WARNING)[2]


@pytest.mark.parametrize("compress", [None, {"codec": "zstd"}], ids=["raw", "zstd"])
def test_a_write_that_finds_no_space_costs_one_checkpoint(
    compress: dict[str, str] | None,
    make_config: MakeConfig,
    tmp_path: Path,
    slow_medium: Medium,
) -> None:
    with tierfall.open(make_config(slow={} if compress is None else {"compress": compress})) as c:
        for step in range(1, 7):
            c.save(step, state_of(step), block=True)
        slow_medium.fail("pwrite", errno.ENOSPC, times=1)
        c.save(7, state_of(7), block=True)
        assert slow_medium.struck
        assert steps_on(tmp_path / "slow") == [2, 3, 4, 5, 6, 7]
        assert c.statistics().given_up_copies == 0


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
        assert "No space left on device" in str(error)
        about = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert [text for text in about if "2@1" in text] == [str(error)]
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


def test_an_image_that_outgrows_a_tier_in_mid_run_is_left_out_there_alone(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(small={"capacity": "250KiB"}, large={}, host={"capacity": "1MiB"})
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        grown = ckpt.save(3, state_of(3, elements=BIG))
        grown.wait("large")
        with pytest.raises(CapacityError, match=r"flush of 3@1 to small: .*256000 bytes.*left out"):
            grown.wait("small")
        assert isinstance(grown.exception(), CapacityError)
        assert str(grown.exception()) in [r.getMessage() for r in caplog.records]
        ckpt.save(4, state_of(4), block=True).wait("small")
        beyond_memory = ckpt.save(5, state_of(5, elements=10 * BIG))
        assert beyond_memory.outcome == "skipped"
        assert "save of step 5 is skipped: tier host: " in caplog.text
        ckpt.save(6, state_of(6), block=True).wait("small")
    assert steps_on(tmp_path / "large") == [1, 2, 3, 4, 6]
    assert steps_on(tmp_path / "small")[-1] == 6
    assert 3 not in steps_on(tmp_path / "small")


def test_an_image_that_outgrows_a_tier_is_raised_where_that_is_asked_for(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(small={"capacity": "250KiB"}, large={}, on_error="raise")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2, elements=BIG)).wait("large")
        with pytest.raises(CapacityError, match="flush of 2@1 to small"):
            ckpt.save(3, state_of(3))
    assert steps_on(tmp_path / "large") == [1, 2]


def test_memory_holds_as_many_images_as_its_capacity_says(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2.2 MiB each, in 16 MiB. What the error says of the room that is left is less than what the image needs."""
    store, flow = MemoryStore(monkeypatch), threading.Event()
    config = make_config(host={"capacity": "16MiB", "when_full": "skip"})
    config["tiers"] = [config["tiers"][0], store.tier()]
    with tierfall.open(config) as ckpt:
        store.refuse = lambda call, key: None if flow.wait(60) else TimeoutError()
        saved = [ckpt.save(step, state_of(step, elements=550_000)) for step in range(1, 9)]
        assert [handle.outcome == "skipped" for handle in saved] == [False] * 7 + [True]
        error = str(saved[-1].exception())
        flow.set()
    found = re.search(
        r"has room for (\S+) (\S+) in one piece, of 16 MiB; .* needs (\S+) MiB", error
    )
    assert found, error
    left_mib = float(found[1]) / {"MiB": 1, "KiB": 1024, "bytes": 1 << 20}[found[2]]
    assert left_mib < float(found[3])


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


@pytest.fixture
def flow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No tier takes a byte of a step before this is set."""
    event = threading.Event()
    real = PosixWriter.write

    def stalling(writer: PosixWriter, offset: int, view: memoryview) -> None:
        if "/step-" in writer._key:
            assert event.wait(60.0)
        real(writer, offset, view)

    monkeypatch.setattr(PosixWriter, "write", stalling)
    return event


def test_full_memory_skips_at_once_where_that_is_asked_for(
    make_config: MakeConfig, tmp_path: Path, flow: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    host = {"capacity": "360KiB", "when_full": "skip"}
    with tierfall.open(make_config(host=host, max_wait="1h")) as ckpt:
        handles = [ckpt.save(step, state_of(step)) for step in (1, 2, 3, 4)]
        assert [h.outcome for h in handles] == ["pending", "pending", "skipped", "skipped"]
        for step, handle in enumerate(handles[2:], start=3):
            with pytest.raises(CapacityError, match=rf"step {step}.*when_full: skip"):
                handle.wait()
        assert ckpt.statistics().skipped_saves == 2
        assert sum("skipped" in r.getMessage() for r in caplog.records) == 1
        flow.set()
        ckpt.drain()
        ckpt.save(5, state_of(5), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2, 5]


def test_a_save_that_is_interrupted_while_memory_is_full_asks_for_nothing_any_more(
    make_config: MakeConfig, flow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = {"capacity": "360KiB", "when_full": "supersede"}

    def interrupted(*words: Any) -> None:
        raise KeyboardInterrupt

    with tierfall.open(make_config(host=host, max_wait="1h")) as ckpt:
        handles = [ckpt.save(step, state_of(step)) for step in (1, 2)]
        for handle in handles:
            handle.captured()
        session = ckpt._session
        admissions = session.coordinator._admissions
        with monkeypatch.context() as patch:
            patch.setattr(Session, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(3, state_of(3))
        session.call(lambda: None)
        waits = session.call(admissions.busy)
        flow.set()
        ckpt.drain()
        assert not waits
        assert [handle.outcome for handle in handles] == ["saved", "saved"]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_full_memory_gives_up_the_oldest_on_its_way_where_that_is_asked_for(
    make_config: MakeConfig,
    tmp_path: Path,
    flow: threading.Event,
    caplog: pytest.LogCaptureFixture,
    on_error: str,
) -> None:
    """Each tier is at work on the first, which stays: the second goes at once, and the rest is whole."""
    host = {"capacity": "540KiB", "when_full": "supersede"}
    config = make_config(host=host, disk={}, far={}, max_wait="1h", on_error=on_error)
    with tierfall.open(config) as ckpt:
        handles = [ckpt.save(step, state_of(step)) for step in (1, 2, 3)]
        for handle in handles:
            handle.captured()
        second = handles[1]
        messages: list[BaseException] = []

        def wait() -> None:
            try:
                second.wait(timeout=60.0)
            except CapacityError as error:
                messages.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        fourth = ckpt.save(4, state_of(4))
        waiter.join()
        flow.set()
        assert [type(error) for error in messages] == [CapacityError]
        assert second.outcome == "superseded"
        assert "step 2 is superseded by step 4" in str(second.exception())
        with pytest.raises(CapacityError, match="superseded"):
            second.captured()
        ckpt.drain()
        assert fourth.outcome == "saved"
        last = ckpt.save(5, state_of(5), block=True)
        figures = ckpt.statistics()
        superseded = [h.step for h in (*handles, fourth, last) if h.outcome == "superseded"]
        assert figures.superseded_saves == len(superseded) == 1
        assert (figures.saves, figures.skipped_saves, figures.failed_saves) == (5, 0, 0)
        assert [info.step for info in ckpt.checkpoints()] == [1, 3, 4, 5]
        output = [r.getMessage() for r in caplog.records if "superseded" in r.getMessage()]
        assert output == [str(second.exception())]
    for tier in ("disk", "far"):
        assert steps_on(tmp_path / tier) == [1, 3, 4, 5]
        assert not list((tmp_path / tier).rglob("step-00000002*"))
    state = state_of(0)
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state)
        assert report is not None
        assert report.step == 5


@pytest.mark.parametrize("first", [True, False])
def test_what_a_start_on_a_full_disk_left_in_memory_is_its_runs(
    first: bool, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tier took the record of its attempt: the next start knows the tiers by their ids."""
    config = make_config(disk={}, max_wait="1s")
    if not first:
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank())
            ckpt.save(1, state_of(1), block=True)

    def full(*arguments: Any, **more: Any) -> Any:
        raise StorageFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "create", full)
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank())
            handle = ckpt.save(2, state_of(2))
            handle.wait("host")
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state := blank())
        assert report is not None
        assert (report.step, step_in(state)) == (2, 2)
        ckpt.drain()
    assert steps_on(tmp_path / "disk") == ([2] if first else [1, 2])
