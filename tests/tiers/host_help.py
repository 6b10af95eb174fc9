"""What the tests of host memory share: image files, made, filled and damaged."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.steps import wait_until
from tierfall.core.types.values import Shard
from tierfall.tiers.host import HostTier
from tierfall.tiers.image_file import ImageFile, Region

KIB, MIB = 1 << 10, 1 << 20
SHARED = Path("/dev/shm")
SHARD = Shard(2, 4)
RUN = "gpt"
DEVICE = torch.device("cuda", 0)
PAGE = 4 * KIB
START = 2 * MIB  # the format's numbers, written down a second time: changing them breaks readers
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def scratch() -> Path:
    place = SHARED if SHARED.is_dir() else None
    return Path(tempfile.mkdtemp(prefix="tierfall-test-", dir=place))


def create(path: Path, room_bytes: int = MIB) -> ImageFile:
    return ImageFile.create(path, run=RUN, room_bytes=room_bytes)


def reopen(path: Path, *, writable: bool = True) -> ImageFile:
    return ImageFile.open(path, run=RUN, writable=writable)


def add(
    file: ImageFile, image: bytes, manifest: bytes = b"manifest", commit: bytes = b""
) -> Region:
    """Take, fill and seal."""
    region = file.take(image_bytes=len(image), shard=SHARD)
    region.image[:] = image
    region.seal(manifest=manifest, commit=commit)
    return region


def sealed_file(path: Path) -> None:
    """Leave a sealed image, as a process that died would."""
    file = create(path)
    add(file, b"a" * 10_000, b"manifest a", b"commit a")
    file.close(keep=True)


def host_in(folder: Path, **options: Any) -> HostTier:
    given = {
        "name": "host",
        "run": RUN,
        "slot": 0,
        "shard": SHARD,
        "capacity_bytes": None,
        **options,
    }
    return HostTier(folder=folder, **given)


def put(
    host: HostTier, image: bytes, manifest: bytes = b"manifest", commit: bytes = b""
) -> Region | None:
    """Allocate, fill and seal; None if there is no room."""
    needed = {"image_bytes": len(image), "records_bytes": len(manifest) + len(commit)}
    host.ensure_capacity(**needed)
    region = host.allocate(**needed)
    if region is not None:
        region.image[:] = image
        region.seal(manifest=manifest, commit=commit)
    return region


def prepare(host: HostTier, device: torch.device | None = None) -> None:
    """Prepare the memory, for copies from a device if one was given here before, and wait until it is prepared."""
    host.prepare(device)
    wait_until(lambda: host.is_prepared, "memory is prepared")


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
