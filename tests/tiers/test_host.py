"""The host tier: when its memory is taken and how much, what an earlier start left in it, and when it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arena_help import KIB, MIB, flip

from tierfall.core.capture.snapshot import ON_PEERS
from tierfall.core.format.records import Commit, Lineage, NamedFile
from tierfall.core.types.errors import CapacityError, ConfigError, IntegrityError
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.tiers.arena.arena import Arena, arena_name, extent_bytes
from tierfall.tiers.arena.region import Region
from tierfall.tiers.host import HostTier

SHARD = Shard(0, 1)
IMAGE_BYTES = 100 * KIB
RECORDS_BYTES = 8 * KIB


def commit_of(step: int, run: str = "gpt") -> Commit:
    return Commit(
        lineage=Lineage(
            run=run,
            checkpoint=CheckpointId(step, 1),
            attempt_id="a" * 32,
            ordinal=step,
            started_from=None,
        ),
        world_size=1,
        files=(NamedFile(name="rank-00000-of-00001.safetensors", bytes=IMAGE_BYTES, digest=None),),
        nodes=("n",),
        wall_time_s=1.0,
    )


def host_in(folder: Path, **options: Any) -> HostTier:
    given = {"run": "gpt", "capacity_bytes": None, **options}
    return HostTier(name="host", folder=folder, slot=0, shard=SHARD, **given)


def room_for(host: HostTier, image_bytes: int = IMAGE_BYTES) -> Region | None:
    return host.allocate(image_bytes=image_bytes, records_bytes=RECORDS_BYTES)


def put(host: HostTier, step: int, run: str = "gpt") -> Region:
    host.ensure_capacity(image_bytes=IMAGE_BYTES, records_bytes=RECORDS_BYTES)
    region = room_for(host)
    assert region is not None
    region.image[:] = bytes([step]) * IMAGE_BYTES
    region.seal(manifest=b"manifest", commit=commit_of(step, run).encode())
    return region


# How much --------------------------------------------------------------------------------------------


def test_an_image_that_outgrew_the_memory_makes_it_grow_and_views_stay_valid(folder: Path) -> None:
    host = host_in(folder)
    first = put(host, 1)
    view = first.image
    host.ensure_capacity(image_bytes=5 * IMAGE_BYTES, records_bytes=RECORDS_BYTES)
    assert host.capacity_bytes >= 10 * IMAGE_BYTES
    assert room_for(host, 5 * IMAGE_BYTES) is not None
    assert bytes(view[:4]) == b"\x01" * 4
    assert [c.id.step for c in host.list().copies] == [1]
    before = host.capacity_bytes
    host.ensure_capacity(image_bytes=IMAGE_BYTES, records_bytes=RECORDS_BYTES)
    assert host.capacity_bytes == before
    host.close(keep=False)


def test_memory_of_an_earlier_start_grows_to_what_is_asked_for_now_and_not_beyond(
    folder: Path,
) -> None:
    small = host_in(folder, capacity_bytes=128 * KIB)
    put(small, 1)
    small.close(keep=True)
    host = host_in(folder, capacity_bytes=256 * KIB)
    assert host.capacity_bytes == 128 * KIB
    host.ensure_capacity(image_bytes=IMAGE_BYTES, records_bytes=RECORDS_BYTES)
    assert host.capacity_bytes == 256 * KIB
    assert room_for(host) is not None
    host.close(keep=False)


def test_memory_that_cannot_grow_for_two_images_grows_for_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with a small /dev/shm, when the optimizer's state appears after the first save."""
    host = host_in(folder)
    put(host, 1)
    real = Arena.grow
    one = extent_bytes(image_bytes=4 * IMAGE_BYTES, records_bytes=RECORDS_BYTES)

    def refuse(arena: Arena, capacity_bytes: int, progress: object = None) -> None:
        if capacity_bytes > one:
            raise CapacityError(f"no room for {capacity_bytes}")
        real(arena, capacity_bytes)

    monkeypatch.setattr(Arena, "grow", refuse)
    for _ in range(2):
        host.ensure_capacity(image_bytes=4 * IMAGE_BYTES, records_bytes=RECORDS_BYTES)
        assert host.capacity_bytes == one
    assert len([r for r in caplog.records if "continues with" in r.getMessage()]) == 1
    with pytest.raises(CapacityError, match="no room for"):
        host.ensure_capacity(image_bytes=5 * IMAGE_BYTES, records_bytes=RECORDS_BYTES)
    host.close(keep=False)


