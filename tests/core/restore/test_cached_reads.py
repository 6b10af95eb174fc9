"""Reads from the page cache go into the tensor, and are hashed there."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest
import torch
import xxhash

from tierfall.core.copies.chunk_reader import (
    PIECE_BYTES,
    STRAIGHT_BYTES,
    TargetWriter,
)
from tierfall.core.load.build import Fill


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
