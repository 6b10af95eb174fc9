"""An object store in this process's memory, by fsspec's ``memory://``, that refuses what a test tells it to."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

CALLS = ("pipe_file", "info", "cat_file", "find", "rm_file")


class MemoryStore:
    """``refuse`` is asked before each call, with its name and the object's key; what it returns is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = f"/{secrets.token_hex(6)}"
        self.url = f"memory:/{self._root}"
        self.refuse: Callable[[str, str], BaseException | None] = lambda call, key: None
        self.refused = threading.Semaphore(0)
        """Is released by each refusal."""
        for name in CALLS:
            self._guard(name, monkeypatch)

    def _guard(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(MemoryFileSystem, name)

        def guarded(system: Any, path: str, *words: Any, **named: Any) -> Any:
            if str(path).startswith(self._root):
                error = self.refuse(name, str(path).removeprefix(f"{self._root}/"))
                if error is not None:
                    self.refused.release()
                    raise error
            return real(system, path, *words, **named)

        monkeypatch.setattr(MemoryFileSystem, name, guarded)

    def tier(self, name: str = "store", **settings: Any) -> dict[str, Any]:
        """Its entry in a configuration's ``tiers``."""
        return {"name": name, "kind": "object", "url": self.url, **settings}

    def refuse_all(self, times: int | None = None) -> None:
        """Deny access to everything, for so many calls (None: until ``heal``)."""
        left = [times]

        def deny(call: str, key: str) -> BaseException | None:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    return None
            return PermissionError(13, "Permission denied")

        self.refuse = deny

    def heal(self) -> None:
        self.refuse = lambda call, key: None

    def heal_after_refusals(self, count: int) -> None:
        """Heal on a thread of its own, after so many further refusals."""
        while self.refused.acquire(blocking=False):
            pass

        def heal() -> None:
            for _ in range(count):
                assert self.refused.acquire(timeout=60)
            self.heal()

        threading.Thread(target=heal, daemon=True).start()

    def steps(self, run: str = "run") -> list[int]:
        """The steps that are committed."""
        found = (
            re.fullmatch(rf"{self._root}/{run}/step-(\d+)-a\d+/commit.json", key)
            for key in list(MemoryFileSystem.store)
        )
        return sorted(int(match[1]) for match in found if match)
