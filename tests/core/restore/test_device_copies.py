"""Copies of one chunk's segments to a device: the cost of many small ones, and a device without room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.fake_device import OnDevice
from tierfall.core.copies.to_device import GATHERED_FROM, _copy


class Ops(TorchDispatchMode):
    """Counts what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize("count", [GATHERED_FROM, 100])
def test_many_small_pieces_cost_one_copy_to_the_device(count: int) -> None:
    source, pieces = pieces_of(count)
    with Ops() as ops:
        _copy(source, pieces)
    assert (ops.seen["copy_"], ops.seen["_foreach_copy_"]) == (1, 1)
    assert landed(source, pieces)


def test_a_few_pieces_take_no_memory_of_the_device() -> None:
    source, pieces = pieces_of(GATHERED_FROM - 1)
    with Ops() as ops:
        _copy(source, pieces)
    assert "new_empty" not in ops.seen
    assert landed(source, pieces)


def test_a_device_without_room_gets_its_small_pieces_one_by_one() -> None:
    source, pieces = pieces_of(50)
    _copy(source, [(target.as_subclass(Full), start) for target, start in pieces])
    assert landed(source, pieces)
