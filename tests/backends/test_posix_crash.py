"""A writer that is killed at any call leaves the old object, the new one or none, and nothing that stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_places import files_below, get

from tests import forked
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.backend import Publish

NEW = b"n" * (1024 * 1024 + 100)
KILLER = Path(__file__).with_name("posix_killer.py")


@pytest.mark.parametrize(
    ("mode", "medium"), [(Publish.REPLACE, "direct"), (Publish.IF_ABSENT, "buffered")]
)
def test_killed_at_any_call(
    mode: Publish, medium: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if medium == "direct":
        request.getfixturevalue("direct_folder")
    done = forked.run([str(KILLER), str(tmp_path), mode.value, medium])
    assert done.returncode == 0, done.stderr
    deaths = done.stdout.split("\n")[:-1]
    last = "replace" if mode is Publish.REPLACE else "link"
    assert {"open", "pwrite", "the end of pwrite", "fsync", last} <= set(deaths)
    assert len(list(tmp_path.iterdir())) == len(deaths) + 1
    before = [b"old"] if mode is Publish.REPLACE else []
    left = [_check(tmp_path / str(number), before, name) for number, name in enumerate(deaths)]
    assert left == sorted(left, key=len), "an object came and went"
    assert left[0] == before
    assert left[-1] == [NEW]
    assert _check(tmp_path / str(len(deaths)), [NEW], "nothing") == [NEW]


def _check(root: Path, before: list[bytes], died_at: str) -> list[bytes]:
    """Look at what a dead writer left, clean up, and return the objects that are there."""
    backend = PosixBackend(root)
    keys = [stored.key for stored in backend.scan("")]
    objects = [get(backend, key) for key in keys]
    assert objects in (before, [NEW]), f"killed at {died_at}: half an object is visible"
    unfinished = [name for name in files_below(root) if name not in keys]
    assert backend.discard_unfinished("") == len(unfinished) <= 1, f"killed at {died_at}"
    assert files_below(root) == keys, f"killed at {died_at}: something stays"
    assert [get(backend, key) for key in keys] == objects
    backend.close()
    return objects
