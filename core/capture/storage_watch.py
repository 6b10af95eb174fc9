"""Detection of storages that training frees in place during a capture, so that the capture completes first.

``storage.resize_(0)``, and sending a tensor to another process by shared memory, free a storage's memory although the
tensor still exists; the capture thread would then read freed memory. torch has no hook for them, so these methods of
``torch.UntypedStorage`` are wrapped while a watch is open.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("tierfall")

METHODS = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


class StorageWatch:
    """Until ``close``, calls ``before`` with address and length in bytes of a storage's memory, on the thread that is
    about to free it."""

    def __init__(self, before: Callable[[int, int], None]) -> None:
        self._before = before
        self._pid = os.getpid()
        _watches.append(self)
        if len(_watches) == 1:
            _wrap()

    def reached(self, storage: torch.UntypedStorage) -> None:
        # A forked child frees memory of its own; a fake or meta tensor has none.
        if os.getpid() == self._pid and storage.nbytes() and _has_memory(storage):
            self._before(storage.data_ptr(), storage.nbytes())

    def close(self) -> None:
        """Stop watching; may be called twice."""
        if self in _watches:
            _watches.remove(self)
            if not _watches:
                _unwrap()


def _has_memory(storage: torch.UntypedStorage) -> bool:
    return storage.device.type != "meta" and getattr(storage, "_fake_device", None) is None


_watches: list[StorageWatch] = []
_wrapped: dict[str, tuple[Any, Any]] = {}
"""By method name: the previous entry of the class's own namespace, or None, and the wrapper."""


def _wrap() -> None:
    for name in METHODS:
        original = getattr(torch.UntypedStorage, name, None)
        if original is not None:
            before, now = torch.UntypedStorage.__dict__.get(name), _wrapper_of(original)
            _wrapped[name] = (before, now)
            setattr(torch.UntypedStorage, name, now)


def _unwrap() -> None:
    """Restore the methods, except those that other code has replaced meanwhile."""
    for name, (before, now) in _wrapped.items():
        if torch.UntypedStorage.__dict__.get(name) is not now:
            continue
        if before is None:
            delattr(torch.UntypedStorage, name)
        else:
            setattr(torch.UntypedStorage, name, before)
    _wrapped.clear()


def _wrapper_of(original: Any) -> Any:
    @functools.wraps(original)
    def method(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        for watch in tuple(_watches):
            try:
                watch.reached(storage)
            except Exception:
                logger.exception("the wait before a storage is freed failed")
        return original(storage, *args, **kwargs)

    return method
