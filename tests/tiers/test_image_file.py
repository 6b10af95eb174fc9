"""Image files: filling, sealing, reading back, damage, whose they are, and the format byte by byte."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_help import (
    KIB,
    MIB,
    PAGE,
    RUN,
    SHARD,
    START,
    add,
    create,
    flip,
    reopen,
    root_only,
    sealed_file,
)

from tests import forked
from tierfall.core.format import documents
from tierfall.core.runtime import pinned
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    CapacityError,
    ConfigError,
    IntegrityError,
    LockError,
    NotSupportedError,
    TierfallError,
)
from tierfall.tiers.image_file import ImageFile

# An image -------------------------------------------------------------------------------------------


def test_what_is_unsealed_is_readable_here_and_nowhere_else(path: Path) -> None:
    file = create(path)
    region = add(file, b"given up")
    region.unseal()
    assert (region.sealed, region.is_discarded, file.is_free) == (False, True, False)
    assert region.image == b"given up"
    for late in (
        region.unseal,
        region.manifest,
        region.commit,
        region.note_on_peers,
        lambda: region.seal(manifest=b"m", commit=b""),
    ):
        with pytest.raises(ValueError, match=r"not sealed yet|sealed already"):
            late()
    other = reopen(path, writable=False)
    assert other.is_free
    other.close(keep=True)
    region.release()
    assert file.is_free
    file.close(keep=False)


def test_a_released_image_cannot_be_read_and_its_file_is_used_again(path: Path) -> None:
    file = create(path)
    first = add(file, b"x" * 5000)
    first.release()
    first.release()
    second = add(file, b"y" * 500, b"other", b"commit")
    with pytest.raises(ValueError, match="was released"):
        _ = first.image
    assert (second.image, second.manifest(), second.commit()) == (b"y" * 500, b"other", b"commit")
    assert not second.on_peers
    file.close(keep=False)


def test_records_have_a_bound_that_says_so(path: Path) -> None:
    file = create(path, 2 * PAGE)
    region = file.take(image_bytes=100, shard=SHARD)
    with pytest.raises(CapacityError, match="records_bytes"):
        region.seal(manifest=b"m" * PAGE, commit=b"c")
    region.seal(manifest=b"m" * PAGE, commit=b"")
    file.close(keep=False)


def test_closing_keeps_living_views_valid(path: Path) -> None:
    file = create(path)
    region = add(file, b"x" * 5000)
    view = region.image
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    file.close(keep=False)
    file.close(keep=False)
    assert view == b"x" * 5000
    assert int(tensor.sum()) == 5000 * ord("x")
    with pytest.raises(ValueError, match="closed"):
        region.note_on_peers()
    region.release()


def test_closing_deletes_no_file_of_another(path: Path) -> None:
    file = create(path)
    path.unlink()
    path.write_bytes(b"somebody else's")
    assert not file.exists()
    file.close(keep=False)
    assert path.read_bytes() == b"somebody else's"


def test_a_file_that_is_in_use_does_not_look_old(path: Path) -> None:
    """Cleaners of temporary files go by age, and stores into a mapping change no time."""
    file = create(path)
    old_s = time.time() - 11 * 24 * 3600
    os.utime(path, (old_s, old_s))
    add(file, b"a" * 100)
    assert file.exists()
    assert time.time() - path.stat().st_mtime < 3600
    file.close(keep=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_images_are_pinned_on_a_real_device(path: Path) -> None:
    file = create(path)
    assert file.touch_some()
    assert file.lock_some(torch.device("cuda")) == ""
    region = file.take(image_bytes=500_000, shard=SHARD)
    tensor = torch.frombuffer(region.image, dtype=torch.uint8)
    assert tensor.is_pinned()
    source = torch.randint(0, 256, (500_000,), dtype=torch.uint8, device="cuda")
    tensor.copy_(source, non_blocking=True)
    pinned.synchronize()
    region.seal(manifest=b"", commit=b"")
    del tensor
    file.close(keep=True)
    again = reopen(path)
    assert again.region is not None
    assert bytes(again.region.image) == bytes(source.cpu().numpy())
    again.close(keep=False)


# The format -----------------------------------------------------------------------------------------


def test_format_is_as_documented(path: Path) -> None:
    """Read a file with nothing but struct, json and hashlib."""
    file = create(path)
    image = random.Random(9).randbytes(5000)
    add(file, image, b"the manifest", b"the commit record").note_on_peers()
    file.close(keep=True)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert MIB < path.stat().st_blocks * 512 < START, "between the header and the image is a hole"
    data = path.read_bytes()

    assert data[:16] == b"tierfall image\n\0"
    length, complement = struct.unpack_from("=II", data, 16)
    assert complement == length ^ 0xFFFFFFFF
    header = json.loads(data[24 : 24 + length])
    assert list(header)[:2] == ["format", "requires"]
    assert list(header)[-1] == "digest"
    assert (header["run"], header["rank"], header["world_size"]) == (RUN, 2, 4)
    assert data[START:][: header["image_bytes"]] == image
    at = START + 2 * PAGE
    for name, text in (("manifest", b"the manifest"), ("commit", b"the commit record")):
        assert data[at:][: header[name]["bytes"]] == text
        assert header[name]["digest"] == "sha256:" + hashlib.sha256(text).hexdigest()
        at += len(text)
    assert not any(data[24 + length : PAGE - 8])
    assert struct.unpack_from("=II", data, PAGE - 8) == (1, 0xFFFFFFFE)


# Damage ---------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_the_header_is_found(path: Path) -> None:
    sealed_file(path)
    length = len(path.read_bytes()[:PAGE].rstrip(b"\0"))
    source = random.Random(2)
    places = [*range(length), *(source.randrange(length, PAGE) for _ in range(100))]
    for offset in places:
        bit = source.randrange(8)
        flip(path, offset, bit)
        if offset < 16:
            with pytest.raises(ConfigError, match=f"remove {path}"):
                reopen(path, writable=False)
        else:
            file = reopen(path, writable=False)
            assert isinstance(file.damage, IntegrityError), offset
            assert not file.is_free
            file.close(keep=True)
        flip(path, offset, bit)
    reopen(path).close(keep=False)


def test_every_flipped_bit_of_the_records_is_found(path: Path) -> None:
    sealed_file(path)
    file = reopen(path)
    region = file.region
    assert region is not None
    start = START + 3 * PAGE
    for offset in range(len(b"manifest acommit a")):
        in_manifest = offset < len(b"manifest a")
        flip(path, start + offset, offset % 8)
        damaged, whole = (region.manifest, region.commit)[:: 1 if in_manifest else -1]
        with pytest.raises(IntegrityError, match="differs from the digest in its header"):
            damaged()
        whole()
        flip(path, start + offset, offset % 8)
    assert (region.manifest(), region.commit()) == (b"manifest a", b"commit a")
    file.close(keep=False)


MEMBERS: dict[str, Any] = {
    "run": RUN,
    "rank": 0,
    "world_size": 1,
    "image_bytes": 100,
    "manifest": {"bytes": 8, "digest": "sha256:0"},
    "commit": {"bytes": 8, "digest": "sha256:0"},
}


def forge(path: Path, data: bytes) -> None:
    """Put a document into a header that is whole by its word, and says what no tierfall writes."""
    page = b"tierfall image\n\0" + struct.pack("=II", len(data), len(data) ^ 0xFFFFFFFF) + data
    path.write_bytes(page.ljust(START, b"\0") + bytes(MIB))


def test_the_forged_header_is_believed_if_it_is_possible(path: Path) -> None:
    forge(path, documents.seal(MEMBERS))
    file = reopen(path)
    assert file.region is not None
    assert len(file.region.image) == 100
    with pytest.raises(IntegrityError):
        file.region.manifest()
    file.close(keep=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": 7},
        {"image_bytes": 0},
        {"image_bytes": -1},
        {"image_bytes": MIB},
        {"image_bytes": 1 << 49},
        {"image_bytes": 1.5},
        {"image_bytes": True},
        {"image_bytes": None},
        {"rank": 1},
        {"world_size": 0},
        {"world_size": "4"},
        {"manifest": None},
        {"manifest": {"bytes": -1, "digest": "sha256:0"}},
        {"manifest": {"bytes": MIB, "digest": "sha256:0"}},
        {"manifest": {"bytes": 8}},
        {"commit": {"bytes": 1 << 40, "digest": "sha256:0"}},
    ],
    ids=repr,
)
@pytest.mark.parametrize("writable", [True, False])
def test_impossible_headers_are_damage(path: Path, changes: dict[str, Any], writable: bool) -> None:
    forge(path, documents.seal(MEMBERS | changes))
    file = reopen(path, writable=writable)
    assert isinstance(file.damage, IntegrityError)
    assert file.region is None
    if writable:
        file.clear()
        assert file.is_free
    file.close(keep=True)


def newer_document(old: bytes = b'"format":1', new: bytes = b'"format":2') -> bytes:
    document = documents.seal(MEMBERS)
    body = document[: document.rindex(b',"digest"')].replace(old, new)
    return body + b',"digest":"sha256:' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"format":1', b'"format":2'), (b'"requires":[]', b'"requires":["x"]')],
)
def test_an_image_of_a_newer_format_is_not_called_damaged(
    path: Path, old: bytes, new: bytes
) -> None:
    forge(path, newer_document(old, new))
    file = reopen(path)
    assert isinstance(file.damage, NotSupportedError)
    assert "install the tierfall that wrote it" in str(file.damage)
    file.close(keep=True)
    assert path.exists()


@pytest.mark.parametrize("size", [PAGE, START - 1, START, START + 4 * PAGE - 1])
def test_a_truncated_image_is_damage(path: Path, size: int) -> None:
    sealed_file(path)
    os.truncate(path, size)
    file = reopen(path, writable=False)
    assert isinstance(file.damage, IntegrityError)
    assert "truncated" in str(file.damage)
    file.close(keep=True)
    assert path.stat().st_size == size


@pytest.mark.parametrize("data", [b"", bytes(100), bytes(3 * MIB)])
def test_what_a_kill_left_of_a_creation_is_a_free_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    file = reopen(path)
    assert file.is_free
    assert file.room_bytes == (MIB if len(data) > MIB else 0)
    file.close(keep=True)
    assert not path.exists()


# Whose it is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"x" * 100, os.urandom(3 * MIB)], ids=["few", "many"])
def test_foreign_bytes_are_refused_and_stay(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"not those of an image in memory; remove {path}"):
        reopen(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
@pytest.mark.parametrize("writable", [True, False])
def test_what_is_no_regular_file_is_refused(
    path: Path, make: Callable[[Path], None], writable: bool
) -> None:
    make(path)
    with pytest.raises(ConfigError, match=r"no regular file|not a regular file"):
        reopen(path, writable=writable)


def test_a_link_is_refused(path: Path) -> None:
    sealed_file(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="a link"):
        reopen(path)


def test_an_image_of_another_run_is_refused(path: Path) -> None:
    sealed_file(path)
    with pytest.raises(ConfigError, match=r"of run 'gpt', expected 'other'; choose another run"):
        ImageFile.open(path, run="other", writable=True)
    reopen(path).close(keep=False)


@root_only
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    sealed_file(path)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345, expected \d+: run this as that"):
        reopen(path)


@root_only
def test_an_unreadable_file_is_not_absence(path: Path) -> None:
    """A process without rights on the folder hears "not allowed"."""
    sealed_file(path)
    script = f"""
