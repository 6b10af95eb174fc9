"""The run lock: one owner per machine, freed by its death, not lost by a look at its owner, not inherited by a fork."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.forked import Forked
from tierfall.core.runtime.run_lock import LockOwner, RunLock
from tierfall.core.types.errors import BackendError, ConfigError, LockError

HOLD = """
import sys
from pathlib import Path
from tierfall.core.runtime.run_lock import RunLock
lock = RunLock.acquire(Path(sys.argv[1]), run="gpt")
print("held", flush=True)
sys.stdin.read()
"""

# Takes the lock, then forks a child that outlives it, as a data loader's worker does.
HOLD_AND_FORK = """
import os, sys
from pathlib import Path
from tierfall.core.runtime.run_lock import RunLock
lock = RunLock.acquire(Path(sys.argv[1]), run="gpt")
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""

TRY = """
import os, sys
from pathlib import Path
from tierfall.core.types.errors import LockError
from tierfall.core.runtime.run_lock import RunLock
try:
    RunLock.acquire(Path(sys.argv[1]), run="gpt")
except LockError:
    os._exit(3)
os._exit(0)  # without taking down all modules
"""

Start = Callable[[str, Path], Forked]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slot-0.lock"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a helper process and read its first line into ``first_line``; it is killed at the end."""
    started: list[Forked] = []

    def start(script: str, path: Path) -> Forked:
        started.append(forked.start(["-c", script, str(path)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.close()


def first_line(process: Forked) -> str:
    return process.stdout.readline().decode().strip()


def another_process_can_take(path: Path) -> bool:
    code = forked.run(["-c", TRY, str(path)]).returncode
    assert code in (0, 3)
    return code == 0


def test_lock_is_freed_by_sigkill_while_a_forked_child_lives(path: Path, start: Start) -> None:
    owner = start(HOLD_AND_FORK, path)
    child = int(first_line(owner))
    assert not another_process_can_take(path)
    owner.kill()
    owner.wait()
    taken = RunLock.acquire(path, run="gpt")
    os.kill(child, 0)  # the child is alive: it waits for the end of its standard input
    assert taken.held
    taken.release()


def test_second_take_in_one_process_is_refused_and_keeps_the_lock(path: Path) -> None:
    lock = RunLock.acquire(path, run="gpt")
    for _ in range(3):
        with pytest.raises(ConfigError, match="second Checkpointer of run 'gpt' in this process"):
            RunLock.acquire(path, run="gpt")
    assert lock.held
    assert not another_process_can_take(path)
    lock.release()


def test_asking_for_the_owner_does_not_drop_this_process_lock(path: Path) -> None:
    lock = RunLock.acquire(path, run="gpt")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        owner = RunLock.owner(path)
        assert owner is not None
        assert owner.pid == os.getpid()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not another_process_can_take(path)
    lock.release()


@pytest.mark.parametrize("note", [b"", b"{", b'{"pid":1}', b"\xff" * 5000])
def test_owner_is_known_by_the_kernel_where_the_note_is_unusable(
    path: Path, start: Start, note: bytes
) -> None:
    process = start(HOLD, path)
    assert first_line(process) == "held"
    path.write_bytes(note)
    assert RunLock.owner(path) == LockOwner(pid=process.pid)
    with pytest.raises(LockError, match=f"process {process.pid}, since an unknown time"):
        RunLock.acquire(path, run="gpt")


def test_lock_on_an_unlinked_file_is_noticed_and_taken_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.lockf
    removed = []

    def remove_first(fd: int, command: int) -> None:
        if not removed:
            removed.append(os.fstat(fd).st_ino)
            path.unlink()
        real(fd, command)

    monkeypatch.setattr(fcntl, "lockf", remove_first)
    lock = RunLock.acquire(path, run="gpt")
    assert removed
    assert path.exists()
    assert not another_process_can_take(path)
    lock.release()


def test_the_owner_takes_a_removed_file_anew(path: Path, start: Start) -> None:
    lock = RunLock.acquire(path, run="gpt")
    assert lock.is_file_intact()
    path.unlink()
    assert not lock.is_file_intact()
    lock.reacquire()
    assert (lock.is_file_intact(), lock.held) == (True, True)
    assert not another_process_can_take(path)
    lock.reacquire()  # it is there
    lock.release()
    assert another_process_can_take(path)
    assert lock.is_file_intact()  # nobody misses it
    lock.reacquire()
    assert another_process_can_take(path)


def test_a_lock_that_another_process_took_meanwhile_is_not_taken_from_it(
    path: Path, start: Start
) -> None:
    lock = RunLock.acquire(path, run="gpt")
    path.unlink()
    other = start(HOLD, path)
    assert first_line(other) == "held"
    with pytest.raises(LockError, match=f"process {other.pid}"):
        lock.reacquire()
    assert not lock.is_file_intact()
    other.kill()
    other.wait()
    lock.reacquire()
    assert lock.is_file_intact()
    assert not another_process_can_take(path)
    lock.release()


def test_a_file_that_is_in_use_does_not_look_old(path: Path) -> None:
    """Cleaners of temporary files go by age."""
    lock = RunLock.acquire(path, run="gpt")
    old_s = time.time() - 11 * 24 * 3600
    os.utime(path, (old_s, old_s))
    assert lock.is_file_intact()
    assert time.time() - path.stat().st_mtime < 3600
    assert not another_process_can_take(path)
    lock.release()


def test_file_system_without_locks_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, command: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(BackendError, match="set `folder` to a file system with record locks"):
        RunLock.acquire(path, run="gpt")


def test_a_file_that_cannot_be_written_is_named_and_leaves_the_lock_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a full /dev/shm."""

    def refuse(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(
            BackendError, match=f"writing {path} failed: .*No space left.*free space"
        ):
            RunLock.acquire(path, run="gpt")
    RunLock.acquire(path, run="gpt").release()


def test_links_folders_and_pipes_are_refused(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path.symlink_to(target)
    with pytest.raises(ConfigError, match="a link"):
        RunLock.acquire(path, run="gpt")
    assert target.read_bytes() == b"precious"
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="remove it"):
        RunLock.acquire(path, run="gpt")
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        RunLock.acquire(path, run="gpt")
