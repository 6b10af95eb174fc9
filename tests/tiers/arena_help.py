"""What the tests of the arena share: small arenas, made, filled and damaged."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.steps import wait_until
from tierfall.core.types.values import Shard
from tierfall.tiers.arena.arena import Arena
from tierfall.tiers.arena.region import Region

KIB, MIB = 1 << 10, 1 << 20
SHARED = Path("/dev/shm")
SHARD = Shard(2, 4)
RUN = "gpt"
DEVICE = torch.device("cuda", 0)
PAGE = 4 * KIB
EXTENTS = 2 * MIB  # the format's numbers, written down a second time: changing them breaks readers
BLOCK = 32 * KIB
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def scratch() -> Path:
    place = SHARED if SHARED.is_dir() else None
    return Path(tempfile.mkdtemp(prefix="tierfall-test-", dir=place))


def create(path: Path, capacity_bytes: int = MIB, **options: Any) -> Arena:
    return Arena.create(
        path, run=RUN, shard=SHARD, slot=0, capacity_bytes=capacity_bytes, **options
    )


def prepare(arena: Arena, device: torch.device | None = None) -> None:
    """Prepare the memory, for copies from a device if one was given here before, and wait until it is prepared."""
    arena.prepare(device)
    wait_until(lambda: arena.is_prepared, "memory is prepared")


def add(arena: Arena, image: bytes, manifest: bytes = b"manifest", commit: bytes = b"") -> Region:
    """Allocate, fill and seal."""
    region = arena.allocate(image_bytes=len(image), records_bytes=len(manifest) + len(commit))
    assert region is not None
    region.image[:] = image
    region.seal(manifest=manifest, commit=commit)
    return region


def sealed_arena(path: Path) -> None:
    """Leave an arena with two sealed images, one with marks, as a process that died would."""
    arena = create(path)
    first = add(arena, b"a" * 10_000, b"manifest a", b"commit a")
    first.add_mark(b"pin")
    first.add_mark(b"tag-best")
    add(arena, b"b" * 5000, b"manifest b", b"commit b")
    arena.close(keep=True)


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
