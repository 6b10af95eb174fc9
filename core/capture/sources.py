"""The tensors that one image is made of: how their bytes are read, and whether they were changed meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import torch

from tierfall.core.capture.cutting import Piece, Segment
from tierfall.core.capture.targets import Targets
from tierfall.core.errors import CaptureError
from tierfall.core.image import StateView, as_bytes, copy_whole, naming

_NO_VERSION = -1
_VERSION = attrgetter("_version")


class Sources:
    """The tensors of a view, with their version counters at the moment when they were taken."""

    def __init__(self, view: StateView) -> None:
        self._tensors: list[torch.Tensor] = view.sources.copy()
        self._plain = view.plain
        self._trails = view.trails
        self._versions = _versions(view.sources)

    def tensor(self, piece: Piece) -> torch.Tensor:
        return self._tensors[piece.index]

    def replace(self, piece: Piece, copy: torch.Tensor) -> None:
        """Read a copy from now on, which nobody else knows."""
        self._tensors[piece.index] = copy
        self._versions[piece.index] = _NO_VERSION

    def release(self) -> None:
        self._tensors = []

    def path(self, piece: Piece) -> str:
        return naming.path(self._trails[piece.index])

    # Reading ---------------------------------------------------------------------------------------

    def copy(self, segment: Segment, targets: Targets, *, non_blocking: bool = False) -> None:
        """Copy a segment into its place."""
        to, of = [], []
        with torch.inference_mode(False), torch.no_grad():
            for piece in segment:
                source = self._tensors[piece.index]
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
                    of.append(_part(source, piece))
            if len(to) == 1:
                to[0].copy_(of[0], non_blocking=non_blocking)
            elif to:
                torch._foreach_copy_(to, of, non_blocking=non_blocking)

    def copy_into(self, memory: torch.Tensor, segment: Segment) -> None:
        """Copy a segment into flat memory, one piece after the other."""
        with torch.inference_mode(False), torch.no_grad():
            for piece, target in pieces_in(memory, segment):
                self._read(piece, target)

    def are_in(self, piece: Piece, target: torch.Tensor) -> bool:
        """Say whether a piece's bytes are those of ``target``."""
        if self._plain[piece.index]:
            flat = _part(self._tensors[piece.index], piece)
        else:
            flat = torch.empty_like(target)
            self._read(piece, flat)
        return torch.equal(flat.to(target.device), target)

    def _read(self, piece: Piece, target: torch.Tensor) -> None:
        source = self._tensors[piece.index]
        if self._plain[piece.index]:
            target.copy_(_part(source, piece))
        else:
            copy_whole(target, source)

    # The tripwire ----------------------------------------------------------------------------------

    def check_versions(self, pieces: Iterable[Piece]) -> None:
        """Raise CaptureError for a tensor that was written to since it was taken, as far as its counter tells."""
        for piece in pieces:
            before = self._versions[piece.index]
            now = _version(self._tensors[piece.index])
            if now != before and _NO_VERSION not in (before, now):
                raise CaptureError(
                    f"save: {self.path(piece)} was changed while it was being captured; nothing of this step is kept. "
                    "Change it only inside optimizer.step(), or wrap it in tierfall.item(..., changes='anytime'), or "
                    "call wait_captured() before the change, or set capture.mode to blocking"
                )


def pieces_in(memory: torch.Tensor, segment: Segment) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece of a segment, and where it lies in flat memory that holds one after the other."""
    at = 0
    for piece in segment:
        end = at + piece.end - piece.start
        yield piece, memory[at:end]
        at = end


def _part(source: torch.Tensor, piece: Piece) -> torch.Tensor:
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