import os, sys
from pathlib import Path
from tierfall.core.types.errors import AccessDeniedError
from tierfall.tiers.image_file import ImageFile
os.setuid(65534)
try:
    ImageFile.open(Path({str(path)!r}), run="gpt", writable=True)
except AccessDeniedError:
    sys.exit(3)
"""
    done = forked.run(["-c", script])
    assert done.returncode == 3, done.stderr
    assert issubclass(AccessDeniedError, BackendError)


def test_two_processes_never_write_one_file_and_a_forked_child_holds_none(path: Path) -> None:
    file = create(path)
    add(file, b"image")
    with pytest.raises(LockError, match="another process of this run uses it"):
        reopen(path)
    reopen(path, writable=False).close(keep=True)
    file.close(keep=False)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_forked_child_that_lives_on_does_not_hold_the_lock(path: Path, end: str) -> None:
    """As a worker that loads data does, for some seconds."""
    script = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from host_help import add, create
file = create(Path({str(path)!r}))
add(file, b"image")
child = os.fork()
if not child:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
if {end!r} == "close":
    file.close(keep=True)
os.kill(os.getpid(), 9)
"""
    ran = forked.run(["-c", script])
    child = int(ran.stdout)
    try:
        file = reopen(path)
        assert file.region is not None
        assert file.region.image == b"image"
        file.close(keep=False)
    finally:
        os.kill(child, 9)


