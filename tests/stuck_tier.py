"""A tier whose calls hang: those of one folder, from when a test says so until it opens the gate."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tierfall.backends.posix.backend import PosixBackend, PosixWriter

LONG_S = 60.0
CALLS = ("create", "read_into", "scan", "stat", "delete", "delete_some", "sync", "close")
WRITES = ("write", "publish", "abort")


def config_of(root: Path, *tiers: str | dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A run with an image in memory and these tiers, folders of these names."""
    host = {"name": "host", "kind": "host", "folder": str(root / "memory"), "capacity": "1MiB"}
    files = [tier if isinstance(tier, dict) else {"name": tier} for tier in tiers]
    made = [{"kind": "file", "path": str(root / tier["name"]), **tier} for tier in files]
    return {"run": "r", "chunk": "4KiB", "max_wait": "0.5s", "tiers": [host, *made], **keys}


def state(step: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((8192,), step)}


class StuckTier:
    """``hung`` is set once a call hangs, ``returned`` once such a call has come back."""

    def __init__(self, root: object, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.hung, self.returned = (threading.Event() for _ in range(3))
        self._root, self._patch = str(root), patch

    def hang_in(self, *calls: str, key: str = "", from_byte: int = 0) -> None:
        """Let these methods of the backend and its writers hang; of reads those of keys that have ``key`` in them, and
        that begin at ``from_byte`` or later. ``open`` is whatever looks at the folder."""
        for name in calls:
            if name == "open":
                self._hang(os, "stat", lambda path, *_: str(path).startswith(self._root))
            elif name in WRITES:
                self._hang(PosixWriter, name, lambda writer, *_: writer._place == self._root)
            elif name == "read_into":
                self._hang(
                    PosixBackend,
                    name,
                    lambda backend, read, offset, *_: (
                        backend.place == self._root and key in read and offset >= from_byte
                    ),
                )
            else:
                self._hang(PosixBackend, name, lambda backend, *_: backend.place == self._root)

    def _hang(self, where: Any, name: str, concerns: Callable[..., bool]) -> None:
        real = getattr(where, name)

        def late(*args: Any, **keys: Any) -> Any:
            if not concerns(*args) or self.gate.is_set():
                return real(*args, **keys)
            self.hung.set()
            assert self.gate.wait(LONG_S)
            try:
                return real(*args, **keys)
            finally:
                self.returned.set()

        self._patch.setattr(where, name, late)
