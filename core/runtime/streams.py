"""Copy streams: copies to and from a device that run beside training's work.

Capture and restore need three things of a device: to run copies in their own order after the work that the caller has
enqueued, to know when they are done, and to make the caller's later work wait for them without blocking the host.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import finalize

import torch

from tierfall.core.runtime.driver import let_others_record, make_stream
from tierfall.core.runtime.memory_copies import MemoryCopies, can_copy, enqueue_copies

Work = Callable[[], None]
_spare: dict[torch.device, list[torch.cuda.Stream]] = {}
"""CUDA streams of deleted ``CopyStream`` objects, by device; the next ones take them."""


class CopyStream:
    """A queue of copies to and from one CUDA device, beside the training's. Thread-safe; "the caller" is the calling
    thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        spare = _spare.setdefault(device, [])
        self._stream = spare.pop() if spare else make_stream(device)
        finalize(self, spare.append, self._stream)

    def wait_for_caller(self) -> None:
        """Order all work enqueued on this stream from now on after the work enqueued by the caller so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def enqueue(self, work: Work) -> StreamEvent:
        """Call ``work`` with its tensor operations on this stream; return the point after them."""
        let_others_record()
        # The device is set as well: a worker thread starts on device 0 and would create a context there.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            return StreamEvent(self._device, self._stream)

    def run_on_caller_stream(self, work: Work) -> None:
        """Call ``work`` with its tensor operations on the caller's own stream."""
        with torch.cuda.device(self._device):
            work()

    def mark_caller(self) -> StreamEvent:
        """Return the point that the caller's own stream has now."""
        with torch.cuda.device(self._device):
            return StreamEvent(self._device, torch.cuda.current_stream(self._device))

    def copies_memory(self, memory: torch.Tensor) -> bool:
        """Whether ``copy_memory`` may be called for copies from the device to this memory."""
        return can_copy(self._device, on_device=memory.is_cuda)

    def copy_memory(self, copies: MemoryCopies) -> None:
        """Enqueue copies where tensor operations are enqueued; called in the work of ``enqueue``, or for copies within
        the device of ``run_on_caller_stream``."""
        stream = torch.cuda.current_stream(self._device)
        stream.query()  # gives this thread the device's context, which another library may have changed
        if len(copies.sizes):
            enqueue_copies(copies, self._device, stream.cuda_stream)

    def finish(self) -> None:
        """Block this thread until everything enqueued is done; raises the device's errors."""
        let_others_record()
        with torch.cuda.device(self._device):
            self._stream.synchronize()

    def make_caller_wait(self) -> None:
        """Run what the caller enqueues from now on after everything enqueued here. The host does not wait."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class StreamEvent:
    """A point in a stream: what is enqueued there at its construction."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        # blocking: a waiting thread sleeps instead of occupying a core that training needs
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Block this thread until the stream has reached this point; raises the device's errors."""
        let_others_record()
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def is_done(self) -> bool:
        let_others_record()
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]


class SteppingStreams:
    """The streams on which optimizers have stepped since the last save. The state was last written there, and a
    training may have left them without joining them."""

    def __init__(self) -> None:
        self._streams: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """Note the calling thread's stream, before a step."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._streams.add(torch.cuda.current_stream())

    def join(self) -> None:
        """Run what the caller enqueues from now on after everything enqueued on these streams. The host does not
        wait."""
        while self._streams:  # another thread may add one meanwhile
            stream = self._streams.pop()
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)


class Streams:
    """The copy streams of this process's devices, created on demand."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, CopyStream] = {}

    def of(self, device: torch.device) -> CopyStream | None:
        """The stream of a device; None if its copies cannot run beside training."""
        if device.type != "cuda":
            return None
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device[device] = CopyStream(device)
        return found


def is_recording() -> bool:
    """Whether the calling thread's work on the current CUDA device is being recorded into a graph, not run."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()
