"""What a node keeps for others: the pages of deleted objects are used again, and nobody sees another object's bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_places import get

from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.peer import kept
from tierfall.backends.peer.kept import KeptFiles, MappedWriter
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import StorageFullError

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KeptFiles]:
    opened = KeptFiles(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of any length are mapped."""
    monkeypatch.setattr(kept, "MAPPED_BYTES_MIN", 1)


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("name", CHECKS)
def test_promise(name: str, tmp_path: Path) -> None:
    folders = iter(tmp_path / f"{number}" for number in range(1000))
    check_promise(name, lambda: KeptFiles(next(folders)), reopen=lambda b: KeptFiles(b.place))


def test_the_pages_of_a_deleted_object_are_used_again(files: KeptFiles, tmp_path: Path) -> None:
    first = receive(files, "run/1/image", data(1))
    second = receive(files, "run/2/image", data(2))
    assert second != first
    files.delete("run/1/image")
    assert receive(files, "run/3/image", data(3)) == first
    assert get(files, "run/3/image") == data(3)
    assert get(files, "run/2/image") == data(2)
    assert [found.key for found in files.scan("run/")] == ["run/2/image", "run/3/image"]
    assert not (tmp_path / "run/1").exists()


def test_another_process_of_the_node_may_delete(files: KeptFiles, tmp_path: Path) -> None:
    first = receive(files, "run/1/image", data(1))
    other = PosixBackend(tmp_path)
    other.delete("run/1/image")
    other.close()
    assert receive(files, "run/2/image", data(2)) == first


def test_pages_that_a_reader_has_open_are_not_used_again(files: KeptFiles, tmp_path: Path) -> None:
    content = data(1)
    first = receive(files, "run/1/image", content)
    with (tmp_path / "run/1/image").open("rb") as reader:
        files.delete("run/1/image")
        assert receive(files, "run/2/image", data(2)) != first
        assert reader.read() == content


def test_pages_that_a_reader_opens_after_the_delete_request_are_not_used_again(
    files: KeptFiles, tmp_path: Path
) -> None:
    """The file may be opened by its second name: of a backup, or a search."""
    content = data(1)
    first = receive(files, "run/1/image", content)
    files.delete("run/1/image")
    (spare,) = [path for path in (tmp_path / "run").iterdir() if path.is_file()]
    with spare.open("rb") as reader:
        assert receive(files, "run/2/image", data(2)) != first
        assert reader.read() == content


def test_what_another_process_deletes_is_freed_with_the_next_object(
    files: KeptFiles, tmp_path: Path
) -> None:
    for number in range(4):
        receive(files, f"run/{number}/image", data(number))
    other = PosixBackend(tmp_path)
    for number in range(4):
        other.delete(f"run/{number}/image")
    other.close()
    receive(files, "run/4/image", data(4))
    assert pages_bytes(tmp_path) == 2 * MIB


def test_a_live_object_whose_second_name_is_gone_is_left_alone(
    files: KeptFiles, tmp_path: Path
) -> None:
    """As where another start of this node removes what it takes for unfinished."""
    receive(files, "run/1/image", data(1))
    other = PosixBackend(tmp_path)
    assert other.discard_unfinished("run/") == 1
    other.close()
    receive(files, "run/2/image", data(2))
    assert get(files, "run/1/image") == data(1)
    files.delete("run/1/image")
    assert pages_bytes(tmp_path) == 2 * MIB


def test_an_object_that_is_given_up_leaves_nothing(files: KeptFiles, tmp_path: Path) -> None:
    receive(files, "run/1/image", data(1))
    files.delete("run/1/image")
    writer = files.create("run/2/image", length=2 * MIB)
    writer.abort()
    assert pages_bytes(tmp_path) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_start_after_a_kill_removes_the_pages_and_second_names(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        files = KeptFiles(tmp_path)
        for number in range(2):
            receive(files, f"run/{number}/image", data(number))
        files.delete("run/0/image")
        os._exit(0)
    os.waitpid(child, 0)
    after = KeptFiles(tmp_path)
    after.discard_unfinished("run/")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "run/1/image"]
    after.close()


def test_a_forked_child_holds_no_pages(files: KeptFiles, tmp_path: Path) -> None:
    receive(files, "run/1/image", data(1))
    reader, end = os.pipe()
    child = os.fork()
    if not child:
        held = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
        maps = Path("/proc/self/maps").read_text()
        os.write(end, b"held" if str(tmp_path / "run") in f"{held}{maps}" else b"free")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4) == b"free"
    os.close(reader)
    os.close(end)


def test_a_full_file_system_is_an_error_of_create(
    files: KeptFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before a page is touched: a page that is missing then would end the process."""

    def full(file: int, length: int) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tierfall.backends.posix.system.fallocate", full)
    with pytest.raises(StorageFullError):
        files.create("run/1/image", length=2 * MIB)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def receive(files: KeptFiles, key: str, content: bytes) -> int:
    """Receive an object in two ranges; return the number of its file."""
    writer = files.create(key, length=len(content))
    assert isinstance(writer, MappedWriter)
    half = len(content) // 2
    for start, end in ((0, half), (half, len(content))):
        with writer.receiving(start, end - start) as memory:
            memory[:] = content[start:end]
    writer.publish()
    return (Path(files.place) / key).stat().st_ino


def data(seed: int, size_bytes: int = 2 * MIB) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def pages_bytes(folder: Path) -> int:
    """The bytes of all files below a folder, however many names they have."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({status.st_ino: status.st_blocks * 512 for status in found}.values())
