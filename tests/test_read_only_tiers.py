"""Read-only tiers: restored from, never written to, and reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import Opener, close_all, restore_all
from tests.steps import blank, files_below, state_of
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import AccessDeniedError
from tierfall.tiers.run_files import Fence

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def archive(make_config: MakeConfig, tmp_path: Path) -> Path:
    """A folder that an earlier run has left, with steps 1 and 2."""
    with tierfall.open(make_config(archive={})) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    return tmp_path / "archive"


def refuse_records(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Let nothing be created on a tier, as credentials that may only read."""
    take = Fence.create

    def taken(self: Fence, attempt: Any) -> None:
        if self._backend.place == str(place):
            raise AccessDeniedError(f"create a record in {place}: 403")
        take(self, attempt)

    monkeypatch.setattr(Fence, "create", taken)


class Nodes(Opener):
    """Two nodes, each with a disk of its own, and an archive that they mount in places of their own."""

    def config(self, rank: int, **more: Any) -> Config:
        place = self.folder / str(rank)
        tiers = [
            {"name": "host", "kind": "host", "folder": str(place / "memory")},
            {"name": "nvme", "kind": "file", "path": str(place / "nvme"), "shared": False},
            {"name": "archive", "kind": "file", "path": str(place / "archive"), "shared": False},
        ]
        return Config.model_validate({"run": "run", "max_wait": "10s", "tiers": tiers, **more})


def test_what_one_rank_may_not_write_to_is_written_to_by_none(
    tmp_path: Path, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    with network(["a", "b"]) as first:
        nodes = Nodes(tmp_path, first)
        checkpointers = nodes.all_open()
        states = [state_of(1), state_of(1)]
        pairs = list(zip(checkpointers, states, strict=True))
        on_all([lambda c=c, s=s: c.save(1, s, block=True) for c, s in pairs])  # type: ignore[misc]
        close_all(checkpointers)
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"{node}/nvme")
        shutil.rmtree(tmp_path / f"{node}/memory")  # both nodes were replaced
    before = [files_below(tmp_path / f"{node}/archive") for node in (0, 1)]
    refuse_records(monkeypatch, tmp_path / "1/archive")
    checkpointers = Nodes(tmp_path, ranks).all_open()
    states = [blank(), blank()]
    reports = restore_all(checkpointers, states)
    assert [report.step for report in reports] == [1, 1]
    pairs = list(zip(checkpointers, states, strict=True))
    handles = on_all([lambda c=c, s=s: c.save(2, s, block=True) for c, s in pairs])  # type: ignore[misc]
    assert {handle.tiers for handle in handles} == {("nvme",)}
    close_all(checkpointers)
    after = [files_below(tmp_path / f"{node}/archive") for node in (0, 1)]
    assert [set(files) - set(old) for files, old in zip(after, before, strict=True)] in (
        [set(), set()],
        [set(), {"run/attempts/a0002.json"}],
        [{"run/attempts/a0002.json"}, set()],
    )
