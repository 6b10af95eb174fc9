"""The calls into the CUDA driver that torch has no function for, by ctypes. They release the interpreter's lock."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    # targets, sources, sizes, count, attributes, their first copies, how many, the copy that failed, stream
    "cuMemcpyBatchAsync": (
        *(_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS),
    ),
    "cuMemcpyDtoHAsync_v2": (_ADDRESS, ctypes.c_uint64, _SIZE, _ADDRESS),
    "cuStreamCreateWithPriority": (_ADDRESS, ctypes.c_uint, _INT),
    "cuThreadExchangeStreamCaptureMode": (_ADDRESS,),
}
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: no order with the legacy default stream."""
_LEAST_PRIORITY = 0

_thread = threading.local()


@cache
def driver_call(name: str) -> Callable[..., int] | None:
    """A function of the driver, which returns an error code; None if the driver has none of that name, or there is no
    driver of NVIDIA."""
    # With another vendor's torch this driver may be installed, too, but its streams are not of it.
    if torch.version.cuda is None:
        return None
    try:
        call: Callable[..., int] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
    call.argtypes = _ARGUMENTS[name]  # type: ignore[attr-defined]
    call.restype = ctypes.c_int  # type: ignore[attr-defined]
    return call


def let_others_record() -> None:
    """Let other threads record CUDA graphs while this thread, one of tierfall's, makes calls to the device.

    A recording in mode global, as by ``torch.cuda.graph``, is broken by a query of an event on any thread whose own
    mode is global, too, which is the default. A user's thread keeps its mode.
    """
    is_own = threading.current_thread().name.startswith("tierfall-")
    if getattr(_thread, "is_local", False) or not is_own:
        return
    call = driver_call("cuThreadExchangeStreamCaptureMode")
    mode = ctypes.c_int(_THREAD_LOCAL)
    # An error: the driver is not initialised yet, and nothing can be recorded.
    _thread.is_local = call is None or call(ctypes.byref(mode)) == 0


def make_stream(device: torch.device) -> torch.cuda.Stream:
    """Create a stream of the least priority that no other code uses; it lives as long as the process.

    torch hands its 32 streams of a priority out in turn, so that one of them may be a training's, too. Without the
    driver's function it is one of these.
    """
    create = driver_call("cuStreamCreateWithPriority")
    with torch.cuda.device(device):
        if create is not None:
            torch.cuda.current_stream(device).query()  # gives this thread the device's context
            stream = ctypes.c_void_p()
            if create(ctypes.byref(stream), _NON_BLOCKING, _LEAST_PRIORITY) == 0 and stream.value:
                return torch.cuda.ExternalStream(stream.value, device)  # type: ignore[no-untyped-call]
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
