"""A device that is none: tensors in host memory whose copies run on a thread of their own, when a test lets them.

Its order is a real stream's: copies run one after the other, in the order in which they were enqueued, some time later.
The caller's own work runs at once, so that letting it wait means to block.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

import pytest
import torch

from tierfall.core.capture.device_copies import NumberOnDevice
from tierfall.core.capture.spill import DeviceSlab
from tierfall.core.image.segments import HOST
from tierfall.core.runtime import pinned as device_module
from tierfall.core.runtime.memory_copies import MemoryCopies
from tierfall.core.runtime.pinned import PageLock

PATIENCE_S = 20.0
THERE = 0
LEAST_ELEMENTS = 10
"""Tensors of more elements are on the device."""


class FakeMark:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.awaited = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.awaited.set()
        assert self.done.wait(PATIENCE_S), "nobody lets the device go on"
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        return self.done.is_set()


class FakeStream:
    """See ``CopyStream``. ``free`` lets copies run; ``fails`` is what the next of them reports, ``refuses`` what
    comes of launching one; ``blocks`` says whether the caller waits for real, ``batches`` whether it copies by
    address."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.blocks = True
        self.batches = True
        self.fails: BaseException | None = None
        self.no_room = False
        self.refuses: BaseException | None = None
        self.holds = 0
        self.finishes = 0
        self.enqueued: list[FakeMark] = []
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], FakeMark] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, mark = item
            self.free.wait()
            if self.fails is not None:
                mark.error, self.fails = self.fails, None
            else:
                try:
                    work()
                except Exception as error:  # noqa: BLE001 - reported to who waits, as a device does
                    mark.error = error
            mark.done.set()

    def wait_for_caller(self) -> None:
        """The caller's work is done when it was called."""

    def enqueue(self, work: Callable[[], None]) -> FakeMark:
        if self.refuses is not None:
            raise self.refuses
        mark = FakeMark()
        self.enqueued.append(mark)
        self._queue.put((work, mark))
        return mark

    def run_on_caller_stream(self, work: Callable[[], None]) -> None:
        if self.refuses is not None:
            raise self.refuses
        if self.no_room:
            raise torch.OutOfMemoryError("no room")
        work()

    def mark_caller(self) -> FakeMark:
        mark = FakeMark()
        mark.done.set()
        return mark

    def copies_memory(self, memory: torch.Tensor) -> bool:
        return self.batches

    def copy_memory(self, copies: MemoryCopies) -> None:
        for to, of, size in zip(*(column.tolist() for column in copies[:3]), strict=True):
            ctypes.memmove(to, of, size)

    def finish(self) -> None:
        self.finishes += 1
        if self.enqueued:
            assert self.enqueued[-1].done.wait(PATIENCE_S)
        if failures := [mark.error for mark in self.enqueued if mark.error is not None]:
            raise failures[0]

    def make_caller_wait(self) -> None:
        self.holds += 1
        if self.blocks and self.enqueued:
            assert self.enqueued[-1].done.wait(PATIENCE_S)

    def close(self) -> None:
        self.free.set()
        self._queue.put(None)
        self._thread.join(PATIENCE_S)


class OnDevice(torch.Tensor):
    """A tensor in host memory that says it lies on a device. Its views do so too, and what it makes ``new``."""

    is_cpu = False  # type: ignore[assignment]
    device = torch.device("cuda", 0)  # type: ignore[assignment]


class FakeStreams:
    """See ``Streams``; ``stream`` serves every device, None none."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream = stream

    def of(self, device: torch.device) -> FakeStream | None:
        return self.stream


class FakeLocks:
    """Stands for ``core.device`` on a machine with CUDA, which locks pages, or refuses to for a ``reason``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, reason: str = "") -> None:
        self.made: list[PageLock] = []
        self.unlocked: list[int] = []
        self.on_unlock: Callable[[], None] = lambda: None
        self.reason = reason
        monkeypatch.setattr(device_module, "cuda_available", lambda: True)
        monkeypatch.setattr(device_module, "lock_pages", self.lock_pages)
        monkeypatch.setattr(device_module, "_unregister", self.unlock)

    def lock_pages(
        self, address: int, length_bytes: int, on: torch.device | None = None
    ) -> PageLock:
        assert address % mmap.PAGESIZE == 0
        assert length_bytes % mmap.PAGESIZE == 0
        lock = PageLock(
            address=address, length_bytes=length_bytes, locked=not self.reason, reason=self.reason
        )
        self.made.append(lock)
        return lock

    def unlock(self, address: int) -> str:
        self.on_unlock()
        self.unlocked.append(address)
        return ""


class FakePlaces:
    """Puts every tensor that is not tiny on the fake device."""

    def __init__(self, stream: FakeStream, slab: DeviceSlab | None = None) -> None:
        self.stream = stream
        self.streams = {THERE: stream}
        self.without_stream: set[str] = set()
        self.first = None  # the pages of host memory are not locked
        self.memory = slab

    def places_of(self, sources: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return tuple(THERE if s.numel() > LEAST_ELEMENTS else HOST for s in sources)

    def present_value(self, value: torch.Tensor, places: Sequence[int]) -> SupportsFloat:
        return NumberOnDevice(value, self.stream)

    @property
    def slab(self) -> tuple[int, DeviceSlab] | None:
        return None if self.memory is None else (THERE, self.memory)

    def __call__(self, *arguments: Any) -> FakePlaces:
        """Stands where the class does that it takes the place of."""
        return self
