"""Storage that fails on demand, for tests of whole runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


class Medium:
    """Lets calls on the files below one folder fail with an errno, as often as it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = str(folder)
        self._monkeypatch = monkeypatch
        self._left: dict[str, int] = {}
        self.struck: list[str] = []
        self.passed: list[str] = []

    def fail(self, call: str, number: int, times: int) -> None:
        """Let ``os.<call>`` on files fail ``times`` times; ``struck`` and ``passed`` name the files."""
        real = getattr(os, call)
        self._left[call] = times

        def stand_in(descriptor: int, *args: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if os.path.isdir(path) or not path.startswith(self._folder):
                return real(descriptor, *args)
            if self._left[call] > 0:
                self._left[call] -= 1
                self.struck.append(path)
                raise OSError(number, os.strerror(number))
            self.passed.append(path)
            return real(descriptor, *args)

        self._monkeypatch.setattr(os, call, stand_in)

    def heal(self) -> None:
        self._left = dict.fromkeys(self._left, 0)
