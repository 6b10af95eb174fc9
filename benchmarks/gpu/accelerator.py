"""What the part ``gpu`` asks of a device, with CUDA below it: all that cannot be tried on a machine without one.

Times on the host are taken with nothing here inside but marks, which no host waits for.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

GPU = "cuda"


class Accelerator(Protocol):
    """One device, and the order of the calling thread's work on it."""

    @property
    def device(self) -> str:
        """What torch calls it."""
        ...

    def synchronize(self) -> None:
        """Block this thread until the device is idle."""
        ...

    def mark(self) -> Any:
        """Note a point in the caller's order on the device; the host waits for nothing."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """Return how long the device took from one mark to a later one; blocks until it has come there."""
        ...

    def free_bytes(self) -> int:
        """Return what memory may still be taken there, beside the most that training took so far."""
        ...


class Cuda:
    """The current CUDA device."""

    device = GPU

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def free_bytes(self) -> int:
        free, _ = (
            torch.cuda.mem_get_info()
        )  # what torch keeps counts as taken: the next batch needs it
        return free
