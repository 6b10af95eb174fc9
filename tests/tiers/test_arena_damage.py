"""Damaged, hostile and foreign arenas: found in every trial, and refused with what to do."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arena_help import (
    BLOCK,
    EXTENTS,
    MIB,
    PAGE,
    RUN,
    create,
    flip,
    root_only,
    sealed_arena,
)

from tests import forked
from tierfall.core.format import documents
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    IntegrityError,
    NotSupportedError,
)
from tierfall.tiers.arena.arena import Arena

# --- damage -----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_the_header_is_found(path: Path) -> None:
    sealed_arena(path)
    length = len(path.read_bytes()[:PAGE].rstrip(b"\0"))
    source = random.Random(2)
    places = [*range(length), *(source.randrange(length, PAGE) for _ in range(100))]
    for offset in places:
        bit = source.randrange(8)
        flip(path, offset, bit)
        with pytest.raises((IntegrityError, ConfigError), match=f"remove {path}"):
            Arena.attach(path, run=RUN)
        flip(path, offset, bit)
    Arena.attach(path, run=RUN).close(keep=False)


def test_every_flipped_bit_of_a_seal_is_found_and_costs_only_its_region(path: Path) -> None:
    sealed_arena(path)
    used = struct.unpack_from("=I", path.read_bytes(), BLOCK)[0]
    source = random.Random(3)
    places = [*range(8 + used), *(source.randrange(8 + used, PAGE) for _ in range(100))]
    for offset in places:
        bit = source.randrange(8)
        flip(path, BLOCK + offset, bit)
        arena = Arena.attach(path, run=RUN, writable=False)
        assert len(arena.damage) == 1
        assert "control slot 0" in str(arena.damage[0])
        assert [bytes(region.image) for region in arena.regions()] == [b"b" * 5000]
        arena.close(keep=True)
        flip(path, BLOCK + offset, bit)
    Arena.attach(path, run=RUN).close(keep=False)


def test_every_flipped_bit_of_the_marks_is_found(path: Path) -> None:
    sealed_arena(path)
    start = BLOCK + PAGE
    used = struct.unpack_from("=I", path.read_bytes(), start)[0]
    assert used == 2 * (4 + 32) + len(b"pin") + len(b"tag-best")
    arena = Arena.attach(path, run=RUN)
    region = arena.regions()[0]
    assert region.marks() == (b"pin", b"tag-best")
    for offset in range(start, start + 8 + used):
        for bit in range(8):
            flip(path, offset, bit)
            with pytest.raises(IntegrityError, match="marks"):
                region.marks()
            flip(path, offset, bit)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(8))  # a lost page must not read as "no marks": that would unpin
    with pytest.raises(IntegrityError, match="marks"):
        region.marks()
    arena.close(keep=False)


def test_every_flipped_bit_of_the_records_is_found(path: Path) -> None:
    sealed_arena(path)
    arena = Arena.attach(path, run=RUN)
    region = arena.regions()[0]
    start = region.extent.start + 3 * PAGE
    for offset in range(len(b"manifest acommit a")):
        in_manifest = offset < len(b"manifest a")
        flip(path, start + offset, offset % 8)
        damaged, whole = (region.manifest, region.commit)[:: 1 if in_manifest else -1]
        with pytest.raises(IntegrityError, match="differs from the seal's digest"):
            damaged()
        whole()
        flip(path, start + offset, offset % 8)
    assert (region.manifest(), region.commit()) == (b"manifest a", b"commit a")
    arena.close(keep=False)


def forge(path: Path, slot: int, **changes: Any) -> None:
    """Put a seal into a slot that is whole by its digest, and says what no tierfall writes."""
    members: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "offset": EXTENTS,
        "bytes": 2 * PAGE,
        "image_bytes": 100,
        "manifest": {"offset": EXTENTS + PAGE, "bytes": 8, "digest": "sha256:0"},
        "commit": {"offset": EXTENTS + PAGE + 8, "bytes": 8, "digest": "sha256:0"},
    }
    document = documents.seal(members | changes)
    page = struct.pack("=II", len(document), len(document) ^ 0xFFFFFFFF) + document
    with path.open("r+b") as file:
        file.seek((slot + 1) * BLOCK)
        file.write(page.ljust(PAGE, b"\0"))


def record(offset: Any, length: Any) -> dict[str, Any]:
    return {"offset": offset, "bytes": length, "digest": "sha256:0"}


def test_the_forged_seal_is_believed_where_it_is_possible(path: Path) -> None:
    create(path).close(keep=True)
    forge(path, 5)
    arena = Arena.attach(path, run=RUN)
    (region,) = arena.regions()
    assert len(region.image) == 100
    with pytest.raises(IntegrityError):
        region.manifest()
    arena.close(keep=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 0},
        {"offset": BLOCK},
        {"offset": EXTENTS - PAGE},
        {"offset": -PAGE},
        {"offset": EXTENTS + 1},
        {"offset": str(EXTENTS)},
        {"offset": 1 << 70},
        {"bytes": 0},
        {"bytes": 2 * PAGE + 1},
        {"bytes": MIB + PAGE},
        {"bytes": 1 << 62},
        {"bytes": True},
        {"bytes": None},
        {"image_bytes": 0},
        {"image_bytes": PAGE + 1},
        {"image_bytes": 1 << 49},
        {"image_bytes": 1.5},
        {"rank": 1},
        {"world_size": 0},
        {"manifest": None},
        {"manifest": record(EXTENTS, 8)},
        {"manifest": record(0, 8)},
        {"manifest": record(EXTENTS + PAGE, -1)},
        {"manifest": record(EXTENTS + PAGE, 9)},
        {"manifest": {"offset": EXTENTS + PAGE, "bytes": 8}},
        {"commit": record(EXTENTS + 2 * PAGE - 4, 8)},
        {"commit": record(EXTENTS + MIB, 8)},
        {"commit": record(EXTENTS + PAGE + 8, 1 << 40)},
    ],
    ids=repr,
)
def test_impossible_seals_are_damage_and_cost_no_space(path: Path, changes: dict[str, Any]) -> None:
    create(path).close(keep=True)
    forge(path, 5, **changes)
    arena = Arena.attach(path, run=RUN)
    assert len(arena.damage) == 1
    assert arena.regions() == ()
    assert arena.free_bytes == arena.capacity_bytes
    arena.close(keep=False)


def at(offset: int) -> dict[str, Any]:
    return {
        "offset": offset,
        "manifest": record(offset + PAGE, 8),
        "commit": record(offset + PAGE + 8, 8),
    }


def test_overlapping_extents_are_damage_all_of_them(path: Path) -> None:
    create(path).close(keep=True)
    forge(path, 1, **at(EXTENTS) | {"bytes": 8 * PAGE})
    forge(path, 2, **at(EXTENTS + 2 * PAGE))  # inside the first, touching the next
    forge(path, 3, **at(EXTENTS + 4 * PAGE))  # inside the first, but not overlapping the second
    forge(path, 4, **at(EXTENTS + 8 * PAGE))  # right after
    arena = Arena.attach(path, run=RUN)
    assert len(arena.damage) == 3
    assert [region.extent.start for region in arena.regions()] == [EXTENTS + 8 * PAGE]
    arena.close(keep=False)


def test_seal_of_a_newer_tierfall_is_refused_not_dropped(path: Path) -> None:
    create(path).close(keep=True)
    forge(path, 0, offset=0)  # damage before it must stay as it is, too
    body = b'{"format":2,"requires":[]'
    digest = hashlib.sha256(body).hexdigest().encode()
    document = body + b',"digest":"sha256:' + digest + b'"}\n'
    page = struct.pack("=II", len(document), len(document) ^ 0xFFFFFFFF) + document
    with path.open("r+b") as file:
        file.seek(2 * BLOCK)
        file.write(page)
    before = path.read_bytes()
    with pytest.raises(NotSupportedError, match="install the tierfall"):
        Arena.attach(path, run=RUN)
    assert path.read_bytes() == before


# --- refusals of attach -----------------------------------------------------------------------------------------------


def test_link_is_refused(path: Path, folder: Path) -> None:
    create(folder / "real.arena").close(keep=True)
    path.symlink_to(folder / "real.arena")
    with pytest.raises(ConfigError, match="it is a link; remove it"):
        Arena.attach(path, run=RUN)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
@pytest.mark.parametrize("writable", [True, False])
def test_what_is_no_regular_file_is_refused(
    path: Path, make: Callable[[Path], None], writable: bool
) -> None:
    make(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        Arena.attach(path, run=RUN, writable=writable)


@root_only
def test_arena_of_another_user_is_refused(path: Path) -> None:
    create(path).close(keep=True)
    os.chown(path, 12345, -1)
    with pytest.raises(
        ConfigError, match=r"belongs to user 12345, expected \d+: run this as that user"
    ):
        Arena.attach(path, run=RUN)


@root_only
def test_unreadable_arena_is_not_absence(path: Path) -> None:
    """A process without rights on the folder hears "not allowed"."""
    create(path).close(keep=True)
    script = f"""
