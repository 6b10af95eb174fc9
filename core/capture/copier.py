"""Copies a state's bytes into a region, hashes the chunks, and advances the watermark.

The image is divided into *segments* (``core.image.segments``), each copied by one call. Any thread may claim the next
segment, in image order: the capture thread, and a training thread at the barrier. Copies from a device are launched
asynchronously (``device_copies``), and count when they have completed. A chunk is hashed once all its segments are
copied. The capture thread hashes, and threads that help it if most of the image comes from devices: a training on the
processor needs the cores itself. The watermark is the number of leading chunks that are hashed, hence final. This
module knows tensors and bytes; it knows no tiers, steps or optimizers.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from tierfall.core.capture.device_copies import CopiesInFlight, CopyInFlight
from tierfall.core.capture.spill import DeviceSlab, SpillBuffer, room_of
from tierfall.core.format.records import DIGEST_PREFIX
from tierfall.core.image.segments import HOST, Segment, Segmentation
from tierfall.core.image.sources import TensorSources
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.runtime.threads import helped_by
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.sampling.image_check import ImageCheck
from tierfall.core.types.errors import CaptureError

logger = logging.getLogger("tierfall")

POLL_S = 0.2
DEVICE_POLL_S = 0.0005
LAUNCH_BYTES = 64 << 20
"""Bytes that one call copies from a device: each call costs the host a fraction of a millisecond."""
BARRIER_LAUNCH_BYTES = 2 << 30
"""Bytes of one call at the barrier: training waits until all are made."""
EAGER_BYTES_MAX = 256 << 20
"""Most bytes of the device copies of eager segments. They take memory of the next forward pass until they are read;
what does not fit is copied to host memory before save() returns."""


def chunk_digest(view: memoryview) -> str:
    """The XXH3-128 digest of a chunk, as in manifests."""
    return DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(view)


class ImageCopier:
    """Fills one image. ``copied``: every source was read, or its copy launched; ``final_chunks`` is the watermark;
    ``digests`` are complete when ``hashed``."""

    def __init__(
        self,
        *,
        memory: memoryview,
        header: bytes,
        cutting: Segmentation,
        sources: TensorSources,
        on_progress: Callable[[int], None],
        streams: Mapping[int, CopyStream] | None = None,
        slab: tuple[int, DeviceSlab] | None = None,
        pace: RateLimiter | None = None,
        check: ImageCheck | None = None,
        helpers: int = 0,
    ) -> None:
        """Copy those ``sources`` that are not captured lazily. ``memory`` are the writable bytes of a region.

        ``streams`` copy from devices, by the places of the segmentation ``cutting``; ``slab`` is spare memory on one
        device, with its place. ``pace`` limits the rate of the capture thread, not of a thread at the barrier.
        ``check`` compares the image with the present state. So many ``helpers`` hash with the capture thread if
        most of the image comes from devices.
        """
        with torch.inference_mode(
            False
        ):  # an inference tensor could not be written to outside of that mode
            self._data = torch.frombuffer(memory, dtype=torch.uint8)[cutting.data_start :]
        self._memory = memory
        self._segmentation = cutting
        self._sources = sources
        self._on_progress = on_progress
        self._segments = deque(cutting.segments)
        self._copies = CopiesInFlight(streams or {})
        self._slab = slab
        self._eager: list[SpillBuffer] = []
        self._spill: SpillBuffer | None = None
        self._pace = pace
        self._lock = threading.Lock()
        self._chunk_ready = threading.Condition(self._lock)
        self._copying: set[int] = set()
        self._idle_events: list[InterruptibleEvent] = []
        self._exclusive: InterruptibleEvent | None = None
        """Set when the thread at the barrier, which copies exclusively, is done; None without such a thread."""
        self._missing = cutting.missing.copy()
        self.digests: list[str] = [""] * len(self._missing)
        self.final_chunks = 0
        self._ready: set[int] = {0}
        self._hashed: set[int] = set()
        self._changed: set[int] = set()
        self._released = False
        self._ended = False
        """The capture thread has ended its work on this image."""
        self.failure: BaseException | None = None
        self.copied = not self._segments
        self.hashed = False
        memory[: len(header)] = header
        self._check = check
        self._helpers = helpers if cutting.mostly_on_devices else 0
        self._addresses: list[int] | None = None
        self._past_barrier = False
        self._copy_at_once()

    @property
    def chunk_count(self) -> int:
        return len(self.digests)

    def _copy_at_once(self) -> None:
        """Copy what is not captured lazily: into the image, or to other memory of its own device, in the order of the
        caller's work."""
        by_place: dict[int, list[Segment]] = {}
        for segment in self._segmentation.eager:
            by_place.setdefault(segment.place, []).append(segment)
        for segment in by_place.pop(HOST, ()):
            self._copy(segment)
        for place, segments in by_place.items():
            for segment in segments[self._copy_on_device(place, segments) :]:
                self._copy(segment)
        self._copies.wait_for_callers()

    def _copy_on_device(self, place: int, segments: Sequence[Segment]) -> int:
        """Copy the first segments, as many as fit EAGER_BYTES_MAX, to a block of their device, from which they are
        captured later; return how many: 0 if the device has no memory for them."""
        ends = itertools.accumulate(map(room_of, segments))
        count = sum(end <= EAGER_BYTES_MAX for end in ends)
        stream, made = self._copies.streams[place], list[SpillBuffer]()

        def allocate() -> None:
            device = self._sources.tensor(segments[0][0].index).device
            made.append(SpillBuffer.temporary(segments[:count], device))

        try:
            if count:
                stream.run_on_caller_stream(allocate)
                made[0].fill(self._sources, stream)
        except torch.OutOfMemoryError:
            return 0
        self._eager += made
        self.copied = self.copied and not made
        return count

    # Copying ---------------------------------------------------------------------------------------

    def copy_next(self, launch_bytes: int | None = None, *, of_state: bool = False) -> bool:
        """Claim the next segment and copy it, or launch its copy; False if none is left. Of a device's segments,
        ``launch_bytes`` (None: LAUNCH_BYTES) are copied by one call. ``of_state``: only what is still to be read of the
        state itself. Raises the copy's error."""
        thread = threading.get_ident()
        try:
            with self._lock:
                if self.failure is not None:
                    return False
                self._copying.add(thread)
                segment, spill = self._claim(
                    LAUNCH_BYTES if launch_bytes is None else launch_bytes, of_state
                )
            if not segment:
                return False
            if segment.place == HOST:
                self._copy(segment)
            else:
                self._launch(segment, spill)
            return True
        except BaseException as error:
            self.fail(as_exception(error))
            raise
        finally:
            # Not in a Python function: an interrupt could arrive before its first line.
            self._copying.discard(thread)
            self._after_copy()

    def _claim(self, launch_bytes: int, of_state: bool) -> tuple[Segment, SpillBuffer | None]:
        """Take the next segment out of its queue, and more of the same device as one; an empty one if none is left.
        The caller holds the lock."""
        spill = self._next_spill(of_state)
        queue = self._segments if spill is None else spill.segments
        if not queue:
            return Segment(), None
        segment, more = queue.popleft(), list[Segment]()
        left = launch_bytes - segment.size_bytes
        while segment.place != HOST and queue and queue[0].place == segment.place:
            left -= queue[0].size_bytes
            if left < 0:
                break
            more.append(queue.popleft())
        return segment.joined(more), spill

    def _next_spill(self, of_state: bool = False) -> SpillBuffer | None:
        """What the next segment is copied from; None if it is the state itself, or nothing is left."""
        if of_state:
            return None
        spill = next((each for each in self._eager if each.segments), None)
        return spill if spill is not None or self._segments else self._spill

    def _after_copy(self) -> None:
        with self._lock:
            if not self._copying:
                left = self._segments or any(spill.segments for spill in self._eager)
                self.copied = self.copied or not (left or self.failure)
                while self._idle_events:
                    self._idle_events.pop().set()

    def fail(self, error: BaseException, *, even_if_hashed: bool = False) -> None:
        """Give the image up: no further segment is claimed. A complete one remains valid, unless ``even_if_hashed``."""
        with self._lock:
            if self.failure is None and (even_if_hashed or not self.hashed):
                self.failure = error
            self._segments.clear()
            for spill in self._spills:
                spill.discard()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no thread is inside a copy, so that the memory may be released or the sources changed; False after
        ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._copying:
            event = InterruptibleEvent()
            self._idle_events.append(event)
            left_s = POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return False
            if self._copying:
                event.wait(min(left_s, POLL_S))
        return True

    def _copy(self, segment: Segment) -> None:
        self._sources.copy(segment, self._data)
        with self._lock:
            self._count(segment)

    def _count(self, segment: Segment) -> None:
        """Subtract copied bytes from what the chunks miss; the caller holds the lock."""
        chunk_bytes = self._segmentation.chunk_bytes
        for piece in segment:
            at = piece.start
            while at < piece.end:
                index = at // chunk_bytes + 1
                stop = min(piece.end, index * chunk_bytes)
                self._missing[index] -= stop - at
                if self._missing[index] == 0:
                    self._ready.add(index)
                    self._chunk_ready.notify()
                at = stop

    # Devices ---------------------------------------------------------------------------------------

    def _launch(self, segment: Segment, spill: SpillBuffer | None = None) -> None:
        stream = self._copies.streams[segment.place]

        def copy() -> None:
            if spill is None:
                self._sources.copy(segment, self._data, stream=stream)
            else:
                spill.copy_to(self._data, segment, stream)

        self._copies.launch(segment, copy, spill=spill, lock=self._lock)

    def pass_barrier(self, deadline: float | None) -> bool:
        """Let the caller change the sources next: host copies are complete, and the caller's next work on a device
        waits there for the reads, while the host does not wait. False if host copies take until ``deadline``.

        Later callers, on other threads or streams, are delayed the same way while sources are still being read.
        """
        spill: SpillBuffer | None = None
        try:
            self._exclusive = InterruptibleEvent()
            if self._slab is not None and self._spill is None:
                with self._lock:
                    spill = SpillBuffer.take_last(*self._slab, self._segments)
            while self.copy_next(BARRIER_LAUNCH_BYTES, of_state=True):
                continue
            if not self.wait_idle(_remaining_s(deadline)):
                return False
            if spill is not None:
                self._fill(spill)  # beside the reads, which the caller waits for behind it
            self._copies.make_callers_wait()
            return True
        finally:
            # Before any call: an interrupt could arrive before a function's first line.
            exclusive, self._exclusive = self._exclusive, None
            if spill is not None and self._spill is not spill:
                with self._lock:
                    spill.move_back(self._segments)
            if exclusive is not None:
                exclusive.set()

    def _fill(self, spill: SpillBuffer) -> None:
        """Copy sources to spare memory of their device; the capture thread copies them on, to host memory."""
        spill.fill(self._sources, self._copies.streams[spill.place])
        with self._lock:
            if self.failure is None:
                self._spill = spill

    @property
    def is_read(self) -> bool:
        """Whether nothing reads the state itself, now or later."""
        with self._lock:
            reading = self._segments or self._copying or self._exclusive or self._copies.segments
            return not reading and all(spill.is_filled for spill in self._spills)

    @property
    def _spills(self) -> list[SpillBuffer]:
        return self._eager if self._spill is None else [*self._eager, self._spill]

    @property
    def _spilled(self) -> deque[Segment]:
        """The next segments that are in other memory of their device, and not launched yet; empty if there are none."""
        return next((spill.segments for spill in self._spills if spill.segments), deque())

    @property
    def left_bytes(self) -> int:
        """Bytes of the image that are not copied yet."""
        return sum(self._missing)

    def reads(self, address: int, length: int) -> bool:
        """Whether a lazily captured tensor begins in this memory."""
        if self._addresses is None:
            self._addresses = sorted(
                self._sources.pointers[index] for index in self._segmentation.lazy
            )
        at = bisect.bisect_left(self._addresses, address)
        return at < len(self._addresses) and self._addresses[at] < address + length

    def finish(self, deadline: float | None, *, alone: bool = True) -> bool:
        """Copy until every source has been read, on devices too; False at ``deadline`` on the monotonic clock. With
        ``alone``, the capture thread pauses meanwhile."""
        try:
            if alone:
                self._exclusive = InterruptibleEvent()
            while self.copy_next():
                continue
            return self.wait_idle(_remaining_s(deadline)) and self._wait_copied(deadline)
        finally:
            # Before any call: an interrupt could arrive before a function's first line.
            exclusive, self._exclusive = self._exclusive, None
            if exclusive is not None:
                exclusive.set()

    def _wait_copied(self, deadline: float | None) -> bool:
        while (copy := self._copies.first) is not None:
            while deadline is not None and not copy.event.is_done():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(DEVICE_POLL_S)
            self._complete(copy)
        return True

    def _complete(self, copy: CopyInFlight) -> None:
        """Wait for a copy, and count its bytes. Raises the device's error; the copy has ended then, too."""
        failure: BaseException | None = None
        try:
            copy.event.wait()
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error
        with self._lock:
            if not self._copies.has(copy):
                return  # another thread has completed it
            try:
                if failure is not None:
                    raise failure
                self._count(copy.segment)
            finally:
                self._copies.remove(copy)

    def wait_unused(self) -> None:
        """After a failure: wait until nothing writes to the memory any more."""
        self.wait_idle()
        self._wait_for_exclusive()
        while (copy := self._copies.first) is not None:
            try:
                self._complete(copy)
            except Exception:
                logger.debug("a copy from a device failed", exc_info=True)
        for spill in self._spills:
            spill.close()

    # Hashing ---------------------------------------------------------------------------------------

    def hash_ready(self) -> bool:
        """Hash one chunk whose bytes are all copied, and compare it with what ``check`` knows of it; False if there is
        none at present."""
        with self._lock:
            if self.failure is not None or not self._ready:
                return False
            index = min(self._ready)
            self._ready.remove(index)
        start, end = self._segmentation.chunk_range(index)
        chunk = self._memory[start:end]
        digest = chunk_digest(chunk)
        changed = set[int]()
        if self._check is not None and index:
            changed = self._check.changed_in_chunk(chunk, start - self._segmentation.data_start)
        with self._lock:
            self.digests[index] = digest
            self._changed |= changed
            self._hashed.add(index)
            before = self.final_chunks
            while self.final_chunks in self._hashed:
                self.final_chunks += 1
            self.hashed = self.final_chunks == self.chunk_count
            if self.final_chunks > before:
                self._on_progress(self.final_chunks)
        return True

    def run(self) -> None:
        """The work of the capture thread: copy or launch in image order, and hash complete chunks, until done."""
        name = f"{threading.current_thread().name}-hash"
        with helped_by(self._helpers, self._help_hashing, name=name):
            try:
                self._run()
            finally:
                with self._chunk_ready:
                    self._ended = True
                    self._chunk_ready.notify_all()

    def _run(self) -> None:
        while True:
            while self._advance():
                self._release_read()
            self.wait_idle()
            self._wait_for_exclusive()
            self._release_read()
            if self.failure is not None or not (self._segments or self._spilled or self._copies):
                break
        while self.hash_ready():
            continue

    def _help_hashing(self) -> None:
        """The work of a helper: hash complete chunks until the capture thread has ended."""
        try:
            while not self._ended and self.failure is None:
                self._wait_for_exclusive()
                if not self.hash_ready():
                    with self._chunk_ready:
                        if not (self._ready or self._ended):
                            self._chunk_ready.wait()
        except BaseException as error:  # noqa: BLE001 - reported by the capture thread
            self.fail(as_exception(error))

    def _wait_for_exclusive(self) -> None:
        """Wait while another thread copies exclusively."""
        while (exclusive := self._exclusive) is not None:
            exclusive.wait(POLL_S)

    def _advance(self) -> bool:
        """Do one unit of work, launches first, to keep the bus busy. Pauses while a thread is at the barrier, so that
        its copies have all cores and the whole memory bandwidth."""
        self._wait_for_exclusive()
        self._throttle()
        claimed = not self._copies.is_full and self.copy_next(0 if self._pace else None)
        while (copy := self._copies.first) is not None and copy.event.is_done():
            self._complete(copy)
        if (claimed and self._copies) or self.hash_ready() or claimed:
            return True
        copy = self._copies.first
        if copy is not None:
            self._complete(copy)
        return copy is not None

    def _throttle(self) -> None:
        if self._pace is None or self._copies.is_full:
            return
        with self._lock:
            spill = self._next_spill()
            queue = self._segments if spill is None else spill.segments
            size_bytes = queue[0].size_bytes if queue else 0
        if size_bytes:
            self._pace.acquire(size_bytes)

    # Changes -----------------------------------------------------------------------------------------

    def check_state(self) -> None:
        """Raise StateChangedError if version counters, addresses or a few samples show that a lazily captured source
        has changed since save. Called at the barrier, when no write to the sources is in progress."""
        # A reference for the time of reading: another thread may release the sources.
        watched = self._sources.lazy_tensors
        changed = self._sources.changed()
        if not changed and watched and self._check is not None:  # else the memory may be unmapped
            changed = self._check.changed_now()
        if changed:
            self._sources.raise_changed(changed)

    def on_barrier(self) -> None:
        """The sources may change from now on; called before they do."""
        self._past_barrier = True

    def check_image(self) -> None:
        """Raise StateChangedError if samples and digests show that the complete image differs from the state at save.
        Before the barrier, the error also names tensors whose counters or addresses have changed; later, an update may
        have changed them."""
        if self._check is not None:
            data = self._memory[self._segmentation.data_start :]
            changed = self._check.changed_in(data) | self._changed
            if changed:
                counted = [] if self._past_barrier else self._sources.changed()
                self._sources.raise_changed(sorted({*changed, *counted}))

    def count_check(self) -> None:
        """Count this comparison; other places are sampled from time to time."""
        if self._check is not None:
            self._check.plan.samples.count_use()

    def _release_read(self) -> None:
        """Drop the tensors on devices once all is read, so that a model which leaves its device frees memory there.
        Only writes until now could be in the image; the sums show those that no counter does."""
        on_devices = self._segmentation.on_devices
        if self._released or not on_devices or not self.is_read:
            return
        changed = self._sources.changed()
        # ``_past_barrier`` is read last: the barrier compared them; a step may have changed them since.
        if changed and not self._past_barrier:
            self._sources.raise_changed(changed)
        self._sources.release_some(on_devices)
        self._released = True

    def release_sources(self) -> None:
        """Drop the references to the state's tensors once they have been read, so that a deleted model is freed."""
        if not (self._copies or self._spilled):  # what is copied on has been copied to spare memory
            self._sources.release()


def as_exception(error: BaseException, doing: str = "save") -> Exception:
    """The failure of an image: what ends one thread, such as Ctrl-C, must not end another."""
    if isinstance(error, Exception):
        return error
    failure = CaptureError(f"{doing}: interrupted: {error!r}")
    failure.__cause__ = error
    return failure


def _remaining_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
