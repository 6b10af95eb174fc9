"""One read for several writers: workers of several tiers that need the same chunk range share one buffer.

A worker borrows a buffer of its own tier's pool. If another worker is reading the same bytes of the same copy, or still
writes from them, the worker uses that buffer and leaves its own one in exchange. A worker that is done returns any
buffer that is not in use to its pool. So no tier waits for another's writes, and no memory is used beyond the pools. A
buffer that nobody writes from is reused at once: there is no cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.runtime.buffers import Buffer, BufferPool
from tierfall.core.scheduler.ledger.tasks import CopyRun

WAIT_S = 5.0
"""How long a worker waits for another's read before it reads itself."""


class _ReadState(StrEnum):
    READING = "reading"
    READ = "read"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class _SharedRun:
    """A chunk range that workers read or write from. ``spare`` are the buffers that all workers but the first left in
    exchange."""

    run: CopyRun
    buffer: Buffer
    state: _ReadState = _ReadState.READING
    spare: list[Buffer] = field(default_factory=list)

    def is_settled(self) -> bool:
        return self.state is not _ReadState.READING

    def covers(self, run: CopyRun, buffer: Buffer) -> bool:
        """Return whether this buffer contains the bytes of ``run``, checked against the same digests, and ``buffer``
        has the same length, so that it can be exchanged."""
        mine = self.run
        assert mine.manifest is not None
        assert run.manifest is not None
        return (
            (mine.source, mine.id, mine.shard) == (run.source, run.id, run.shard)
            and mine.start <= run.start
            and run.end <= mine.end
            and len(self.buffer.view) == len(buffer.view)
            and mine.manifest.digests[mine.first : mine.stop][
                run.first - mine.first : run.stop - mine.first
            ]
            == run.manifest.digests[run.first : run.stop]
        )


class SharedReads:
    """See the module. ``pools`` are by tier; only buffers of the same length are exchanged."""

    def __init__(self, pools: Mapping[str, BufferPool], *, wait_s: float = WAIT_S) -> None:
        """``wait_s``: how long a worker waits for another's read."""
        self._pools = pools
        self._wait_s = wait_s
        self._ranges: list[_SharedRun] = []
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, run: CopyRun, read: Callable[[memoryview], None]) -> Iterator[memoryview]:
        """Lend the bytes of a chunk range of a stored tier: another worker's, or what ``read`` fills a buffer with.

        ``read`` verifies what it reads. If it raises, so does this method, and workers that waited read themselves.
        """
        pool = self._pools[run.tier]
        shared, is_mine = self._join(run, pool.borrow(frame_bytes_max(run.end - run.start)))
        try:
            if is_mine:
                self._fill(shared, read)
            start = run.start - shared.run.start
            yield shared.buffer.view[start : start + run.end - run.start]
        finally:
            pool.return_buffer(self._leave(shared))

    def _join(self, run: CopyRun, buffer: Buffer) -> tuple[_SharedRun, bool]:
        """Share another worker's buffer and leave ``buffer`` in exchange; or register ``buffer``, to be filled by the
        caller (True). A worker that waits for a read counts as a user of it, so that the buffer stays registered."""
        deadline = time.monotonic() + self._wait_s
        with self._changed:
            while found := [one for one in self._ranges if one.covers(run, buffer)]:
                shared = next((one for one in found if one.state is _ReadState.READ), found[0])
                shared.spare.append(buffer)
                left_s = deadline - time.monotonic()
                self._changed.wait_for(partial(_any_settled, found), max(0.0, left_s))
                if shared.state is _ReadState.READ:
                    return shared, False
                buffer = self._leave(shared)
                if not _any_settled(found):
                    break
            self._ranges.append(_SharedRun(run, buffer))
            return self._ranges[-1], True

    def _fill(self, shared: _SharedRun, read: Callable[[memoryview], None]) -> None:
        state = _ReadState.FAILED
        try:
            read(shared.buffer.view)
            state = _ReadState.READ
        finally:
            with self._changed:
                shared.state = state
                if state is _ReadState.FAILED:
                    self._ranges.remove(shared)
                self._changed.notify_all()

    def _leave(self, shared: _SharedRun) -> Buffer:
        """Return a buffer for the caller's pool: while others use the shared one, one of its spare buffers."""
        with self._changed:
            if shared.spare:
                return shared.spare.pop()
            if shared.state is not _ReadState.FAILED:
                self._ranges.remove(shared)
            return shared.buffer


def _any_settled(found: Sequence[_SharedRun]) -> bool:
    return any(one.is_settled() for one in found)
