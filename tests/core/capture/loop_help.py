"""A capture that stands still, on the host and on a device, so that a loop can do its worst meanwhile."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from tests.core.capture.lazy_help import Held
from tests.core.fake_device import FakePlaces, FakeStream
from tierfall.run import saver


class Still(Protocol):
    """Between ``hold`` and ``go`` nothing of a lazy save is read, until the training thread comes to a barrier."""

    def hold(self) -> None: ...

    def go(self) -> None: ...

    def close(self) -> None: ...


class OnHost:
    """The capture thread stands still; whoever comes to a barrier copies all by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held = Held(monkeypatch)
        self._held.free.set()

    def hold(self) -> None:
        self._held.hold()

    def go(self) -> None:
        self._held.free.set()

    def close(self) -> None:
        self.go()


class _Yielding(FakeStream):
    """Copies once the caller's work is made to wait for that, and not before."""

    def make_caller_wait(self) -> None:
        self.free.set()
        super().make_caller_wait()


class OnDevice:
    """The device copies nothing, though all is enqueued; a barrier lets the caller's work wait until it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stream = _Yielding()
        places: Any = FakePlaces(self._stream)
        monkeypatch.setattr(saver, "CaptureDevices", places)

    def hold(self) -> None:
        self._stream.free.clear()

    def go(self) -> None:
        self._stream.free.set()

    def close(self) -> None:
        self._stream.close()


PATHS: dict[str, type[OnHost | OnDevice]] = {"host": OnHost, "device": OnDevice}