import os, sys
from pathlib import Path
from tierfall.core.types.errors import AccessDeniedError
from tierfall.tiers.arena.arena import Arena
os.setuid(65534)
try:
    Arena.attach(Path({str(path)!r}), run="gpt")
except AccessDeniedError:
    sys.exit(3)
"""
    done = forked.run(["-c", script])
    assert done.returncode == 3, done.stderr
    assert issubclass(AccessDeniedError, BackendError)


def test_foreign_bytes_are_refused(path: Path) -> None:
    for data in (b"", b"x" * 100, bytes(3 * MIB), os.urandom(3 * MIB)):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"not those of a tierfall arena; remove {path}"):
            Arena.attach(path, run=RUN)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"format":1', b'"format":2'), (b'"requires":[]', b'"requires":["x"]')],
)
def test_header_of_a_newer_format_is_refused(path: Path, old: bytes, new: bytes) -> None:
    create(path).close(keep=True)
    rewrite_header(path, old, new)
    with pytest.raises(NotSupportedError, match=f"install the tierfall that wrote it.*{path}"):
        Arena.attach(path, run=RUN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"run":"gpt"', b'"run":7'),
        (b'"rank":2', b'"rank":4'),
        (b'"slot":0', b'"slot":-1'),
        (b'"capacity_bytes":1048576', b'"capacity_bytes":0'),
        (b'"capacity_bytes":1048576', b'"capacity_bytes":1000000000000000000000'),
        (b'"world_size":4', b'"world_size":"4"'),
    ],
)
def test_header_with_impossible_members_is_damage(path: Path, old: bytes, new: bytes) -> None:
    create(path).close(keep=True)
    rewrite_header(path, old, new)
    with pytest.raises(IntegrityError, match=f"remove {path}"):
        Arena.attach(path, run=RUN)


def rewrite_header(path: Path, old: bytes, new: bytes) -> None:
    """Change the header's document, and give it a digest that fits."""
    document = path.read_bytes()[16:PAGE].rstrip(b"\0")
    body = document[: document.rindex(b',"digest"')]
    assert old in body
    body = body.replace(old, new)
    sealed = body + b',"digest":"sha256:' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    with path.open("r+b") as file:
        file.seek(16)
        file.write(sealed.ljust(PAGE - 16, b"\0"))


