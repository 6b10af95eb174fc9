"""The tensors that one image is made of: how their bytes are read, and whether they were changed meanwhile.

Two things tell of a change without a look at the bytes: the version counter, which most of torch's operations raise,
and the address, which another storage has. The counter is raised when an operation ends, so that it is read again at
the barrier, when none is under way any more.
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
    """The tensors of a view, with their version counters at the moment when they were taken."""

    def __init__(self, view: StateView, lazy: Sequence[int]) -> None:
        """``lazy`` are the numbers of those that are captured lazily."""
        self._tensors: list[torch.Tensor] = view.sources.copy()
        self._plain = view.plain
        self._names = view.names
        self._trails = view.trails
        self.pointers = view.pointers
        self._lazy = lazy
        self._replaced: set[int] = set()
        self.watched = [self._tensors[index] for index in lazy]
        """Those that are captured lazily; none once they are released."""
        self._versions = _versions(self.watched)

    def tensor(self, index: int) -> torch.Tensor:
        return self._tensors[index]

    def replace(self, piece: SegmentPart, copy: torch.Tensor) -> None:
        """Read a copy from now on, which nobody else knows."""
        self._tensors[piece.index] = copy
        self._replaced.add(piece.index)

    def release(self) -> None:
        self._tensors, self.watched = [], []

    # Reading ---------------------------------------------------------------------------------------

    def copy(self, segment: Segment, targets: RegionTargets, *, non_blocking: bool = False) -> None:
        """Copy a segment into its place."""
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
                    to.append(targets.like(piece.slot, source))
                    of.append(source)
                else:
                    to.append(targets.flat(piece.start, piece.end))
                    of.append(_bytes_of(source, piece))
            if len(to) == 1:
                to[0].copy_(of[0], non_blocking=non_blocking)
            elif to:
                torch._foreach_copy_(to, of, non_blocking=non_blocking)

    def copy_into(self, memory: torch.Tensor, segment: Segment) -> None:
        """Copy a segment into flat memory, one piece after the other."""
        with torch.inference_mode(False), torch.no_grad():
            for piece, target in pieces_in(memory, segment):
                self._read(piece, target)

    def _held(self, index: int) -> torch.Tensor:
        """Return an alias of a tensor, which keeps the memory until it was read: ``.data`` of what an optimizer keeps
        may be replaced at any moment, and what it was is freed then. Raises StateChangedError where it was already."""
        alias = self._tensors[index].detach()
        if index not in self._replaced and alias.data_ptr() != self.pointers[index]:
            self.refuse([index])
        return alias

    def _read(self, piece: SegmentPart, target: torch.Tensor) -> None:
        source = self._held(piece.index)
        if self._plain[piece.index]:
            target.copy_(_bytes_of(source, piece))
        else:
            copy_whole(target, source)

    # Changes -----------------------------------------------------------------------------------------

    def changed(self) -> list[int]:
        """Return the numbers of the lazily captured tensors that were written to since they were taken, or lie
        elsewhere, as far as counters and addresses tell."""
        watched = self.watched  # another thread may release them
        if not watched:
            return []
        versions = _versions(watched)
        pointers = [*map(torch.Tensor.data_ptr, watched)]
        expected = [self.pointers[index] for index in self._lazy]
        if versions == self._versions and pointers == expected:
            return []
        both = zip(self._lazy, versions, self._versions, pointers, expected, strict=True)
        return [
            index
            for index, now, before, here, there in both
            if here != there or (now != before and _NO_VERSION not in (now, before))
        ]

    def refuse(self, changed: Sequence[int]) -> NoReturn:
        """Raise StateChangedError, which names tensors by their numbers."""
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
    """Each piece of a segment, and where it lies in flat memory that holds one after the other."""
    at = 0
    for piece in segment:
        end = at + piece.end - piece.start
        yield piece, memory[at:end]
        at = end


def _bytes_of(source: torch.Tensor, piece: SegmentPart) -> torch.Tensor:
    """The bytes of a plain tensor that are a piece."""
    flat = as_bytes(source)
    assert flat is not None, "a plain tensor has bytes"
    return flat[piece.source_start : piece.source_start + piece.end - piece.start]


def _versions(sources: Sequence[torch.Tensor]) -> list[int]:
    try:
        # 0, and no error, for what was detached from an inference tensor
        return [*map(_VERSION, sources)]
    except RuntimeError:  # an inference tensor is among them
        return [*map(_version, sources)]


def _version(tensor: torch.Tensor) -> int:
    return _NO_VERSION if tensor.is_inference() else tensor._version
