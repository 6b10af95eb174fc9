"""Restoring onto a device: copies are queued on their own stream while reading continues; on a fake device."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from restore_help import CHUNK, ELEMENTS, Tiers, checkpoint, flip, holds, state_of

from tests.core.fake_device import FakeLocks, FakeStream, FakeStreams, OnDevice
from tests.steps import wait_until
from tierfall.core.copies import chunk_reader
from tierfall.core.copies.chunk_reader import BufferRing
from tierfall.core.load.fill import plan_fill
from tierfall.core.load.plan import ReadPlan
from tierfall.core.restore.restore import RestoreResult
from tierfall.core.types.errors import RestoreError

PATIENCE_S = 20.0
CHUNKS = 5
DAMAGED = 3
UNTOUCHED = -7.0
BUFFERS = CHUNKS + 2
"""Enough that no reading thread ever waits for one."""


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    made = FakeStream()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def locks(monkeypatch: pytest.MonkeyPatch) -> FakeLocks:
    return FakeLocks(monkeypatch)


@pytest.fixture
def tiers() -> Tiers:
    made = Tiers("host", "disk")
    made.put("disk", checkpoint(1))
    return made


def ring_of(
    stream: FakeStream | None, buffers: int = BUFFERS, chunk_bytes: int = CHUNK
) -> BufferRing:
    return BufferRing(chunk_bytes, count_max=buffers, streams=FakeStreams(stream))  # type: ignore[arg-type]


def blank() -> dict[str, Any]:
    return {**state_of(-1), "w": torch.full((ELEMENTS,), UNTOUCHED)}


class Full(OnDevice):
    """On a device without room."""

    def new_empty(self, *size: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no room")


def onto_device(plan: ReadPlan, kind: type[OnDevice] = OnDevice) -> ReadPlan:
    """Put every tensor of a plan on the device that is none."""
    targets = tuple(
        dataclasses.replace(each, target=each.target.as_subclass(kind)) for each in plan.targets
    )
    return dataclasses.replace(plan, targets=targets)


def bring(tiers: Tiers, state: dict[str, Any], ring: BufferRing | None) -> RestoreResult | None:
    return tiers.fill(lambda header: onto_device(plan_fill(state, header)), ring=ring)


class Bringing(threading.Thread):
    """A restore on a thread of its own, whose device stands still until the test lets it go on."""

    def __init__(self, tiers: Tiers, state: dict[str, Any], ring: BufferRing) -> None:
        super().__init__(daemon=True)
        self._arguments = (tiers, state, ring)
        self.failure: RestoreError | None = None
        self.start()

    def run(self) -> None:
        try:
            bring(*self._arguments)
        except RestoreError as error:
            self.failure = error

    def end(self) -> None:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure


# Bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tier", "buffers"), [("disk", 1), ("disk", BUFFERS), ("host", 2)])
def test_bits_are_the_saved_ones(tier: str, buffers: int, stream: FakeStream) -> None:
    tiers = Tiers("host", "disk")
    tiers.put(tier, checkpoint(1))
    ring, state = ring_of(stream, buffers), blank()
    for _ in range(3):
        state["w"].fill_(UNTOUCHED)
        bring(tiers, state, ring)
        assert holds(state, 1)
    assert len(stream.enqueued) == 3 * CHUNKS
    ring.release()


@pytest.mark.parametrize("kind", [OnDevice, Full])
def test_tensors_of_all_sizes_come_back_bit_for_bit(
    kind: type[OnDevice], stream: FakeStream
) -> None:
    """Hundreds in a chunk, and chunks that one tensor fills; some on the device, some in host memory."""
    torch.manual_seed(0)
    sizes = [*torch.randint(1, 30, (700,)).tolist(), 1, 5000, 9000, 40, 2048]
    kinds = (torch.float32, torch.bfloat16, torch.uint8)
    saved = {
        f"t{number}": torch.randn(size).mul(100).to(kinds[number % 3])
        for number, size in enumerate(sizes)
    }
    tiers = Tiers("disk")
    tiers.put("disk", checkpoint(1, state={**saved, "rng": None}))
    state: dict[str, Any] = {name: torch.zeros_like(t) for name, t in saved.items()}
    ring = ring_of(stream, 2)

    def make_plan(header: Any) -> ReadPlan:
        plan = plan_fill({**state, "rng": None}, header)
        here = torch.rand(len(plan.targets)).lt(0.1).tolist()
        there = onto_device(plan, kind).targets
        targets = (a if stays else b for a, b, stays in zip(plan.targets, there, here, strict=True))
        return dataclasses.replace(plan, targets=tuple(targets))

    tiers.fill(make_plan, ring=ring)
    assert all(torch.equal(state[name], t) for name, t in saved.items())


# Order -----------------------------------------------------------------------------------------------


def test_a_buffer_is_read_into_again_only_when_its_copies_are_done(
    tiers: Tiers, stream: FakeStream
) -> None:
    stream.free.clear()
    state = blank()
    bringing = Bringing(tiers, state, ring_of(stream, 2))
    # Another thread may be reading into the second buffer as one already waits for the first.
    wait_until(lambda: len(stream.enqueued) >= 2 and stream.enqueued[0].awaited.is_set(), "a wait")
    (image,) = tiers.images.values()
    assert len(stream.enqueued) == 2
    assert len(image.reads) == 1 + 2  # the header too
    stream.free.set()
    bringing.end()
    assert holds(state, 1)


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_a_restore_returns_only_when_all_copies_are_done(tier: str, stream: FakeStream) -> None:
    """Until then the image in memory must stay as it is, and whoever calls keeps it for as long."""
    tiers = Tiers("host", "disk")
    tiers.put(tier, checkpoint(1))
    stream.free.clear()
    state = blank()
    bringing = Bringing(tiers, state, ring_of(stream))
    wait_until(lambda: stream.finishes == 1, "the restore waits for its copies")
    assert bringing.is_alive()
    assert len(stream.enqueued) == CHUNKS
    assert bool((state["w"] == UNTOUCHED).all())
    stream.free.set()
    bringing.end()
    assert holds(state, 1)


def test_copies_come_after_what_was_queued_on_the_device(
    tiers: Tiers, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands for the caller's work lands when it is waited for, and would undo a copy made before."""
    state, waited = blank(), []

    def callers_work_ends(device: torch.device) -> None:
        waited.append((device, len(stream.enqueued)))
        state["w"].fill_(UNTOUCHED)

    monkeypatch.setattr(chunk_reader, "synchronize", callers_work_ends)
    bring(tiers, state, ring_of(stream))
    assert waited == [(OnDevice.device, 0)]
    assert holds(state, 1)