def test_arena_of_another_run_is_refused(path: Path) -> None:
    create(path).close(keep=True)
    with pytest.raises(ConfigError, match=r"has run 'gpt', expected 'other'; choose another run"):
        Arena.attach(path, run="other")


@pytest.mark.parametrize("size", [PAGE, EXTENTS - 1, EXTENTS, EXTENTS + MIB - 1])
@pytest.mark.parametrize("writable", [True, False])
def test_truncated_arena_is_damage(path: Path, size: int, writable: bool) -> None:
    create(path).close(keep=True)
    os.truncate(path, size)
    with pytest.raises(IntegrityError, match=f"truncated: {size} bytes.*remove {path}"):
        Arena.attach(path, run=RUN, writable=writable)
    assert path.stat().st_size == size


def test_read_only_attach_changes_nothing(path: Path) -> None:
    sealed_arena(path)
    flip(path, BLOCK + 100, 0)
    before = path.read_bytes()
    arena = Arena.attach(path, run=RUN, writable=False)
    (region,) = arena.regions()
    assert region.image.readonly
    assert region.image == b"b" * 5000
    for refused in (
        lambda: arena.allocate(image_bytes=1, records_bytes=0),
        lambda: arena.grow(2 * MIB),
        lambda: region.add_mark(b"pin"),
        region.release,
        region.tensor,
    ):
        with pytest.raises(ValueError, match="writable=False"):
            refused()
    arena.close(keep=False)
    assert path.read_bytes() == before
