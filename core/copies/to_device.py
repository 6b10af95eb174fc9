"""Verified bytes on their way onto devices: copies on streams of their own, so that reading goes on meanwhile.

The caller's tensors are safe without ``Tensor.record_stream``: all that was queued on their device has ended before the
first copy, and ``finish`` waits for the last one. What lies in host memory is not copied here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from tierfall.core.load.build import Fill
from tierfall.core.runtime.buffers import Buffer, BufferPool
from tierfall.core.runtime.pinned import synchronize
from tierfall.core.runtime.streams import CopyStream, Streams

GATHERED_FROM = 8
"""From so many pieces on, what a chunk holds for a device goes there in one copy, and is laid out there."""

Piece = tuple[torch.Tensor, int]
"""A flat target on a device, and where in the chunk its bytes begin."""


class DeviceCopies:
    """The copies of one restore onto devices. Reading threads share it; whoever makes it calls ``finish``."""

    def __init__(self, fills: Sequence[Fill], pool: BufferPool, streams: Streams) -> None:
        """``pool`` lends the buffers that chunks are read into. Waits for all that is queued on the targets' devices:
        these streams' order is not the caller's, nor that of others who read or write the targets."""
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

        ``buffer`` is what the chunk was read with: where it lies there, the buffer gets the mark of their end. Memory
        elsewhere is held, and must stay as it is, until ``finish``. Where this fails, nothing is under way any more.
        """
        stream = self._streams[device]
        if stream is None:  # a device without streams of ours
            _copy_each(source, pieces, non_blocking=False)
            return
        in_buffer = buffer.contains(source.data_ptr())
        if in_buffer:
            self._pool.lock_pages(buffer, device)
        else:
            self._held.append(source)
        try:
            mark = stream.enqueue(lambda: _copy(source, pieces))
        except BaseException:
            stream.finish()  # a part may be queued, and nobody would wait for it
            raise
        if in_buffer:
            buffer.events.append(mark)

    def finish(self) -> None:
        """Wait until every copy has ended, on all devices; raises what one reports."""
        with ExitStack() as stack:
            for stream in self._streams.values():
                if stream is not None:
                    stack.callback(stream.finish)
        self._held.clear()


def _copy(source: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Queue copies on the current stream; many small ones go by memory of the device, where it has room."""
    there = _room_for(pieces) if len(pieces) >= GATHERED_FROM else None
    if there is None:
        _copy_each(source, pieces, non_blocking=True)
        return
    first = pieces[0][1]
    with torch.inference_mode():
        there.copy_(source[first : first + there.numel()], non_blocking=True)
        torch._foreach_copy_(
            [target for target, _ in pieces],
            [there[start - first :][: target.numel()] for target, start in pieces],
        )


def _room_for(pieces: Sequence[Piece]) -> torch.Tensor | None:
    """Take memory of the device for all that lies from the first piece to the last; None where it has none to give.

    It is the current stream's: whatever takes it next comes after what is queued there now.
    """
    first, (last, start) = pieces[0][1], pieces[-1]
    try:
        return last.new_empty(start + last.numel() - first)
    except torch.OutOfMemoryError:
        return None


def _copy_each(source: torch.Tensor, pieces: Sequence[Piece], *, non_blocking: bool) -> None:
    with torch.inference_mode():  # a caller in that mode has views that can be written in no other
        for target, start in pieces:
            target.copy_(source[start : start + target.numel()], non_blocking=non_blocking)
