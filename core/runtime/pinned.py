"""The accelerator, as far as memory needs it: is CUDA there, page-lock a mapped range, wait for the device.

This module owns every call into the CUDA runtime that is about host memory. It must not know what lies in that memory.
On a machine without CUDA each function is a no-op and nothing is initialised; torch is imported only when asked for.

Registering (``cudaHostRegister``) a slab that is mapped already is preferred to torch's pinned allocator, which rounds
every allocation up to a power of two and whose memory ends with the process.
"""

from __future__ import annotations

import logging
import resource
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# cudaHostRegisterPortable: the pages count as locked for every device of the process, not only the current one.
_REGISTER_PORTABLE = 1


def cuda_available() -> bool:
    """Say whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def current() -> torch.device | None:
    """Name the CUDA device that is current on this thread; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device | None = None) -> None:
    """Wait until all that is enqueued on a device (default: the current one) is done; at once without CUDA."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)


class PageLock:
    """A range of host memory, page-locked or not; ``reason`` says why not.

    The range must stay mapped until ``release``: a range unmapped while registered stays locked in the driver.
    """

    __slots__ = ("_address", "_on", "length_bytes", "locked", "reason")

    def __init__(
        self,
        *,
        address: int,
        length_bytes: int,
        locked: bool,
        reason: str = "",
        on: torch.device | None = None,
    ) -> None:
        self._address = address
        self._on = on
        self.length_bytes = length_bytes
        self.locked = locked
        self.reason = reason

    def release(self) -> None:
        """Unlock the range. A refusal is logged: the range is given up either way. May be called twice."""
        if not self.locked:
            return
        self.locked = False
        self.reason = "released"
        with _current(self._on):
            error = _unregister(self._address)
        if error:
            logger.warning(
                "page-locked memory: unlocking %d bytes at %#x failed: %s; the pages stay locked until this process "
                "ends",
                self.length_bytes,
                self._address,
                error,
            )


def lock_pages(address: int, length_bytes: int, on: torch.device | None = None) -> PageLock:
    """Page-lock a mapped, writable range, so that copies to and from devices run asynchronously and at full speed.

    ``address`` is a multiple of the page size. ``on`` is the device that is asked (default: the current one); the range
    is locked for all. Never raises for a refusal: the result's ``locked`` is then False, and its ``reason`` names the
    runtime's error and the limit that may be the cause.
    """
    if not cuda_available():
        reason = "no CUDA device"
        return PageLock(address=address, length_bytes=length_bytes, locked=False, reason=reason)
    with _current(on):
        error = _register(address, length_bytes)
    if not error:
        return PageLock(address=address, length_bytes=length_bytes, locked=True, on=on)
    reason = f"{error}; {_memlock_hint()}"
    return PageLock(address=address, length_bytes=length_bytes, locked=False, reason=reason)


def _current(on: torch.device | None) -> AbstractContextManager[object]:
    """Make a device the current one: a worker thread starts on device 0, and would open a context there."""
    import torch

    return nullcontext() if on is None else torch.cuda.device(on)


def _register(address: int, length_bytes: int) -> str:
    runtime = _cudart()
    code = runtime.cudaHostRegister(address, length_bytes, _REGISTER_PORTABLE)
    error = _error_text(runtime, code)
    if error:
        _clear_last_error()
    return error


def _unregister(address: int) -> str:
    runtime = _cudart()
    error = _error_text(runtime, runtime.cudaHostUnregister(address))
    if error:
        _clear_last_error()
    return error


def _error_text(runtime: Any, code: Any) -> str:
    """Return the runtime's words for an error, nothing for success."""
    number = int(code)
    return "" if number == 0 else f"CUDA error {number} ({runtime.cudaGetErrorString(code)})"


def _clear_last_error() -> None:
    """Take the refused call's error off the runtime.

    The runtime remembers it, and torch would report it from the next kernel launch, some innocent operation of the
    training loop; torch offers no ``cudaGetLastError``, so a launch of our own collects it.
    """
    import torch

    try:
        torch.empty(1, device="cuda").fill_(0)
    except RuntimeError as error:
        logger.debug("collected the CUDA runtime's last error: %s", error)


def _memlock_hint() -> str:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return f"the limit on locked memory (ulimit -l) is {limit}"


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
