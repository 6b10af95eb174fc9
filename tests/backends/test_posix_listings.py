"""Several folders are listed at once, and nobody sees that by what is listed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from backend_places import fail, put

from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import BackendError, KeyNotFoundError

TOGETHER = 8


@pytest.fixture
def tier(tmp_path: Path) -> PosixBackend:
    """Checkpoints whose folders have folders in them, and files before, between and after those."""
    backend = PosixBackend(tmp_path / "tier")
    for step in range(3 * TOGETHER):
        for name in ("commit.json", "marks/pin", "marks/tag-a", "rank-0.json"):
            put(backend, f"run/step-{step:04d}/{name}", b"x")
    for key in ("run/latest", "run/attempts/a0001.json", "run/step-0003-x", "run/tier.json", "z"):
        put(backend, key, b"x")
    return backend


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_one_folder_of_many_that_cannot_be_listed_fails_the_scan(
    tier: PosixBackend, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail(monkeypatch, "open", number, lambda name, *args, **more: name == "step-0009")
    with pytest.raises(BackendError, match="list 'run/step-0009/'") as caught:
        list(tier.scan("run/"))
    assert not isinstance(caught.value, KeyNotFoundError)
    with pytest.raises(BackendError, match="list 'run/step-0009/'"):
        tier.discard_unfinished("run/")
