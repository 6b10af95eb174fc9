"""Somebody removes the files of host memory while a trainer uses it, as systemd's RemoveIPC does at the end of a user's
last session: it is noticed and said, what is told of losses is true, and the next images are in new files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests import forked
from tests.steps import memory_of, state_of, steps_on
from tierfall.core.types.errors import FlushError
from tierfall.core.types.values import LossClass

MakeConfig = Callable[..., dict[str, Any]]
HOLD = """
import fcntl, pathlib, sys
path = pathlib.Path(sys.argv[1])
path.parent.mkdir(parents=True, exist_ok=True)
lock = path.open("a")
try:
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("refused", flush=True)
else:
    if sys.argv[2:]:
        (path.parent / "slot-0.99.image").write_bytes(b"theirs")
    print("held", flush=True)
    sys.stdin.read()
"""
"""A process that takes a slot's lock, as a second start does."""


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """``warnings(text)``: what was logged that has it."""
    caplog.set_level(logging.WARNING)
    return lambda text: [m for m in caplog.messages if text in m]


def remove(folder: Path) -> None:
    """Remove a folder that somebody writes to."""
    gone = folder.with_name("gone")
    folder.rename(gone)
    shutil.rmtree(gone)


def images(config: dict[str, Any]) -> list[Path]:
    return sorted(memory_of(config).glob("slot-0.*.image"))


def remove_images(config: dict[str, Any]) -> None:
    for path in images(config):
        path.unlink()


def lock(config: dict[str, Any]) -> Path:
    return memory_of(config) / "slot-0.lock"


def survives(ckpt: tierfall.Checkpointer) -> int | None:
    return ckpt.statistics().newest[LossClass.PROCESS]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_close_says_what_is_lost(
    make_config: MakeConfig, tmp_path: Path, warnings: Callable[[str], list[str]], on_error: str
) -> None:
    config = make_config(disk={"flush": {"every": 2}}, on_error=on_error, max_wait="0.5s")
    ckpt = tierfall.open(config)
    ckpt.save(1, state_of(1)).captured()
    ckpt.save(2, state_of(2), block=True)
    ckpt.save(3, state_of(3)).captured()
    remove_images(config)
    if on_error == "raise":
        with pytest.raises(FlushError, match="lost, as no other tier has it: 1@1, 3@1: host"):
            ckpt.close()
    else:
        ckpt.close()
    assert warnings("in the memory of this machine alone") == []
    (lost,) = warnings("close: lost")
    assert "1@1, 3@1: host: what is in memory ends with this process: its files" in lost
    assert warnings("the next start or 'tierfall drain' finishes it") == []
    assert steps_on(tmp_path / "disk") == [2]


def test_close_tells_of_each_image_by_itself_whether_it_is_lost(
    make_config: MakeConfig, warnings: Callable[[str], list[str]]
) -> None:
    """The first image was in a removed file, the second one is in a new one."""
    config = make_config(disk={"flush": {"every": 10}}, max_wait="0.5s")
    ckpt = tierfall.open(config)
    ckpt.save(1, state_of(1)).captured()
    remove_images(config)
    ckpt.save(2, state_of(2)).captured()
    ckpt.close()
    (lost,) = warnings("close: lost")
    assert "no other tier has it: 1@1: host" in lost
    assert warnings("2@1 is in the memory of this machine alone")
    with tierfall.open(config) as again:
        report = again.restore(state_of(0))
        assert report is not None
        assert report.step == 2


def test_a_second_start_is_refused_although_the_lock_was_removed(
    make_config: MakeConfig, warnings: Callable[[str], list[str]]
) -> None:
    """Before the next save by the images that are in use, after it by a new lock."""
    config = make_config()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1)).captured()
        lock(config).unlink()
        second = forked.run(["-c", f"import tierfall; tierfall.open({config!r})"])
        assert "LockError" in second.stderr
        assert "another process of this run uses it" in second.stderr
        lock(config).unlink()
        ckpt.save(2, state_of(2), block=True)
        assert warnings("slot-0.lock was removed")
        assert forked.run(["-c", HOLD, str(lock(config))]).stdout == "refused\n"
        assert survives(ckpt) == 2
    assert images(config) == []


def test_saves_in_a_row_go_on_while_files_are_removed(
    make_config: MakeConfig, memory: Path, tmp_path: Path
) -> None:
    """A cleaner that comes again and again, into a run that saves at every step: each image is whole."""
    config = make_config(host={"capacity": "2MiB"})
    with tierfall.open(config) as ckpt:
        for step in range(1, 13):
            if step % 4 == 0:
                remove(memory / "run")
            ckpt.save(step, state_of(step, elements=50_000)).captured()
    assert steps_on(tmp_path / "disk") == list(range(1, 13))


def test_memory_whose_place_another_process_took_is_not_deleted(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Another start took the place after its lock file was removed: the images there may be its own."""
    config = make_config()
    ckpt = tierfall.open(config)
    ckpt.save(1, state_of(1), block=True)
    lock(config).unlink()
    with forked.start(["-c", HOLD, str(lock(config))]) as two:
        assert two.stdout.readline() == b"held\n"
        ckpt.close()
        assert images(config)
    assert steps_on(tmp_path / "disk") == [1]


def test_another_process_that_took_the_place_keeps_its_files(
    make_config: MakeConfig, memory: Path, warnings: Callable[[str], list[str]]
) -> None:
    """It came in the moment before the removal was noticed."""
    config = make_config(disk={"flush": {"every": 10}}, max_wait="0.5s")
    ckpt = tierfall.open(config)
    ckpt.save(1, state_of(1)).captured()
    remove(memory / "run")
    with forked.start(["-c", HOLD, str(lock(config)), "with an image"]) as two:
        assert two.stdout.readline() == b"held\n"
        ckpt.save(2, state_of(2)).captured()
        assert len(warnings("were removed")) == 1
        assert f"process {two.pid}" in warnings("place in memory cannot be held")[0]
        ckpt.close()
        assert len(warnings("close: lost, as no other tier has it: 1@1: ")) == 1
        assert (memory_of(config) / "slot-0.99.image").read_bytes() == b"theirs"
        assert lock(config).exists()
