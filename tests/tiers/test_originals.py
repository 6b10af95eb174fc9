"""Images in host memory that other nodes read: by the keys of a stored tier, from all slots, beside their owners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from arena_help import KIB, MIB

from tierfall.core.format.records import Commit, Lineage, NamedFile
from tierfall.core.types.errors import AccessDeniedError, BackendError, KeyNotFoundError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.arena.arena import Arena, arena_name
from tierfall.tiers.originals import HostOriginals

IMAGES = {rank: Random(rank).randbytes(100 * KIB + rank) for rank in range(2)}


def key_of(rank: int, step: int = 10, run: str = "gpt") -> str:
    return f"{run}/step-{step:08d}-a0001/rank-{rank:05d}-of-00002.safetensors"


def commit_of(rank: int) -> bytes:
    lineage = Lineage(
        run="gpt",
        checkpoint=CheckpointId(10, 1),
        attempt_id="a" * 32,
        ordinal=1,
        started_from=None,
    )
    name = key_of(rank).rpartition("/")[2]
    file = NamedFile(name=name, bytes=len(IMAGES[rank]), digest=None)
    return Commit(
        lineage=lineage, world_size=2, files=(file,), nodes=("n",), wall_time_s=1.0
    ).encode()


@pytest.fixture
def arenas(folder: Path) -> Iterator[list[Arena]]:
    """The slots of two ranks, whose owners live, each with an image."""
    made = []
    for rank, image in IMAGES.items():
        arena = Arena.create(
            folder / arena_name(rank),
            run="gpt",
            shard=Shard(rank, 2),
            slot=rank,
            capacity_bytes=MIB,
        )
        region = arena.allocate(image_bytes=len(image), records_bytes=8 * KIB)
        assert region is not None
        region.image[:] = image
        region.seal(manifest=b"manifest", commit=commit_of(rank))
        made.append(arena)
    yield made
    for arena in made:
        arena.close(keep=False)


@pytest.fixture
def originals(folder: Path) -> Iterator[HostOriginals]:
    backend = HostOriginals(folder, "gpt")
    yield backend
    backend.close()


def read(backend: HostOriginals, key: str, start: int, end: int) -> bytes:
    target = bytearray(end - start)
    backend.read_into(key, start, memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("rank", IMAGES)
def test_an_image_is_read_from_the_slot_that_has_it(
    arenas: list[Arena], originals: HostOriginals, rank: int
) -> None:
    image = IMAGES[rank]
    assert originals.stat(key_of(rank)).bytes == len(image)
    assert read(originals, key_of(rank), 0, len(image)) == image
    assert read(originals, key_of(rank), 1000, 1007) == image[1000:1007]
    with pytest.raises(BackendError, match=f"it ends at {len(image)}"):
        read(originals, key_of(rank), len(image) - 1, len(image) + 1)


@pytest.mark.parametrize(
    "key",
    [
        key_of(0, step=11),
        key_of(0, run="other"),
        key_of(2),
        key_of(0).replace("of-00002", "of-00003"),
        key_of(0) + ".zst",
        "gpt/step-00000010-a0001/commit.json",
        "gpt/latest",
        "gpt",
    ],
)
def test_what_is_no_image_here_is_not_found(
    arenas: list[Arena], originals: HostOriginals, key: str
) -> None:
    with pytest.raises(KeyNotFoundError, match="no image of it is in this memory"):
        originals.stat(key)


def test_an_image_that_comes_later_is_found(folder: Path, originals: HostOriginals) -> None:
    with pytest.raises(KeyNotFoundError):
        originals.stat(key_of(0))
    arena = Arena.create(
        folder / arena_name(0), run="gpt", shard=Shard(0, 2), slot=0, capacity_bytes=MIB
    )
    region = arena.allocate(image_bytes=4, records_bytes=8 * KIB)
    assert region is not None
    region.image[:] = b"data"
    with pytest.raises(KeyNotFoundError):
        originals.stat(key_of(0))  # it is not sealed yet
    region.seal(manifest=b"manifest", commit=commit_of(0))
    assert read(originals, key_of(0), 0, 4) == b"data"
    arena.close(keep=False)


def test_a_damaged_slot_does_not_hide_the_others(
    folder: Path, arenas: list[Arena], originals: HostOriginals
) -> None:
    (folder / arena_name(0)).write_bytes(b"no arena")
    with pytest.raises(KeyNotFoundError):
        originals.stat(key_of(0))
    assert read(originals, key_of(1), 0, 10) == IMAGES[1][:10]


def test_a_folder_that_is_not_there_has_no_image(tmp_path: Path) -> None:
    with pytest.raises(KeyNotFoundError):
        HostOriginals(tmp_path / "missing", "gpt").stat(key_of(0))


def test_nothing_is_written_or_deleted(arenas: list[Arena], originals: HostOriginals) -> None:
    for call in (
        lambda: originals.create(key_of(0)),
        lambda: originals.delete(key_of(0)),
        lambda: originals.delete_some([key_of(0)]),
        lambda: originals.discard_unfinished("gpt/"),
    ):
        with pytest.raises(AccessDeniedError):
            call()
    with pytest.raises(BackendError, match="read by their keys"):
        originals.scan("gpt/")
    assert read(originals, key_of(0), 0, 9) == IMAGES[0][:9]
