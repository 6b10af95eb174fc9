"""Filling one image: the copies that bring a state's bytes into a region, and the watermark over them.

The image is cut into *segments* (``cutting``), each a run of tensor bytes copied by one call. Any thread may claim the
next segment, in image order: the capture thread does, and so does a training thread that has come to the barrier. A
chunk whose last segment is in place is hashed; the watermark counts the leading chunks that are hashed, hence final.
This module knows tensors and bytes; it knows no tiers, no steps and no optimizers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
import xxhash

from tierfall.core.bell import Bell
from tierfall.core.capture.cutting import Cutting, Piece, Segment
from tierfall.core.capture.targets import Targets
from tierfall.core.errors import CaptureError
from tierfall.core.image import StateView, as_bytes, copy_whole, naming
from tierfall.core.records import DIGEST_PREFIX

LOOK_AGAIN_S = 0.2
_NO_VERSION = -1
_VERSION = attrgetter("_version")


def chunk_digest(view: memoryview) -> str:
    """Return the XXH3-128 digest of a chunk's bytes, as manifests hold it."""
    return DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(view)


class Filling:
    """One image on its way into memory. ``copied``: every source was read; ``final_chunks`` is the watermark;
    ``digests`` are complete when ``hashed``."""

    def __init__(
        self,
        *,
        targets: Targets,
        memory: memoryview,
        header: bytes,
        cutting: Cutting,
        view: StateView,
        on_progress: Callable[[int], None],
    ) -> None:
        """Take the sources, and copy what may change at any time. ``targets`` and ``memory`` are the same region."""
        self._targets = targets
        self._memory = memory
        self._cutting = cutting
        self._tensors: Sequence[torch.Tensor] = view.sources
        self._trails = view.trails
        self._plain = view.plain
        self._on_progress = on_progress
        self._versions = _versions(view.sources)
        self._segments = deque(cutting.segments)
        self._lock = threading.Lock()
        self._copying: set[int] = set()
        self._bells: list[Bell] = []
        self._missing = cutting.missing.copy()
        self.digests: list[str] = [""] * len(self._missing)
        self.final_chunks = 0
        self._ready: set[int] = {0}
        self._hashed: set[int] = set()
        self.failure: BaseException | None = None
        self.copied = not self._segments
        self.hashed = False
        memory[: len(header)] = header
        for piece in cutting.at_once:
            self._copy((piece,))

    @property
    def chunk_count(self) -> int:
        return len(self.digests)

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

    def _copy(self, pieces: Segment) -> None:
        targets, sources = [], []
        with torch.no_grad():
            for piece in pieces:
                source = self._tensors[piece.index]
                if not self._plain[piece.index]:
                    copy_whole(self._targets.flat(piece.start, piece.end), source)
                elif piece.whole:
                    if source.dtype is torch.bool:
                        source = source.view(torch.uint8)  # any byte survives
                    targets.append(self._targets.like(piece.slot, source))
                    sources.append(source)
                else:
                    length = piece.end - piece.start
                    targets.append(self._targets.flat(piece.start, piece.end))
                    sources.append(_part(source, piece.source_start, length))
            if len(targets) == 1:
                targets[0].copy_(sources[0])
            elif targets:
                torch._foreach_copy_(targets, sources)
        for piece in pieces:
            self._check_version(piece)
        self._count(pieces)

    def _check_version(self, piece: Piece) -> None:
        """The tripwire: a tensor that was written to before its copy had ended."""
        before = self._versions[piece.index]
        if before != _NO_VERSION and _version(self._tensors[piece.index]) != before:
            raise CaptureError(
                f"save: {naming.path(self._trails[piece.index])} was changed while it was being captured; nothing of "
                "this step is kept. Change it only inside optimizer.step(), or wrap it in tierfall.item(..., "
                "changes='anytime'), or call wait_captured() before the change, or set capture.mode to blocking"
            )

    def _count(self, pieces: Segment) -> None:
        chunk_bytes = self._cutting.chunk_bytes
        with self._lock:
            for piece in pieces:
                at = piece.start
                while at < piece.end:
                    index = at // chunk_bytes + 1
                    stop = min(piece.end, index * chunk_bytes)
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
        """Do all that is left, as the capture thread does: copy in image order, hash what is complete."""
        while self.copy_next():
            while self.hash_ready():
                continue
        self.wait_idle()
        while self.hash_ready():
            continue

    def verify(self) -> None:
        """Compare every lazily captured source with the image; raises CaptureError naming the first that differs."""
        for piece in (piece for segment in self._cutting.segments for piece in segment):
            source = self._tensors[piece.index]
            target = self._targets.flat(piece.start, piece.end)
            if self._plain[piece.index]:
                flat = _part(source, piece.source_start, piece.end - piece.start)
            else:
                flat = torch.empty_like(target)
                copy_whole(flat, source)
            if not torch.equal(flat.to(target.device), target):
                raise CaptureError(
                    f"save: capture.verify found that {naming.path(self._trails[piece.index])} differs from its "
                    "captured bytes: it was changed between save() and the barrier; nothing of this step is kept. Wrap "
                    "it in tierfall.item(..., changes='anytime'), or call wait_captured() before the change"
                )

    def release_sources(self) -> None:
        """Let go of the state's tensors once they were read, so that a freed model is freed."""
        self._tensors = ()


def _part(source: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Bytes of a plain tensor."""
    flat = as_bytes(source)
    assert flat is not None, "a plain tensor has bytes"
    return flat[start : start + length]


def _versions(sources: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [*map(_VERSION, sources)]
    except RuntimeError:  # an inference tensor is among them
        return [*map(_version, sources)]


def _version(tensor: torch.Tensor) -> int:
    return _NO_VERSION if tensor.is_inference() else tensor._version
