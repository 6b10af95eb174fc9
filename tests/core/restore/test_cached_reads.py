"""Reads from the page cache: into the tensor, hashed there, and read again if they are damaged."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import xxhash
from restore_help import (
    CHUNK,
    SHARD,
    Made,
    Tiers,
    checkpoint,
    holds,
    passed_over,
    state_of,
)

from tierfall.core.copies.chunk_reader import (
    PIECE_BYTES,
    STRAIGHT_BYTES,
    TargetWriter,
    copy_bytes,
)
from tierfall.core.copies.images import StoredImage
from tierfall.core.load.build import Fill
from tierfall.core.types.errors import BackendError, UnreachableError
from tierfall.core.types.values import CheckpointId, Codec, Shard

ONE = CheckpointId(5, 1)


@pytest.mark.parametrize(
    "count", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17]
)
def test_copy_moves_just_these_bytes(count: int) -> None:
    source = ctypes.create_string_buffer(os.urandom(count + 8), count + 8)
    target = ctypes.create_string_buffer(b"\xee" * (count + 8), count + 8)
    copy_bytes(ctypes.addressof(target) + 3, ctypes.addressof(source) + 5, count)
    assert target.raw == b"\xee" * 3 + source.raw[5 : 5 + count] + b"\xee" * 5


# Pieces ----------------------------------------------------------------------------------------------


def fills_of(rng: random.Random) -> list[Fill]:
    """Fills of all lengths, some with several targets, and holes between them."""
    fills, at = [], 0
    for _ in range(rng.randrange(1, 12)):
        at += rng.choice([0, 0, 0, 1, 700, STRAIGHT_BYTES, PIECE_BYTES + 5])
        length = rng.choice([1, 9, 4000, STRAIGHT_BYTES - 1, STRAIGHT_BYTES, 2 * PIECE_BYTES + 3])
        targets = [torch.zeros(length, dtype=torch.uint8) for _ in range(rng.choice([1, 1, 2]))]
        fills.append(Fill(start=at, end=at + length, targets=tuple(targets)))
        at += length
    return fills


def bring(landing: TargetWriter, image: bytes, start: int, end: int) -> list[memoryview]:
    digest, at, views = xxhash.xxh3_128(), start, []
    for view in landing.pieces(start, end, memoryview(bytearray(PIECE_BYTES)), digest):
        assert 0 < view.nbytes <= PIECE_BYTES
        view[:] = image[at : at + view.nbytes]
        at += view.nbytes
        views.append(view)
    assert at == end
    assert digest.digest() == xxhash.xxh3_128_digest(image[start:end])
    return views


@pytest.mark.parametrize("seed", range(10))
def test_every_byte_comes_to_all_its_targets_and_no_other_does(seed: int) -> None:
    rng = random.Random(seed)
    fills = fills_of(rng)
    whole = fills[-1].end + rng.choice([0, 3000])
    image = rng.randbytes(whole)
    landing = TargetWriter(fills)
    cuts = sorted({0, whole, *(rng.randrange(whole) for _ in range(rng.randrange(4)))})
    for start, end in pairwise(cuts):
        if rng.random() < 0.8:
            bring(landing, image, start, end)
            continue
        for fill in fills:  # what was not asked for stays as it was
            low, high = max(fill.start, start), min(fill.end, end)
            for target in fill.targets:
                assert not target[max(0, low - fill.start) : max(0, high - fill.start)].any()
                bring_by_hand(target, image, fill, low, high)
    for fill in fills:
        for target in fill.targets:
            assert target.numpy().tobytes() == image[fill.start : fill.end]


def bring_by_hand(target: torch.Tensor, image: bytes, fill: Fill, low: int, high: int) -> None:
    if high > low:
        wanted = torch.frombuffer(bytearray(image[low:high]), dtype=torch.uint8)
        target[low - fill.start : high - fill.start] = wanted


def test_targets_that_overlap_are_written_once_their_bytes_are_hashed() -> None:
    memory = torch.zeros(3 * STRAIGHT_BYTES, dtype=torch.uint8)
    one, other = memory[: 2 * STRAIGHT_BYTES], memory[STRAIGHT_BYTES:]
    apart = torch.zeros(STRAIGHT_BYTES, dtype=torch.uint8)
    fills, at = [], 0
    for target in (one, other, apart):
        fills.append(Fill(start=at, end=at + len(target), targets=(target,)))
        at += len(target)
    image, digest, start = os.urandom(at), xxhash.xxh3_128(), 0
    scratch = memoryview(bytearray(PIECE_BYTES))
    for view in TargetWriter(fills).pieces(0, at, scratch, digest):
        view[:] = image[start : start + view.nbytes]
        start += view.nbytes
        memory.fill_(0xEE)  # as another thread does, for what lies there too
    assert digest.digest() == xxhash.xxh3_128_digest(image)
    assert apart.numpy().tobytes() == image[-len(apart) :]


# Whole restores --------------------------------------------------------------------------------------


@dataclass
class CachedStore:
    """A stored tier, all of whose images are in the page cache; both are bytes of their own."""

    made: Made
    name: str = "disk"
    cache_never_waits: bool = True
    cache: bytearray = field(default_factory=bytearray)
    from_cache: list[tuple[int, int]] = field(default_factory=list)
    from_disk: list[tuple[int, int]] = field(default_factory=list)
    error: Callable[[int], BackendError | None] = lambda offset: None
    spoils: Callable[[int], bool] = lambda offset: False

    def __post_init__(self) -> None:
        self.made = Made(bytearray(self.made.image), self.made.manifest, self.made.commit)
        self.cache = bytearray(self.made.image)

    def read_manifest(
        self, checkpoint: CheckpointId, shard: Shard, *, length: int | None = None
    ) -> bytes:
        return self.made.manifest.encode()

    def read_stored(self, checkpoint: CheckpointId, shard: Shard) -> bytes:
        raise AssertionError("a raw image has no record of frames")

    def read_into(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        view: memoryview,
        *,
        codec: Codec = Codec.NONE,
    ) -> None:
        self.from_disk.append((offset, view.nbytes))
        view[:] = self.made.image[offset : offset + view.nbytes]
        if self.spoils(offset):
            view[3] ^= 8

    def read_cached(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        end: int,
        views: Iterable[memoryview],
        *,
        codec: Codec = Codec.NONE,
    ) -> bool:
        if not self.cache:
            return False
        for view in views:
            if (error := self.error(offset)) is not None:
                raise error
            self.from_cache.append((offset, view.nbytes))
            view[:] = self.cache[offset : offset + view.nbytes]
            offset += view.nbytes
        assert offset == end
        return True

    def flip(self, chunk: int, *, disk: bool = False) -> None:
        at = self.made.manifest.data_start + (chunk - 1) * CHUNK if chunk else 0
        for image in (self.cache, self.made.image) if disk else (self.cache,):
            image[at + 17] ^= 4


class CachedTiers(Tiers):
    """One tier in the page cache before others that are not."""

    def __init__(self, *others: str) -> None:
        super().__init__("disk", *others)
        for name in self.names:
            self.put(name, checkpoint(5))
        self.store = CachedStore(self.images["disk", ONE].made)
        image: Any = StoredImage(self.store, ONE, SHARD)
        self.images["disk", ONE] = image


@pytest.mark.parametrize("chunk", [0, 5])
def test_a_chunk_that_is_damaged_in_the_cache_alone_is_read_again_from_the_disk(chunk: int) -> None:
    tiers, state = CachedTiers("far"), state_of(-1)
    tiers.store.flip(chunk)
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert len(tiers.store.from_disk) == 1
    assert set(restored.tally.bytes) == {"disk"}
    assert any(f"chunk {chunk} of {ONE} on disk" in each for each in passed_over(restored))


def test_a_cache_that_cannot_be_read_gives_way_to_the_disk() -> None:
    """It was cut short, say, between the question and the read."""
    tiers, state = CachedTiers(), state_of(-1)
    start = tiers.store.made.manifest.data_start
    error = UnreachableError("disk: reading failed")
    tiers.store.error = lambda offset: (
        error if offset >= start and not tiers.store.from_disk else None
    )
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert set(restored.tally.bytes) == {"disk"}


@pytest.mark.parametrize("chunk", [0, 5])
def test_a_chunk_that_came_damaged_from_the_disk_is_read_once_more(chunk: int) -> None:
    """Something on the way may have been at fault, once."""
    tiers, state = CachedTiers("far"), state_of(-1)
    tiers.store.cache.clear()
    start = tiers.store.made.manifest.chunk_range(chunk)[0]
    tiers.store.spoils = lambda offset: (
        offset == start and [o for o, _ in tiers.store.from_disk].count(start) == 1
    )
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert set(restored.tally.bytes) == {"disk"}
    assert any(f"chunk {chunk} of {ONE} on disk" in each for each in passed_over(restored))
