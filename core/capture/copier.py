"""Filling one image: the copies that bring a state's bytes into a region, and the watermark over them.

The image is cut into *segments* (``cutting``), each a run of tensor bytes copied by one call. Any thread may claim the
next segment, in image order: the capture thread does, and so does a training thread that has come to the barrier. What
lies on a device is launched (``device_copies``), and counts when it has landed. A chunk whose last segment is in place
is hashed; the watermark counts the leading chunks that are hashed, hence final. This module knows tensors and
bytes; it knows no tiers, no steps and no optimizers.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch
import xxhash

from tierfall.core.capture.device_copies import (
    CopiesInFlight,
    CopyInFlight,
    Slab,
    SpillBuffer,
    size_of,
)
from tierfall.core.format.records import DIGEST_PREFIX
from tierfall.core.image.segments import HOST, Segment, Segmentation, SegmentPart
from tierfall.core.image.sources import TensorSources, pieces_in
from tierfall.core.image.targets import RegionTargets
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.sampling.image_check import ImageCheck
from tierfall.core.types.errors import CaptureError

logger = logging.getLogger("tierfall")

LOOK_AGAIN_S = 0.2
LANDED_POLL_S = 0.0005


def chunk_digest(view: memoryview) -> str:
    """Return the XXH3-128 digest of a chunk's bytes, as manifests hold it."""
    return DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(view)