# What was left ---------------------------------------------------------------------------------------


def test_what_was_sealed_is_there_for_the_next_start_and_nothing_else(folder: Path) -> None:
    host = host_in(folder, capacity_bytes=MIB)
    for step in (3, 1):
        put(host, step)
    assert room_for(host) is not None  # filling, when the process dies
    host.close(keep=True)
    after = host_in(folder)
    listing = after.list()
    assert [c.id.step for c in listing.copies] == [1, 3]
    assert {c.state for c in listing.copies} == {CopyState.SEALED}
    assert {c.bytes for c in listing.copies} == {IMAGE_BYTES}
    assert listing.damaged == ()
    held = after.images()[CheckpointId(3, 1)]
    assert bytes(held.region.image[:2]) == b"\x03\x03"
    assert held.commit == commit_of(3)
    assert after.free_bytes == MIB - 2 * extent_bytes(
        image_bytes=IMAGE_BYTES, records_bytes=RECORDS_BYTES
    )
    after.close(keep=False)


def test_the_next_start_sees_which_images_peer_memory_had_committed(folder: Path) -> None:
    host = host_in(folder)
    put(host, 1).add_mark(ON_PEERS)
    put(host, 2)
    host.close(keep=True)
    after = host_in(folder)
    assert [copy.on_peers for copy in after.list().copies] == [True, False]
    after.close(keep=False)


def test_damaged_records_are_distinguished_and_their_room_can_be_had_again(folder: Path) -> None:
    host = host_in(folder, capacity_bytes=256 * KIB)
    put(host, 1)
    put(host, 2)
    host.close(keep=True)
    data = host.path.read_bytes()
    at = data.index(commit_of(2).encode())
    flip(host.path, at + 20, 3)
    after = host_in(folder)
    listing = after.list()
    assert [c.id.step for c in listing.copies] == [1]
    (damage,) = listing.damaged
    assert isinstance(damage, IntegrityError)
    assert room_for(after) is None
    after.release_damaged()
    assert after.list().damaged == ()
    assert room_for(after) is not None
    assert [c.id.step for c in after.list().copies] == [1]
    after.close(keep=False)


# The end ---------------------------------------------------------------------------------------------


def test_a_file_in_the_way_that_is_no_arena_is_never_overwritten(folder: Path) -> None:
    path = folder / arena_name(0)
    host = host_in(folder, capacity_bytes=MIB)
    path.write_bytes(b"mine")
    with pytest.raises((ConfigError, IntegrityError)):
        host_in(folder, capacity_bytes=MIB)
    with pytest.raises(ConfigError):
        host.allocate_now()
    assert path.read_bytes() == b"mine"


# The file is removed by others -----------------------------------------------------------------------


def test_after_a_removal_the_next_image_is_in_a_new_file_and_the_old_ones_are_read_on(
    folder: Path,
) -> None:
    host = host_in(folder, capacity_bytes=MIB)
    first = put(host, 1)
    host.path.unlink()
    assert not host.file_exists()
    host.replace_file()
    assert host.file_exists()
    assert host.regions_without_file() == [first]
    second = put(host, 2)
    assert bytes(first.image) == bytes([1]) * IMAGE_BYTES
    assert set(host.images()) == {CheckpointId(1, 1), CheckpointId(2, 1)}
    first.release()
    assert host.regions_without_file() == []
    host.replace_file()
    assert set(host.images()) == {CheckpointId(2, 1)}
    host.close(keep=True)
    assert second.is_discarded is False
    again = host_in(folder)
    assert set(again.images()) == {CheckpointId(2, 1)}
    again.close(keep=False)


def test_the_removed_memory_is_used_on_while_there_is_no_room_for_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_in(folder, capacity_bytes=MIB)
    put(host, 1)
    host.path.unlink()
    monkeypatch.setattr("tierfall.tiers.arena.folder._memory_free_bytes", lambda: 0)
    with pytest.raises(CapacityError):
        host.replace_file()
    put(host, 2)
    assert len(host.regions_without_file()) == 2
    host.close(keep=False)


def test_another_file_of_the_name_is_left_as_it_is(folder: Path) -> None:
    host = host_in(folder, capacity_bytes=MIB)
    put(host, 1)
    host.path.unlink()
    host.path.write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="another one has its name by now; it is left as it is"):
        host.replace_file()
    host.close(keep=False)
    assert host.path.read_bytes() == b"theirs"
