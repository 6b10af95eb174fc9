"""A medium that is slow to answer is asked for several folders at once, and nobody sees that by what is listed."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from backend_places import fail, put

from tierfall.backends.posix import folders
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.posix.folders import Entry, Folders
from tierfall.core.types.errors import BackendError, KeyNotFoundError

TOGETHER = 8


class Together:
    """Lets ``Folders.entries`` answer for a step's folder only once so many such calls are under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self._barrier = threading.Barrier(count)
        real = Folders.entries

        def entries(folders: Folders, folder: str) -> list[Entry]:
            if folder.rpartition("/")[2].startswith("step-"):
                self._barrier.wait(30)
            return real(folders, folder)

        monkeypatch.setattr(Folders, "entries", entries)


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


def test_a_scan_of_a_slow_medium_asks_for_several_folders_at_once(
    tier: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [stored.key for stored in tier.scan("")]
    assert keys == sorted(keys)
    assert len(keys) == 4 * 3 * TOGETHER + 5
    monkeypatch.setattr(folders, "SLOW_S", -1.0)  # no answer is quick enough
    monkeypatch.setattr(folders, "SLOW_IN_A_ROW", 3)  # the root, run/, run/attempts/
    Together(monkeypatch, TOGETHER)
    assert [stored.key for stored in tier.scan("")] == keys


def test_what_is_unfinished_on_a_slow_medium_is_looked_for_in_several_folders_at_once(
    tier: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [stored.key for stored in tier.scan("")]
    for folder in ("step-0000", "step-0017/marks", "step-0005"):
        left = tmp_path / "tier" / "run" / folder / ".tierfall-1-0123456789abcdef.part"
        left.write_bytes(b"x")
    (tmp_path / "tier/run/step-0007/empty/in/it").mkdir(parents=True)
    monkeypatch.setattr(folders, "SLOW_S", -1.0)
    monkeypatch.setattr(folders, "SLOW_IN_A_ROW", 1)
    Together(monkeypatch, TOGETHER)
    assert tier.discard_unfinished("run/") == 3
    assert not (tmp_path / "tier/run/step-0007/empty").exists()
    monkeypatch.undo()
    assert [stored.key for stored in tier.scan("")] == keys


@pytest.mark.usefixtures("grouped_listings")
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