class ImageCopier:
    """One image on its way into memory. ``copied``: every source was read, or its copy launched; ``final_chunks`` is
    the watermark; ``digests`` are complete when ``hashed``."""

    def __init__(
        self,
        *,
        targets: RegionTargets,
        memory: memoryview,
        header: bytes,
        cutting: Segmentation,
        sources: TensorSources,
        on_progress: Callable[[int], None],
        streams: Mapping[int, CopyStream] | None = None,
        slab: tuple[int, Slab] | None = None,
        pace: RateLimiter | None = None,
        check: ImageCheck | None = None,
    ) -> None:
        """Copy what is not captured lazily of the ``sources``. ``targets`` and ``memory`` are the same region.

        ``streams`` copy what lies on devices, by the places of ``cutting``; ``slab`` is spare memory at one of them.
        The capture thread keeps to ``pace``; whoever waits does not. ``check`` compares the image with the state as it
        is now.
        """
        self._targets = targets
        self._memory = memory
        self._cutting = cutting
        self._sources = sources
        self._on_progress = on_progress
        self._segments = deque(cutting.segments)
        self._flights = CopiesInFlight(streams or {})
        self._slab = slab
        self._pace = pace
        self._lock = threading.Lock()
        self._copying: set[int] = set()
        self._bells: list[InterruptibleEvent] = []
        self._held: InterruptibleEvent | None = None
        """Rung when the thread that copies alone is done; None while none does."""
        self._missing = cutting.missing.copy()
        self.digests: list[str] = [""] * len(self._missing)
        self.final_chunks = 0
        self._ready: set[int] = {0}
        self._hashed: set[int] = set()
        self.failure: BaseException | None = None
        self.copied = not self._segments
        self.hashed = False
        memory[: len(header)] = header
        self._check = check
        self._addresses: list[int] | None = None
        self._at_barrier = False
        self._copy_at_once()

    @property
    def chunk_count(self) -> int:
        return len(self.digests)

    def _copy_at_once(self) -> None:
        """Copy what is not captured lazily: into the image, or on its own device in the order of the caller's work."""
        for segment in self._cutting.at_once:
            if segment[0].place == HOST:
                self._copy(segment)
            elif left := tuple(piece for piece in segment if not self._clone_there(piece)):
                self._copy(left)
        self._flights.follow_callers()

    def _clone_there(self, piece: SegmentPart) -> bool:
        """Take a copy on the device, to be captured later; False where it has no room."""
        source, copies = self._sources.tensor(piece.index), []
        try:
            self._flights.streams[piece.place].for_caller(lambda: copies.append(source.clone()))
        except torch.OutOfMemoryError:
            return False
        self._sources.replace(piece, copies[0])
        self._segments.appendleft((piece,))
        self.copied = False
        return True

    # Copying ---------------------------------------------------------------------------------------

    def copy_next(self) -> bool:
        """Claim the next segment and copy it, or launch it; False when none is left to claim. Raises what that
        raised."""
        me = threading.get_ident()
        try:
            with self._lock:
                if self.failure is not None or not self._segments:
                    return False
                self._copying.add(me)
                segment = self._segments.popleft()
            if segment[0].place == HOST:
                self._copy(segment)
            else:
                self._launch(segment)
            return True
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            self.fail(CaptureError(f"save: interrupted: {error!r}") if interrupted else error)
            raise
        finally:
            # no function of our own: an interrupt could come before its first line
            self._copying.discard(me)
            self._finish_clone()

    def _finish_clone(self) -> None:
        with self._lock:
            if not self._copying:
                self.copied = self.copied or not (self._segments or self.failure)
                while self._bells:
                    self._bells.pop().ring()

    def fail(self, error: BaseException, *, even_if_hashed: bool = False) -> None:
        """Give the image up: no further segment is claimed, and nothing of it counts; one that is whole stays good."""
        with self._lock:
            if self.failure is None and (even_if_hashed or not self.hashed):
                self.failure = error
            self._segments.clear()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no thread is inside a copy, so that the memory may be given away or the sources changed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._copying:
            bell = InterruptibleEvent()
            self._bells.append(bell)
            left = LOOK_AGAIN_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if self._copying:
                bell.wait(min(left, LOOK_AGAIN_S))
        return True

    def _copy(self, segment: Segment) -> None:
        self._sources.copy(segment, self._targets)
        with self._lock:
            self._count(segment)

    def _count(self, segment: Segment) -> None:
        """Count bytes that are in place; the caller holds the lock."""
        chunk_bytes = self._cutting.chunk_bytes
        for piece in segment:
            at = piece.start
            while at < piece.end:
                index = at // chunk_bytes + 1
                stop = min(piece.end, index * chunk_bytes)
                self._missing[index] -= stop - at
                if self._missing[index] == 0:
                    self._ready.add(index)
                at = stop

    # Devices ---------------------------------------------------------------------------------------

    def _launch(self, segment: Segment) -> None:
        self._flights.launch(
            segment,
            lambda: self._sources.copy(segment, self._targets, non_blocking=True),
            shelter=None,
            lock=self._lock,
        )

    def pass_barrier(self, deadline: float | None) -> bool:
        """Bring it about that the caller's next work on its devices may change the sources, though this returns before
        they are read there: that work waits, the host does not. False where a copy on the host took too long.

        Whoever passes later, by another thread or stream, is held likewise, as long as sources are still read.
        """
        shelter: SpillBuffer | None = None
        waiting: list[tuple[Segment, torch.Tensor]] = []
        try:
            self._held = InterruptibleEvent()
            shelter = self._spill()
            waiting = list(shelter.rooms) if shelter is not None else []
            self._copy_to(waiting)
            while self.copy_next():
                continue
            if not self.wait_idle(_left_s(deadline)):
                return False
            self._flights.hold_callers()
            if shelter is not None:
                self._flights.follow_callers()
                self._launch_from(shelter, waiting)
            return True
        finally:
            # before any call: an interrupt could come before its first line
            held, self._held = self._held, None
            if held is not None:
                held.ring()
            if shelter is not None and waiting:
                shelter.leave(len(waiting))

    def _spill(self) -> SpillBuffer | None:
        """Take spare memory of a device for what has not been claimed there, as far as there is any: it is captured
        from there, and need not be waited for."""
        if self._slab is None:
            return None
        place, slab = self._slab
        with self._lock:
            unclaimed = [segment for segment in self._segments if segment[0].place == place]
            shelter = SpillBuffer.for_last(slab, unclaimed)
            if shelter is not None:
                moved = {id(segment) for segment, _ in shelter.rooms}
                self._segments = deque(s for s in self._segments if id(s) not in moved)
        return shelter

    def _copy_to(self, rooms: list[tuple[Segment, torch.Tensor]]) -> None:
        """Copy sources to where they are sheltered, in the caller's order."""
        if not rooms:
            return

        def copy_all() -> None:
            for segment, room in rooms:
                self._sources.copy_into(room, segment)

        self._flights.streams[rooms[0][0][0].place].for_caller(copy_all)

    def _launch_from(
        self, shelter: SpillBuffer, waiting: list[tuple[Segment, torch.Tensor]]
    ) -> None:
        """Launch what is sheltered; what was launched is taken off ``waiting``."""
        while waiting and self.failure is None:
            segment, room = waiting[0]

            def move(segment: Segment = segment, room: torch.Tensor = room) -> None:
                for piece, source in pieces_in(room, segment):
                    self._targets.flat(piece.start, piece.end).copy_(source, non_blocking=True)

            self._flights.launch(segment, move, shelter=shelter, lock=self._lock)
            del waiting[0]

    @property
    def is_read(self) -> bool:
        """Whether nothing reads the state itself any more, nor will."""
        with self._lock:
            return not (self._segments or self._flights.segments)

    def reads(self, address: int, length: int) -> bool:
        """Say whether a tensor that is captured lazily begins in this memory."""
        if self._addresses is None:
            self._addresses = sorted(self._sources.pointers[index] for index in self._cutting.lazy)
        at = bisect.bisect_left(self._addresses, address)
        return at < len(self._addresses) and self._addresses[at] < address + length

    def finish(self, deadline: float | None, *, alone: bool = True) -> bool:
        """Copy until every source was read, on devices too; False at ``deadline`` on the monotonic clock. While it does
        so ``alone``, the capture thread does nothing."""
        try:
            if alone:
                self._held = InterruptibleEvent()
            while self.copy_next():
                continue
            return self.wait_idle(_left_s(deadline)) and self._wait_copied(deadline)
        finally:
            # before any call: an interrupt could come before its first line
            held, self._held = self._held, None
            if held is not None:
                held.ring()

    def _wait_copied(self, deadline: float | None) -> bool:
        while (flight := self._flights.first) is not None:
            if deadline is not None:
                while not flight.mark.is_done():
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(LANDED_POLL_S)
            self._complete(flight)
        return True

    def _complete(self, flight: CopyInFlight) -> None:
        """Wait for a flight, and take it for done. Raises what the device reports; the flight is over all the same."""
        failure: BaseException | None = None
        try:
            flight.mark.wait()
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error
        with self._lock:
            if not self._flights.has(flight):
                return  # another thread waited for it too
            try:
                if failure is not None:
                    raise failure
                self._count(flight.segment)
            finally:
                self._flights.landed(flight)

    def abandon(self) -> None:
        """After a failure: return when nothing writes into the memory any more."""
        self.wait_idle()
        self._wait_for_held()
        while (flight := self._flights.first) is not None:
            try:
                self._complete(flight)
            except Exception:
                logger.debug("a copy off a device ended in an error", exc_info=True)

    # Hashing ---------------------------------------------------------------------------------------

    def hash_ready(self) -> bool:
        """Hash one chunk whose bytes are all in place; False when there is none at present."""
        with self._lock:
            if self.failure is not None or not self._ready:
                return False
            index = min(self._ready)
            self._ready.remove(index)
        start, end = self._cutting.chunk_range(index)
        digest = chunk_digest(self._memory[start:end])
        with self._lock:
            self.digests[index] = digest
            self._hashed.add(index)
            before = self.final_chunks
            while self.final_chunks in self._hashed:
                self.final_chunks += 1
            after = self.final_chunks
        if after == self.chunk_count:
            self.hashed = True
        if after > before:
            self._on_progress(after)
        return True

    def run(self) -> None:
        """Do all that is left, as the capture thread does: copy or launch in image order, hash what is complete."""
        while True:
            while self._advance():
                continue
            self.wait_idle()
            self._wait_for_held()
            if self.failure is not None or not (self._segments or self._flights):
                break
        while self.hash_ready():
            continue

    def _wait_for_held(self) -> None:
        """Wait while another thread copies alone."""
        while (held := self._held) is not None:
            held.wait(LOOK_AGAIN_S)

    def _advance(self) -> bool:
        """Do one thing; what keeps the bus to a device busy comes first. While a thread is held at the barrier, all
        cores and the whole bandwidth of the memory are for what it copies."""
        self._wait_for_held()
        self._throttle()
        claimed = not self._flights.is_full and self.copy_next()
        while (flight := self._flights.first) is not None and flight.mark.is_done():
            self._complete(flight)
        if (claimed and self._flights) or self.hash_ready() or claimed:
            return True
        flight = self._flights.first
        if flight is not None:
            self._complete(flight)
        return flight is not None

    def _throttle(self) -> None:
        if self._pace is None or self._flights.is_full:
            return
        with self._lock:
            segment = self._segments[0] if self._segments else None
        if segment is not None:
            self._pace.wait_turn(size_of(segment))

    # Changes -----------------------------------------------------------------------------------------

    def check_state(self) -> None:
        """Raise StateChangedError where a source that is captured lazily was changed since save, as far as version
        counters, addresses and a few samples tell. Called at the barrier: then no write to it is under way."""
        self._at_barrier = True
        watched = self._sources.watched  # held while it is read: another thread may release it
        changed = self._sources.changed()
        if not changed and watched and self._check is not None:  # else its memory may not be there
            changed = self._check.changed_now()
        if changed:
            self._sources.refuse(changed)

    def check_image(self) -> None:
        """Raise StateChangedError where the image, which is complete, does not hold the state as it was at save, as far
        as samples and digests tell; it names what counters and addresses tell of, too, as long as no update may have
        begun."""
        if self._check is not None:
            changed = self._check.changed_in(self._memory[self._cutting.data_start :])
            if changed:
                counted = [] if self._at_barrier else self._sources.changed()
                self._sources.refuse(sorted({*changed, *counted}))

    def draw_samples_anew(self) -> None:
        """Let the next image of this cutting be compared in other places."""
        if self._check is not None:
            self._check.plan.samples.used()

    def release_sources(self) -> None:
        """Let go of the state's tensors once they were read, so that a freed model is freed."""
        if not self._flights:
            self._sources.release()


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
