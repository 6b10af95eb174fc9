"""What a node keeps for others: files are used again, and nobody takes another image's bytes for those of his own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_records import CUT, ONE, begin, image_of, receive, records_of

from tierfall.core.types.errors import (
    IntegrityError,
    KeyNotFoundError,
    LostWriteError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers import host
from tierfall.tiers.host import image_files
from tierfall.tiers.host_folder import RoomReport
from tierfall.tiers.image_file import ImageFile
from tierfall.tiers.kept_images import ImageHere, KeptFolder, KeptImages

SHARD = Shard(0, 2)
TWO, THREE = CheckpointId(2, 1), CheckpointId(3, 1)


@pytest.fixture
def images(tmp_path: Path) -> Iterator[KeptImages]:
    opened = process(tmp_path)
    yield opened
    opened.close(keep=True)


def process(folder: Path, slot: int = 0) -> KeptImages:
    return KeptImages(KeptFolder(folder, "run"), slot)


def kept(folder: Path) -> dict[tuple[CheckpointId, int], ImageHere]:
    found, problems = KeptFolder(folder, "run").images()
    assert not problems
    return {(image.commit.lineage.checkpoint, image.shard.rank): image for image in found}


def read(image: ImageHere) -> bytes:
    data = bytearray(CUT.image_bytes)
    view = memoryview(data)
    image.read(0, [view[:1000], view[1000:]])
    return bytes(data)


def files(folder: Path) -> list[Path]:
    return [path for paths in image_files(folder).values() for path in paths]


# Files -------------------------------------------------------------------------------------------------


def test_the_file_of_a_dropped_image_is_used_again(images: KeptImages, tmp_path: Path) -> None:
    receive(images, ONE)
    receive(images, TWO)
    first = kept(tmp_path)[ONE, 0].path
    images.drop(ONE)
    receive(images, THREE)
    found = kept(tmp_path)
    assert found.keys() == {(TWO, 0), (THREE, 0)}
    assert found[THREE, 0].path == first
    assert read(found[THREE, 0]) == image_of(THREE)
    assert read(found[TWO, 0]) == image_of(TWO)
    assert len(files(tmp_path)) == 2


def test_more_free_files_than_images_are_deleted(images: KeptImages, tmp_path: Path) -> None:
    for step in range(1, 6):
        receive(images, CheckpointId(step, 1))
    for step in range(1, 5):
        images.drop(CheckpointId(step, 1))
    assert len(files(tmp_path)) == 2
    images.drop(CheckpointId(5, 1))
    assert files(tmp_path) == []


def test_an_image_that_has_grown_replaces_a_free_file(images: KeptImages, tmp_path: Path) -> None:
    receive(images, ONE)
    receive(images, TWO)
    images.drop(ONE)
    begin(images, THREE, upload=300, image_bytes=4 * CUT.image_bytes)
    large, small = sorted((path.stat().st_blocks for path in files(tmp_path)), reverse=True)
    assert large * 512 > 4 * CUT.image_bytes > small * 512


def test_an_image_that_does_not_fit_is_refused_before_a_page_is_touched(
    images: KeptImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive(images, ONE)
    receive(images, TWO)

    def full(folder: Path) -> RoomReport:
        return RoomReport(
            folder=folder, file_system_free_bytes=0, memory_free_bytes=None, in_memory=True
        )

    monkeypatch.setattr(host, "measure_room", full)
    with pytest.raises(StorageFullError, match="are free for it on"):
        begin(images, THREE, upload=300)
    assert len(files(tmp_path)) == 2
    images.drop(ONE)
    assert not begin(images, THREE, upload=301), "memory that is used again need not be free"
    with pytest.raises(StorageFullError):
        begin(images, ONE, upload=302, image_bytes=2 * CUT.image_bytes, waiting=(THREE,))


def test_an_image_whose_file_was_removed_does_not_count(images: KeptImages, tmp_path: Path) -> None:
    receive(images, ONE, seals=False)
    for path in files(tmp_path):
        path.unlink()
    manifest, commit = records_of(ONE)
    with pytest.raises(LostWriteError, match="was removed"):
        images.seal(ONE, SHARD, 100, manifest=manifest.encode(), commit=commit.encode())
    receive(images, ONE, upload=101)
    assert read(kept(tmp_path)[ONE, 0]) == image_of(ONE)


def test_free_files_are_deleted_for_an_image_that_needs_their_memory(
    images: KeptImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where fewer ranks start, with more memory each."""
    for step in range(1, 5):
        receive(images, CheckpointId(step, 1))
    for step in range(1, 3):
        images.drop(CheckpointId(step, 1))
    assert len(files(tmp_path)) == 4
    need = 3 * CUT.image_bytes

    def held() -> int:
        return sum(path.stat().st_blocks * 512 for path in files(tmp_path))

    before = held()

    def little(folder: Path) -> RoomReport:
        free_bytes = need // 2 + before - held()
        return RoomReport(
            folder=folder,
            file_system_free_bytes=free_bytes,
            memory_free_bytes=None,
            in_memory=True,
        )

    monkeypatch.setattr(host, "measure_room", little)
    assert not begin(images, CheckpointId(9, 1), upload=900, image_bytes=need)
    assert len(files(tmp_path)) == 3


