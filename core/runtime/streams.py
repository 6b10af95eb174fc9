"""Copies to and from a device, beside the work that the training has queued there: one small layer, with CUDA below it.

What capture and restore ask of a device is little: to run copies in an order of its own after what the caller has
enqueued so far, to say when they are done, and to let the caller's further work wait for them without the host waiting.
Nothing here knows images or snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class StreamEvent(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block this thread until the stream has come here; raises what the device reports."""
        ...

    def is_done(self) -> bool: ...


class CopyStream(Protocol):
    """A queue of copies to and from one device. Any thread may call any of these; "the caller" is the thread that
    calls."""

    def follow_caller(self) -> None:
        """Run what is enqueued from now on after all that the caller has enqueued on the device so far."""
        ...

    def enqueue(self, work: Work) -> StreamEvent:
        """Run ``work``, whose tensor operations go to this stream; return the point after it."""
        ...

    def for_caller(self, work: Work) -> None:
        """Run ``work`` in the caller's own order on the device."""
        ...

    def finish(self) -> None:
        """Block this thread until all that was enqueued is done; raises what the device reports."""
        ...

    def hold_caller(self) -> None:
        """Let what the caller enqueues from now on run after all that was enqueued here. The host does not wait."""
        ...


class CudaStream:
    """A side stream of one CUDA device. See ``CopyStream``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow_caller(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def enqueue(self, work: Work) -> StreamEvent:
        # The device is set as well: a worker thread starts on device 0 and would open a context there.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            return _CudaEvent(self._device, self._stream)

    def for_caller(self, work: Work) -> None:
        with torch.cuda.device(self._device):
            work()

    def finish(self) -> None:
        with torch.cuda.device(self._device):
            self._stream.synchronize()

    def hold_caller(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _CudaEvent:
    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        # blocking: a thread that waits sleeps, and takes no core from training
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def is_done(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]


class Streams:
    """The copy streams of this process's devices, each made when it is first needed."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, CopyStream] = {}

    def of(self, device: torch.device) -> CopyStream | None:
        """Return the stream of a device; None where its copies cannot run beside the training."""
        if device.type != "cuda":
            return None
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device[device] = CudaStream(device)
        return found


def is_recording() -> bool:
    """Say whether the calling thread's work on the current CUDA device is being recorded into a graph, not run."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()