# Failures --------------------------------------------------------------------------------------------


def test_a_failure_is_raised_only_when_no_copy_is_under_way(
    tiers: Tiers, stream: FakeStream
) -> None:
    (image,) = tiers.images.values()
    flip(image, DAMAGED)
    stream.free.clear()
    state = blank()
    bringing = Bringing(tiers, state, ring_of(stream))
    wait_until(lambda: stream.finishes == 1, "it failed, and waits for its copies")
    assert bringing.is_alive()
    assert stream.enqueued, "nothing was under way: this test looks at nothing"
    stream.free.set()
    with pytest.raises(RestoreError, match="HALF FILLED"):
        bringing.end()
    assert all(mark.is_done() for mark in stream.enqueued)


def test_no_byte_of_a_damaged_chunk_reaches_a_device(tiers: Tiers, stream: FakeStream) -> None:
    (image,) = tiers.images.values()
    flip(image, DAMAGED)
    state = blank()
    with pytest.raises(RestoreError):
        bring(tiers, state, ring_of(stream))
    start = (DAMAGED - 1) * CHUNK // 4
    assert bool((state["w"][start : start + CHUNK // 4] == UNTOUCHED).all())


def test_what_the_device_reports_fails_the_restore(tiers: Tiers, stream: FakeStream) -> None:
    state = blank()
    stream.fails = RuntimeError("an illegal memory access")
    with pytest.raises(RestoreError, match=r"illegal memory access.*HALF FILLED"):
        bring(tiers, state, ring_of(stream))
    assert all(mark.is_done() for mark in stream.enqueued)