def test_a_reader_changes_nothing(path: Path) -> None:
    sealed_file(path)
    before = path.read_bytes()
    file = reopen(path, writable=False)
    region = file.region
    assert region is not None
    assert region.image.readonly
    assert region.image == b"a" * 10_000
    for refused in (region.release, region.note_on_peers, file.clear):
        with pytest.raises(ValueError, match="opened for reading"):
            refused()
    file.close(keep=False)
    assert path.read_bytes() == before


def test_creation_replaces_no_file(path: Path) -> None:
    sealed_file(path)
    before = path.read_bytes()
    with pytest.raises(TierfallError):
        create(path)
    assert path.read_bytes() == before


def test_memory_that_is_read_is_not_touched(path: Path) -> None:
    file = create(path, 32 * MIB)
    add(file, b"i" * (24 * MIB))
    file.close(keep=True)
    again = reopen(path)
    assert again.region is not None
    view = memoryview(bytearray(24 * MIB))
    again.region.read_into(0, view)
    assert bytes(view[:3]) == b"iii"
    assert view[-1] == ord("i")
    assert resident_bytes(path) < MIB
    del view
    again.close(keep=False)


def resident_bytes(path: Path) -> int:
    """How much of a file's mappings is in this process's page table."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            found += int(line.split()[1]) * KIB
    return found