# What counts -------------------------------------------------------------------------------------------


def test_an_image_counts_once_it_is_sealed_and_outlives_the_process(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        images = process(tmp_path)
        receive(images, ONE)
        receive(images, TWO, seals=False)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert kept(tmp_path).keys() == {(ONE, 0)}
    images = process(tmp_path)
    receive(images, THREE)
    assert len(files(tmp_path)) == 2, "the file of the unsealed one was free"
    images.drop(ONE)
    assert kept(tmp_path).keys() == {(THREE, 0)}
    images.close(keep=False)
    assert files(tmp_path) == []


def test_the_end_of_a_process_leaves_what_the_next_start_has_taken(tmp_path: Path) -> None:
    before = process(tmp_path)
    receive(before, ONE)
    before.close(keep=True)
    ending, following = process(tmp_path), process(tmp_path)
    receive(following, TWO)
    ending.close(keep=False)
    assert set(kept(tmp_path)) == {(ONE, 0), (TWO, 0)}
    following.close(keep=True)


def test_the_first_process_has_the_files_of_slots_that_are_no_more(tmp_path: Path) -> None:
    before = process(tmp_path, 3)
    receive(before, ONE, 1)
    before.close(keep=True)
    first = KeptImages(KeptFolder(tmp_path, "run"), 0, adopts_from=1)
    first.drop(ONE)
    assert kept(tmp_path) == {}
    first.close(keep=False)


def test_what_is_wrong_with_a_slot_that_is_no_more_keeps_no_image_out(tmp_path: Path) -> None:
    """A stranger's file, and one that an old process still uses."""
    (tmp_path / "slot-1.0.image").write_bytes(b"not an image" * 1000)
    old = process(tmp_path, 2)
    receive(old, ONE, 1)
    first = KeptImages(KeptFolder(tmp_path, "run"), 0, adopts_from=1)
    receive(first, TWO)
    first.close(keep=False)
    assert {path.name for path in files(tmp_path)} == {"slot-1.0.image", "slot-2.0.image"}
    old.close(keep=False)


def test_a_damaged_header_hides_no_other_image(images: KeptImages, tmp_path: Path) -> None:
    receive(images, ONE)
    receive(images, TWO)
    with kept(tmp_path)[ONE, 0].path.open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    found, problems = KeptFolder(tmp_path, "run").images()
    assert [image.commit.lineage.checkpoint for image in found] == [TWO]
    assert [problem.is_damage for problem in problems] == [True]
    images.close(keep=True)
    again = process(tmp_path)
    receive(again, THREE)
    assert len(files(tmp_path)) == 2, "the file is used again"
    again.close(keep=True)


# Receiving -----------------------------------------------------------------------------------------------


def test_an_image_of_an_earlier_start_that_is_damaged_is_sent_again(tmp_path: Path) -> None:
    before = process(tmp_path)
    receive(before, ONE)
    before.close(keep=True)
    path = kept(tmp_path)[ONE, 0].path
    data = bytearray(path.read_bytes())
    data[(2 << 20) + 5000] ^= 1
    path.write_bytes(data)
    images = process(tmp_path)
    assert not begin(images, ONE, attempt_id="a" * 32)
    assert kept(tmp_path) == {}
    images.close(keep=True)


def test_damage_in_another_processs_file_does_not_hide_what_is_sent_again(tmp_path: Path) -> None:
    other = process(tmp_path, 0)
    receive(other, ONE)
    path = kept(tmp_path)[ONE, 0].path
    with path.open("r+b") as file:
        file.seek((2 << 20) + 5000)
        file.write(b"damage")
    images = process(tmp_path, 1)
    assert not begin(images, ONE, attempt_id="a" * 32)
    receive(images, ONE)
    assert read(kept(tmp_path)[ONE, 0]) == image_of(ONE)
    receive(other, TWO)
    images.close(keep=True)
    other.close(keep=True)


def test_an_image_that_is_discarded_leaves_nothing(images: KeptImages, tmp_path: Path) -> None:
    receive(images, ONE, seals=False)
    images.discard(ONE, SHARD, 100)
    receive(images, TWO)
    images.discard(TWO, SHARD, 199)
    assert kept(tmp_path).keys() == {(TWO, 0)}, "a request about an earlier upload came late"
    images.discard(TWO, SHARD, 200)
    assert kept(tmp_path) == {}
    with pytest.raises(LostWriteError), images.receiving(ONE, SHARD, 100, 0, 1):
        pass


def test_the_next_image_of_a_sender_gives_up_what_it_does_not_wait_for(
    images: KeptImages, tmp_path: Path
) -> None:
    for id in (ONE, TWO):
        receive(images, id, seals=False)
    assert len(files(tmp_path)) == 1, "the first one was given up"
    begin(images, THREE, upload=300, waiting=(TWO,))
    assert len(files(tmp_path)) == 2
    manifest, commit = records_of(TWO)
    images.seal(TWO, SHARD, 200, manifest=manifest.encode(), commit=commit.encode())
    assert read(kept(tmp_path)[TWO, 0]) == image_of(TWO)


def test_a_request_that_comes_late_or_twice_takes_no_place(
    images: KeptImages, tmp_path: Path
) -> None:
    """The server was slow: the sender has begun again meanwhile, or has sent the request once more."""
    begin(images, TWO, upload=3)
    begin(images, ONE, upload=4, waiting=(TWO,))
    with images.receiving(ONE, SHARD, 4, 0, 1000) as memory:
        memory[:] = image_of(ONE)[:1000]
    for late in (1, 2, 3):
        with pytest.raises(LostWriteError, match="a newer upload"):
            begin(images, ONE, upload=late)
    assert not begin(images, ONE, upload=4)
    data = image_of(ONE)
    with images.receiving(ONE, SHARD, 4, 1000, len(data) - 1000) as memory:
        memory[:] = data[1000:]
    manifest, commit = records_of(ONE)
    images.seal(ONE, SHARD, 4, manifest=manifest.encode(), commit=commit.encode())
    assert begin(images, ONE, upload=4), "it is there"
    assert read(kept(tmp_path)[ONE, 0]) == data
    with images.receiving(TWO, SHARD, 3, 0, 1):
        pass  # it still waits


def test_of_one_request_that_comes_twice_at_once_one_takes_memory(
    images: KeptImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = KeptImages._allocate

    def slow(self: KeptImages, *arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(KeptImages, "_allocate", real)
        receive(images, ONE, seals=False)
        return real(self, *arguments, **more)

    monkeypatch.setattr(KeptImages, "_allocate", slow)
    assert not begin(images, ONE, upload=100)
    manifest, commit = records_of(ONE)
    images.seal(ONE, SHARD, 100, manifest=manifest.encode(), commit=commit.encode())
    assert read(kept(tmp_path)[ONE, 0]) == image_of(ONE)


def test_bytes_that_come_late_reach_no_other_image(images: KeptImages, tmp_path: Path) -> None:
    """A broken connection still writes to an image that was given up."""
    begin(images, ONE, upload=1)
    with images.receiving(ONE, SHARD, 1, 0, 1000) as memory:
        receive(images, TWO)
        memory[:] = bytes(1000)
    receive(images, THREE)
    assert read(kept(tmp_path)[TWO, 0]) == image_of(TWO)
    assert read(kept(tmp_path)[THREE, 0]) == image_of(THREE)


def test_an_image_is_not_sealed_while_bytes_arrive(images: KeptImages, tmp_path: Path) -> None:
    receive(images, ONE, seals=False)
    manifest, commit = (record.encode() for record in records_of(ONE))
    with (
        images.receiving(ONE, SHARD, 100, 0, 1000),
        pytest.raises(UnreachableError, match="still writes"),
    ):
        images.seal(ONE, SHARD, 100, manifest=manifest, commit=commit)
    images.seal(ONE, SHARD, 100, manifest=manifest, commit=commit)
    images.seal(ONE, SHARD, 100, manifest=manifest, commit=commit)
    assert len(kept(tmp_path)) == 1


# Reading -------------------------------------------------------------------------------------------------


def test_an_image_that_has_left_its_file_is_gone_and_not_damaged(
    images: KeptImages, tmp_path: Path
) -> None:
    receive(images, ONE)
    receive(images, TWO)
    image = kept(tmp_path)[ONE, 0]
    images.drop(ONE)
    for look in (image.manifest, image.verify, lambda: read(image)):
        with pytest.raises(KeyNotFoundError, match="left memory"):
            look()
    receive(images, THREE)
    with pytest.raises(KeyNotFoundError, match="left memory"):
        read(image)


def test_a_file_that_is_used_again_while_it_is_opened_gives_no_bytes(
    images: KeptImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive(images, ONE)
    receive(images, TWO)
    image = kept(tmp_path)[ONE, 0]
    real = ImageFile._map

    def map_late(self: ImageFile) -> None:
        monkeypatch.setattr(ImageFile, "_map", real)
        images.drop(ONE)
        receive(images, THREE, seals=False)
        real(self)

    monkeypatch.setattr(ImageFile, "_map", map_late)
    with pytest.raises(KeyNotFoundError, match="left memory"):
        read(image)


@pytest.mark.parametrize("is_sealed_again", [False, True])
def test_a_file_that_is_used_again_during_a_read_gives_no_bytes(
    images: KeptImages,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_sealed_again: bool,
) -> None:
    receive(images, ONE)
    image = kept(tmp_path)[ONE, 0]
    real = ImageFile.read_into

    def read_into(self: ImageFile, start: int, view: memoryview) -> None:
        monkeypatch.setattr(ImageFile, "read_into", real)
        images.drop(ONE)
        receive(images, TWO, seals=is_sealed_again)
        real(self, start, view)

    monkeypatch.setattr(ImageFile, "read_into", read_into)
    with pytest.raises(KeyNotFoundError):
        read(image)


def test_damage_is_found_by_a_comparison_with_the_digests(
    images: KeptImages, tmp_path: Path
) -> None:
    receive(images, ONE)
    image = kept(tmp_path)[ONE, 0]
    image.verify()
    with image.path.open("r+b") as file:
        file.seek((2 << 20) + 100_000)
        file.write(b"damage")
    with pytest.raises(IntegrityError, match="does not match its digest"):
        image.verify()
