"""The source tensors of one image: reading their bytes, and detecting changes during capture.

Two properties reveal a change without reading bytes: the version counter, which most torch operations increment, and
the address, which changes with the storage. An operation increments the counter when it ends, so the barrier reads it
again, when no operation is in progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NoReturn

import torch

from tierfall.core.image.segments import Segment, SegmentPart
from tierfall.core.image.targets import RegionTargets
from tierfall.core.state.view import StateView
from tierfall.core.tensors import names
from tierfall.core.tensors.tensors import as_bytes, copy_whole
from tierfall.core.types.errors import StateChangedError

_NO_VERSION = -1
_VERSION = attrgetter("_version")


class TensorSources:
    """The tensors of a view, with their version counters at the time of construction."""

    def __init__(self, view: StateView, lazy: Sequence[int]) -> None:
        """``lazy`` are the numbers of the lazily captured tensors."""
        self._tensors: list[torch.Tensor] = view.sources.copy()
        self._plain = view.plain
        self._names = view.names
        self._trails = view.trails
        self.pointers = view.pointers
        self._lazy = lazy
        self._replaced: set[int] = set()
        self.lazy_tensors = [self._tensors[index] for index in lazy]
        """The lazily captured tensors; empty after ``release``."""
        self._versions = _versions(self.lazy_tensors)

    def tensor(self, index: int) -> torch.Tensor:
        return self._tensors[index]

    def replace(self, piece: SegmentPart, copy: torch.Tensor) -> None:
        """Read a private copy of a tensor from now on."""
        self._tensors[piece.index] = copy
        self._replaced.add(piece.index)

    def release(self) -> None:
        self._tensors, self.lazy_tensors = [], []

    # Reading ---------------------------------------------------------------------------------------

    def copy(self, segment: Segment, targets: RegionTargets, *, non_blocking: bool = False) -> None:
        """Copy a segment to its position in the region."""
        to, of = [], []
        with torch.inference_mode(False), torch.no_grad():
            for piece in segment:
                source = self._held(piece.index)
                if not self._plain[piece.index]:
                    place = targets.flat(piece.start, piece.end)
                    copy_whole(place, source, non_blocking=non_blocking)
                elif piece.whole:
                    if source.dtype is torch.bool:
                        source = source.view(torch.uint8)  # any byte survives
                    to.append(targets.typed_view(piece.position, source))
                    of.append(source)
                else:
                    to.append(targets.flat(piece.start, piece.end))
                    of.append(_bytes_of(source, piece))
            if len(to) == 1:
                to[0].copy_(of[0], non_blocking=non_blocking)
            elif to:
                torch._foreach_copy_(to, of, non_blocking=non_blocking)

    def copy_into(self, memory: torch.Tensor, segment: Segment) -> None:
        """Copy a segment to flat memory, one part after the other."""
        with torch.inference_mode(False), torch.no_grad():
            for piece, target in pieces_in(memory, segment):
                self._read(piece, target)

    def _held(self, index: int) -> torch.Tensor:
        """An alias that keeps a tensor's memory alive while it is read: an optimizer may replace ``.data`` of its state
        at any time, which frees the old memory. StateChangedError if that has already happened."""
        alias = self._tensors[index].detach()
        if index not in self._replaced and alias.data_ptr() != self.pointers[index]:
            self.raise_changed([index])
        return alias

    def _read(self, piece: SegmentPart, target: torch.Tensor) -> None:
        source = self._held(piece.index)
        if self._plain[piece.index]:
            target.copy_(_bytes_of(source, piece))
        else:
            copy_whole(target, source)

    # Changes -----------------------------------------------------------------------------------------

    def changed(self) -> list[int]:
        """The numbers of lazily captured tensors whose version counter or address has changed since construction."""
        watched = self.lazy_tensors  # another thread may call ``release``
        if not watched:
            return []
        versions = _versions(watched)
        pointers = [*map(torch.Tensor.data_ptr, watched)]
        expected = [self.pointers[index] for index in self._lazy]
        if versions == self._versions and pointers == expected:
            return []
        rows = zip(self._lazy, versions, self._versions, pointers, expected, strict=True)
        return [
            index
            for index, version, old_version, pointer, old_pointer in rows
            if pointer != old_pointer
            or (version != old_version and _NO_VERSION not in (version, old_version))
        ]

    def raise_changed(self, changed: Sequence[int]) -> NoReturn:
        """Raise StateChangedError for the tensors of these numbers."""
        more = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
        verb = "were" if more else "was"
        raise StateChangedError(
            f"save: {names.path(self._trails[changed[0]])}{more} {verb} changed between save() and the next optimizer "
            "step; nothing of this step is kept. Change it only inside optimizer.step(), or wrap it in "
            "tierfall.item(..., changes='anytime'), or call wait_captured() before the change, or set capture.mode to "
            "blocking",
            tuple(self._names[index] for index in changed),
        )


def pieces_in(memory: torch.Tensor, segment: Segment) -> Iterator[tuple[SegmentPart, torch.Tensor]]:
    """Each part of a segment, and its memory where ``memory`` has one after the other."""
    at = 0
    for piece in segment:
        end = at + piece.end - piece.start
        yield piece, memory[at:end]
        at = end


def _bytes_of(source: torch.Tensor, piece: SegmentPart) -> torch.Tensor:
    """The bytes of a part of a plain tensor."""
    flat = as_bytes(source)
    assert flat is not None, "a plain tensor has bytes"
    return flat[piece.source_start : piece.source_start + piece.end - piece.start]


def _versions(sources: Sequence[torch.Tensor]) -> list[int]:
    try:
        # 0, and no error, for tensors detached from an inference tensor
        return [*map(_VERSION, sources)]
    except RuntimeError:  # an inference tensor is among them
        return [*map(_version, sources)]


def _version(tensor: torch.Tensor) -> int:
    return _NO_VERSION if tensor.is_inference() else tensor._version
