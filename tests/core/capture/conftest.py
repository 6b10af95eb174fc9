"""What tests of capture start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loop_help import PATHS, Still

from tests.core.capture.lazy_help import Held
from tierfall.core.capture import copier
from tierfall.core.image import segments as module


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 4096)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 8192)
    monkeypatch.setattr(copier, "LAUNCH_BYTES", 4096)
    monkeypatch.setattr(copier, "BARRIER_LAUNCH_BYTES", 16384)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    held.free.set()
    yield held
    held.free.set()


@pytest.fixture(params=PATHS)
def still(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Still]:
    """A capture that stands still when a test wants it to, on the host and on a device."""
    made = PATHS[request.param](monkeypatch)
    yield made
    made.close()
