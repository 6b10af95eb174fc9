"""Copies of one chunk's segments to a device: the cost of many small ones, and a device without room."""

from __future__ import annotations

from typing import Any

import torch

from tests.core.fake_device import OnDevice
from tierfall.core.copies.chunk_reader import _copy


class Full(OnDevice):
    """A device without room."""

    def new_empty(self, *size: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no room")


def pieces_of(count: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, int]]]:
    """Pieces of 1 to ``count`` bytes with gaps of 3 between."""
    source = torch.arange(count * (count + 8), dtype=torch.int64).to(torch.uint8)
    starts = [5 + sum(range(1, n)) + 3 * n for n in range(1, count + 1)]
    return source, [(torch.zeros(n, dtype=torch.uint8), s) for n, s in enumerate(starts, 1)]


def landed(source: torch.Tensor, pieces: list[tuple[torch.Tensor, int]]) -> bool:
    return all(torch.equal(t, source[start : start + t.numel()]) for t, start in pieces)


def test_a_device_without_room_gets_its_small_pieces_one_by_one() -> None:
    source, pieces = pieces_of(50)
    _copy(source, [(target.as_subclass(Full), start) for target, start in pieces])
    assert landed(source, pieces)
