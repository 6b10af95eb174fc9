"""Filling one image: the copies that bring a state's bytes into a region, and the watermark over them.

The image is cut into *segments*, each a run of tensor bytes copied by one call. Any thread may claim the next segment,
in image order: the capture thread does, and so does a training thread that has come to the barrier. A chunk whose last
segment is in place is hashed; the watermark counts the leading chunks that are hashed, hence final. This module knows
tensors and bytes; it knows no tiers, no steps and no optimizers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from tierfall.core.bell import Bell
from tierfall.core.errors import CaptureError
from tierfall.core.image import Layout, SourceTensor, as_bytes, copy_whole
from tierfall.core.records import DIGEST_PREFIX, chunk_count, chunk_range
from tierfall.core.values import Changes

SEGMENT_BYTES = 16 << 20
BATCH_BYTES = 1 << 20
LOOK_AGAIN_S = 0.2
_NO_VERSION = -1


def chunk_digest(view: memoryview) -> str:
    """Return the XXH3-128 digest of a chunk's bytes, as manifests hold it."""
    return DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(view)


@dataclass(slots=True)
class _Piece:
    """Bytes of one tensor that go to ``start`` in the image; ``source`` None means the whole tensor at once."""

    slot: int
    start: int
    end: int
    source_start: int


class Filling:
    """One image on its way into memory. ``copied``: every source was read; ``final_chunks`` is the watermark;
    ``digests`` are complete when ``hashed``."""

    def __init__(
        self,
        *,
        target: torch.Tensor,
        memory: memoryview,
        header: bytes,
        layout: Layout,
        tensors: Sequence[SourceTensor],
        chunk_bytes: int,
        on_progress: Callable[[int], None],
    ) -> None:
        """Take the sources. ``target`` and ``memory`` are the same image_bytes of a region."""
        self._target = target
        self._memory = memory
        self._layout = layout
        self._tensors = tensors
        self._chunk_bytes = chunk_bytes
        self._on_progress = on_progress
        self._versions: list[int] = []
        self._bytes: list[torch.Tensor | None] = []
        self._segments: deque[list[_Piece]] = deque()
        self._lock = threading.Lock()
        self._copying: set[int] = set()
        self._bells: list[Bell] = []
        count = chunk_count(layout.image_bytes, layout.data_start, chunk_bytes)
        self.digests: list[str] = [""] * count
        self.final_chunks = 0
        self._missing = [0] * count
        for index in range(1, count):
            start, end = self._range(index)
            self._missing[index] = end - start
        self._ready: set[int] = {0}
        self._hashed: set[int] = set()
        self.failure: BaseException | None = None
        self.copied = False
        self.hashed = False
        memory[: len(header)] = header
        self._plan()

    @property
    def chunk_count(self) -> int:
        return len(self.digests)

    # Planning --------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Copy what may change at any time, and cut the rest into segments."""
        batch: list[_Piece] = []
        batched = 0
        for number, slot in enumerate(self._layout.slots):
            source = self._tensors[slot.index]
            self._versions.append(_version(source.tensor))
            flat = as_bytes(source.tensor)
            self._bytes.append(flat)
            length = slot.end - slot.start
            if length == 0:
                continue
            if source.changes is Changes.ANYTIME:
                self._copy([_Piece(number, slot.start, slot.end, 0)])
                continue
            for piece in self._cut(number, slot.start, slot.end, whole=flat is None):
                size = piece.end - piece.start
                if batch and batched + size > BATCH_BYTES:
                    self._segments.append(batch)
                    batch, batched = [], 0
                batch.append(piece)
                batched += size
        if batch:
            self._segments.append(batch)
        if not self._segments:
            self.copied = True

    def _cut(self, number: int, start: int, end: int, *, whole: bool) -> list[_Piece]:
        """Cut a tensor's range where chunks end, so that a chunk can be final before the tensor is."""
        if whole:
            return [_Piece(number, start, end, 0)]
        pieces = []
        at = start
        while at < end:
            stop = min(end, (at // self._chunk_bytes + 1) * self._chunk_bytes, at + SEGMENT_BYTES)
            pieces.append(_Piece(number, at, stop, at - start))
            at = stop
        return pieces

    # Copying ---------------------------------------------------------------------------------------

    def copy_next(self) -> bool:
        """Claim the next segment and copy it; False when none is left to claim. Raises what the copy raised."""
        me = threading.get_ident()
        try:
            with self._lock:
                if self.failure is not None or not self._segments:
                    return False
                self._copying.add(me)
                segment = self._segments.popleft()
            self._copy(segment)
            return True
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            self.fail(CaptureError(f"save: interrupted: {error!r}") if interrupted else error)
            raise
        finally:
            # no function of our own: an interrupt could come before its first line
            self._copying.discard(me)
            self._left_copy()

    def _left_copy(self) -> None:
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
            bell = Bell()
            self._bells.append(bell)
            left = LOOK_AGAIN_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if self._copying:
                bell.wait(min(left, LOOK_AGAIN_S))
        return True

    def _copy(self, pieces: list[_Piece]) -> None:
        targets, sources = [], []
        data = self._layout.data_start
        for piece in pieces:
            target = self._target[data + piece.start : data + piece.end]
            flat = self._bytes[piece.slot]
            if flat is None:
                copy_whole(target, self._tensors[self._layout.slots[piece.slot].index].tensor)
                continue
            length = piece.end - piece.start
            targets.append(target)
            sources.append(flat[piece.source_start : piece.source_start + length])
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        elif targets:
            torch._foreach_copy_(targets, sources)
        for piece in pieces:
            self._check_version(piece)
        self._count(pieces)

    def _check_version(self, piece: _Piece) -> None:
        """The tripwire: a tensor that was written to before its copy had ended."""
        source = self._tensors[self._layout.slots[piece.slot].index]
        before = self._versions[piece.slot]
        if before != _NO_VERSION and _version(source.tensor) != before:
            raise CaptureError(
                f"save: {source.path} was changed while it was being captured; nothing of this step is kept. Change "
                "it only inside optimizer.step(), or wrap it in tierfall.item(..., changes='anytime'), or call "
                "wait_captured() before the change, or set capture.mode to blocking"
            )

    def _count(self, pieces: list[_Piece]) -> None:
        with self._lock:
            for piece in pieces:
                at = piece.start
                while at < piece.end:
                    index = at // self._chunk_bytes + 1
                    stop = min(piece.end, index * self._chunk_bytes)
                    self._missing[index] -= stop - at
                    if self._missing[index] == 0:
                        self._ready.add(index)
                    at = stop

    # Hashing ---------------------------------------------------------------------------------------

    def hash_ready(self) -> bool:
        """Hash one chunk whose bytes are all in place; False when there is none at present."""
        with self._lock:
            if self.failure is not None or not self._ready:
                return False
            index = min(self._ready)
            self._ready.remove(index)
        start, end = self._range(index)
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
        """Do all that is left, as the capture thread does: copy in image order, hash what is complete."""
        while self.copy_next():
            while self.hash_ready():
                continue
        self.wait_idle()
        while self.hash_ready():
            continue

    def verify(self) -> None:
        """Compare every lazily captured source with the image; raises CaptureError naming the first that differs."""
        data = self._layout.data_start
        for number, slot in enumerate(self._layout.slots):
            source = self._tensors[slot.index]
            flat = self._bytes[number]
            if source.changes is Changes.ANYTIME or slot.start == slot.end:
                continue
            target = self._target[data + slot.start : data + slot.end]
            if flat is None:
                flat = torch.empty_like(target)
                copy_whole(flat, source.tensor)
            if not torch.equal(flat.to(target.device), target):
                raise CaptureError(
                    f"save: capture.verify found that {source.path} differs from its captured bytes: it was changed "
                    "between save() and the barrier; nothing of this step is kept. Wrap it in "
                    "tierfall.item(..., changes='anytime'), or call wait_captured() before the change"
                )

    def release_sources(self) -> None:
        """Let go of the state's tensors once they were read, so that a freed model is freed."""
        self._tensors = ()
        self._bytes = []

    def _range(self, index: int) -> tuple[int, int]:
        layout = self._layout
        return chunk_range(index, layout.image_bytes, layout.data_start, self._chunk_bytes)


def _version(tensor: torch.Tensor) -> int:
    return _NO_VERSION if tensor.is_inference() else tensor._version
