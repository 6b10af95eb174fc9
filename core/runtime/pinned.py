"""Page-locking of host memory, and waiting for a device.

This module has every call into the CUDA runtime that concerns host memory. On a machine without CUDA each function is
a no-op and initialises nothing; torch is imported on first use.

Mapped memory is registered (``cudaHostRegister``), since torch's pinned allocator rounds every allocation up to a power
of two, and its memory ends with the process.
"""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tierfall")

# cudaHostRegisterPortable: locked for every device of the process, not only the current one.
_REGISTER_PORTABLE = 1

_ends: dict[int, int] = {}
"""The end of each range that ``lock_pages`` has locked, by its start. Its caller keeps the memory mapped meanwhile, so
that ranges do not overlap."""
_changing = threading.Lock()


def cuda_available() -> bool:
    """Whether torch finds a CUDA device."""
    import torch

    return torch.cuda.is_available()


def synchronize(device: torch.device | None = None) -> None:
    """Wait until a device (default: the current one) has completed all enqueued work; no-op without CUDA."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)


@dataclass(slots=True, kw_only=True, eq=False)
class PageLock:
    """A range of host memory, page-locked or not; ``reason`` is why not. ``on`` is as in ``lock_pages``.

    The range must remain mapped until ``release``: if it is unmapped while registered, the driver keeps it locked.
    """

    address: int
    length_bytes: int
    locked: bool
    reason: str = ""
    on: torch.device | None = None

    def release(self) -> None:
        """Unlock the range; a failure is logged. May be called twice."""
        if not self.locked:
            return
        self.locked = False
        self.reason = "released"
        with _changing:
            _ends.pop(self.address, None)
        with _current(self.on):
            error = _unregister(self.address)
        if error:
            logger.warning(
                "page-locked memory: unlocking %d bytes at %#x failed: %s; the pages remain locked until this process "
                "ends",
                self.length_bytes,
                self.address,
                error,
            )


def lock_pages(address: int, length_bytes: int, on: torch.device | None = None) -> PageLock:
    """Page-lock a mapped, writable range, so that copies to and from devices run asynchronously and at full speed.

    ``address`` is a multiple of the page size. ``on`` is the device whose context makes the call (default: the current
    one); the range is locked for all devices. A failure does not raise: ``locked`` of the result is False, and
    ``reason`` has the runtime's error and the limit that may be the cause.
    """
    if not cuda_available():
        reason = "no CUDA device"
        return PageLock(address=address, length_bytes=length_bytes, locked=False, reason=reason)
    with _current(on):
        error = _failure(_cudart().cudaHostRegister(address, length_bytes, _REGISTER_PORTABLE))
    if not error:
        with _changing:
            _ends[address] = address + length_bytes
        return PageLock(address=address, length_bytes=length_bytes, locked=True, on=on)
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    reason = f"{error}; the limit on locked memory (ulimit -l) is {limit}"
    return PageLock(address=address, length_bytes=length_bytes, locked=False, reason=reason)


def locked_bounds() -> NDArray[np.uint64]:
    """The start and the end of each range that ``lock_pages`` has locked, ascending. The end of one may be the start of
    the next: an odd number of bounds is at or below an address in a range, an even number at or below any other."""
    with _changing:
        ranges = sorted(_ends.items())
    return np.array(ranges, dtype=np.uint64).reshape(-1)


def cut_at(bounds: NDArray[np.uint64], address: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range of host memory at the ``locked_bounds`` in it: a copy from or to a device that is locked in part is
    refused. Yields the offsets of each part."""
    inner = bounds[(bounds > address) & (bounds < address + size_bytes)]
    edges = sorted({0, *(int(bound) - address for bound in inner), size_bytes})
    yield from pairwise(edges)


def _current(on: torch.device | None) -> AbstractContextManager[object]:
    """Make a device current: a worker thread starts on device 0, and would create a context there."""
    import torch

    from tierfall.core.runtime.driver import let_others_record

    let_others_record()
    return nullcontext() if on is None else torch.cuda.device(on)


def _unregister(address: int) -> str:
    return _failure(_cudart().cudaHostUnregister(address))


def _failure(code: Any) -> str:
    """The runtime's message for an error code, '' for success."""
    number = int(code)
    if number == 0:
        return ""
    _clear_last_error()
    return f"CUDA error {number} ({_cudart().cudaGetErrorString(code)})"


def _clear_last_error() -> None:
    """Clear the failed call's error in the runtime.

    Otherwise torch would report it from the next kernel launch, an unrelated operation of the training loop. torch has
    no ``cudaGetLastError``, so a kernel launched here receives the error.
    """
    import torch

    try:
        torch.empty(1, device="cuda").fill_(0)
    except RuntimeError as error:
        logger.debug("cleared the CUDA runtime's last error: %s", error)


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
