"""One read for several writers: a run of chunks that one worker reads and verifies serves all who want it meanwhile.

Whoever wants a run brings a buffer of its own tier's pool. If another worker is just reading the same bytes of the same
copy, or still writes from them, its buffer is used in place of a read, and the own one is left in exchange: who is done
takes home any buffer that is not written from any more. So no tier waits for another's writes, and no memory is taken
beside the pools. What nobody writes from is forgotten: there is no cache. It knows nothing of how bytes are read.
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
"""How long a worker waits for another's read before it reads for itself."""


class _ReadState(StrEnum):
    READING = "reading"
    READ = "read"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class _SharedRun:
    """A run that somebody reads, or writes from: ``spare`` are the buffers that were left in exchange for its own, one
    for each who takes part but the first."""

    run: CopyRun
    buffer: Buffer
    state: _ReadState = _ReadState.READING
    spare: list[Buffer] = field(default_factory=list)

    def is_settled(self) -> bool:
        return self.state is not _ReadState.READING

    def covers(self, run: CopyRun, buffer: Buffer) -> bool:
        """Say whether ``run`` wants bytes of this one, to be held against the same digests, and may leave ``buffer``
        in exchange."""
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
    """See the module. Each tier in ``pools`` brings its own buffers; only those of the same length are exchanged."""

    def __init__(self, pools: Mapping[str, BufferPool], *, wait_s: float = WAIT_S) -> None:
        """``wait_s``: the most that a worker waits for another's read of a run."""
        self._pools = pools
        self._wait_s = wait_s
        self._held: list[_SharedRun] = []
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, run: CopyRun, read: Callable[[memoryview], None]) -> Iterator[memoryview]:
        """Lend the bytes of a run that lies on a stored tier: another worker's, or what ``read`` puts into a buffer.

        ``read`` verifies what it reads; if it raises, that is raised here, and whoever waited for it reads for itself.
        """
        pool = self._pools[run.tier]
        held, is_mine = self._join(run, pool.borrow(frame_bytes_max(run.end - run.start)))
        try:
            if is_mine:
                self._fill(held, read)
            start = run.start - held.run.start
            yield held.buffer.view[start : start + run.end - run.start]
        finally:
            pool.give_back(self._leave(held))

    def _join(self, run: CopyRun, buffer: Buffer) -> tuple[_SharedRun, bool]:
        """Find the run with somebody else, and leave ``buffer`` in exchange; or hold it anew, and be the one to read it
        (True). Who waits for a read takes part already, so that it is not given up before he looks."""
        deadline = time.monotonic() + self._wait_s
        with self._changed:
            while found := [held for held in self._held if held.covers(run, buffer)]:
                held = next((held for held in found if held.state is _ReadState.READ), found[0])
                held.spare.append(buffer)
                left_s = deadline - time.monotonic()
                self._changed.wait_for(partial(_any_settled, found), max(0.0, left_s))
                if held.state is _ReadState.READ:
                    return held, False
                buffer = self._leave(held)
                if not _any_settled(found):
                    break
            self._held.append(_SharedRun(run, buffer))
            return self._held[-1], True

    def _fill(self, held: _SharedRun, read: Callable[[memoryview], None]) -> None:
        state = _ReadState.FAILED
        try:
            read(held.buffer.view)
            state = _ReadState.READ
        finally:
            with self._changed:
                held.state = state
                if state is _ReadState.FAILED:
                    self._held.remove(held)
                self._changed.notify_all()

    def _leave(self, held: _SharedRun) -> Buffer:
        """Return a buffer to take home: while others are at the shared one, that is one of those left for it."""
        with self._changed:
            if held.spare:
                return held.spare.pop()
            if held.state is not _ReadState.FAILED:
                self._held.remove(held)
            return held.buffer


def _any_settled(found: Sequence[_SharedRun]) -> bool:
    return any(held.is_settled() for held in found)
