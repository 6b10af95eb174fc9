"""Copies of verified bytes to devices, on streams of their own, so that reading continues meanwhile.

The caller's tensors need no ``Tensor.record_stream``: all work that was queued on their device has ended before the
first copy, and ``finish`` waits for the last one. Targets in host memory are not copied here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from tierfall.core.load.build import Fill
from tierfall.core.runtime.buffers import Buffer, BufferPool
from tierfall.core.runtime.pinned import cut_at, locked_bounds, synchronize
from tierfall.core.runtime.streams import CopyStream, Streams

GATHERED_FROM = 8
"""From this number of pieces on, a chunk's bytes are copied to the device in one copy, and distributed staged."""

Piece = tuple[torch.Tensor, int]
"""A flat target on a device, and the offset of its bytes in the chunk."""


class DeviceCopies:
    """The copies of one restore to devices. Shared by the reading threads; the owner calls ``finish``."""

    def __init__(self, fills: Sequence[Fill], pool: BufferPool, streams: Streams) -> None:
        """``pool`` lends the buffers that chunks are read into. Waits for all work on the targets' devices: the copy
        streams are not ordered with the caller's streams, or with others that use the targets."""
        self._pool = pool
        self._streams: dict[torch.device, CopyStream | None] = {}
        self._held: list[torch.Tensor] = []
        for device in {t.device for fill in fills for t in fill.targets if not t.is_cpu}:
            synchronize(device)
            self._streams[device] = streams.of(device)

    def launch(
        self, device: torch.device, source: torch.Tensor, pieces: Sequence[Piece], buffer: Buffer
    ) -> None:
        """Queue the copies of a verified chunk ``source`` to its ``pieces`` on ``device``, in the chunk's order.

        ``buffer`` is the buffer of the read. If the chunk is in it, the buffer gets an event for the end of the copies.
        Other memory is kept alive, and must not change, until ``finish``. If this fails, no copy is in progress.
        """
        stream = self._streams[device]
        if stream is None:  # this kind of device has no copy stream
            _copy_each(source, pieces, non_blocking=False)
            return
        in_buffer = buffer.contains(source.data_ptr())
        if in_buffer:
            self._pool.lock_pages(buffer, device)
        else:
            self._held.append(source)
        try:
            event = stream.enqueue(lambda: _copy(source, pieces))
        except BaseException:
            stream.finish()  # a part may be queued
            raise
        if in_buffer:
            buffer.events.append(event)

    def finish(self) -> None:
        """Wait for the end of every copy, on all devices; raises the error of one that failed."""
        with ExitStack() as stack:
            for stream in self._streams.values():
                if stream is not None:
                    stack.callback(stream.finish)
        self._held.clear()


def _copy(source: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Queue copies on the current stream; many small ones through memory of the device, if it has room."""
    staged = _room_for(pieces) if len(pieces) >= GATHERED_FROM else None
    if staged is None:
        _copy_each(source, pieces, non_blocking=True)
        return
    first = pieces[0][1]
    with torch.inference_mode():
        _copy_cut(staged, source[first : first + staged.numel()], non_blocking=True)
        torch._foreach_copy_(
            [target for target, _ in pieces],
            [staged[start - first :][: target.numel()] for target, start in pieces],
        )


def _room_for(pieces: Sequence[Piece]) -> torch.Tensor | None:
    """Allocate device memory for the range from the first piece to the last; None if there is none.

    The memory belongs to the current stream: its next user runs after what is queued there now.
    """
    first, (last, start) = pieces[0][1], pieces[-1]
    try:
        return last.new_empty(start + last.numel() - first)
    except torch.OutOfMemoryError:
        return None


def _copy_each(source: torch.Tensor, pieces: Sequence[Piece], *, non_blocking: bool) -> None:
    with torch.inference_mode():  # inference tensors can be written only in this mode
        for target, start in pieces:
            _copy_cut(target, source[start : start + target.numel()], non_blocking=non_blocking)


def _copy_cut(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    """Copy flat bytes; those of an image in memory may be page-locked in part."""
    for start, end in cut_at(locked_bounds(), source.data_ptr(), source.numel()):
        target[start:end].copy_(source[start:end], non_blocking=non_blocking)
