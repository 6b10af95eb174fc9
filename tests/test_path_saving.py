"""Saving by path on several ranks: one checkpoint of all ranks or none, and each rank reads what it can see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.core.ranks.threads import network, on_all
from tests.open_ranks import SOON_S, Opener, close_all
from tests.steps import wait_until
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import (
    CaptureError,
    ConfigError,
    RanksError,
    StepError,
    StorageFullError,
    UnreachableError,
)
from tierfall.integrations.path.names import parse
from tierfall.integrations.path.reading import CheckpointFiles, tiers_of
from tierfall.run.by_path import PathSaves
from tierfall.run.checkpointer import Checkpointer, open_run_of


class SharedOpener(Opener):
    """Opens one run on all ranks, with one stored tier, which all see."""

    every = 1

    def config(self, rank: int, **more: Any) -> Config:
        memory = {"name": "host", "kind": "host", "folder": str(self.folder / f"memory-{rank}")}
        seen = {
            "name": "pfs",
            "kind": "file",
            "path": str(self.folder / "pfs"),
            "shared": True,
            "flush": {"every": self.every},
        }
        return Config.model_validate(
            {"run": "run", "max_wait": "10s", "tiers": [memory, seen], **more}
        )


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch) -> SharedOpener:
    # Here the ranks of a job are in one process, which else has one Checkpointer of a run.
    monkeypatch.setattr("tierfall.run.open_run._check_first", lambda config, run: None)
    return SharedOpener(tmp_path, ranks)


def saves_of(both: list[Checkpointer]) -> list[PathSaves]:
    return [open_run_of(ckpt).by_path for ckpt in both]


def write(saves: PathSaves, step: int, name: str, data: bytes = b"") -> None:
    with saves.create(step, name) as file:
        file.write(data)


def commit(saves: PathSaves, step: int, data: bytes = b"metadata") -> None:
    write(saves, step, ".metadata.tmp", data)
    saves.commit(step, ".metadata.tmp", ".metadata")


def read(saves: PathSaves, step: int, name: str) -> bytes:
    where = parse(f"run/step-{step}/{name}")
    with tiers_of(where, saves, "") as tiers:
        files = CheckpointFiles(tiers.find(where), tiers)
        file = files.find(name)
        assert file is not None
        return files.open(file).read(1 << 20) or b""


def names(saves: PathSaves, step: int) -> set[str]:
    where = parse(f"run/step-{step}")
    with tiers_of(where, saves, "") as tiers:
        return set(CheckpointFiles(tiers.find(where), tiers).all())


@pytest.mark.parametrize("coordinator", [0, 1])
def test_the_rename_on_one_rank_saves_the_files_of_all(opener: Opener, coordinator: int) -> None:
    both = opener.all_open()
    zero, one = saves_of(both)
    write(zero, 1, "__0_0.distcp", b"of rank 0")
    write(one, 1, "__1_0.distcp", b"of rank 1")
    commit((zero, one)[coordinator], 1)
    for saves in (zero, one):
        assert read(saves, 1, "__0_0.distcp") == b"of rank 0"
        assert read(saves, 1, "__1_0.distcp") == b"of rank 1"
        assert read(saves, 1, ".metadata") == b"metadata"
        assert names(saves, 1) == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    close_all(both)


def test_a_rank_that_wrote_nothing_has_an_empty_part(opener: Opener) -> None:
    both = opener.all_open()
    zero, one = saves_of(both)
    write(zero, 1, "__0_0.distcp", b"all of it")
    commit(zero, 1)
    assert names(zero, 1) == {"__0_0.distcp", ".metadata"}
    infos = [ckpt.checkpoints()[-1] for ckpt in both]
    assert [(info.step, info.tiers["pfs"]) for info in infos] == [(1, "committed")] * 2
    assert names(one, 1) == {"__0_0.distcp", ".metadata"}
    close_all(both)


def test_what_lies_on_another_node_is_not_taken_for_absent(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    both = Opener(tmp_path, ranks).all_open()
    zero, one = saves_of(both)
    write(one, 1, "__1_0.distcp", b"of rank 1")
    commit(zero, 1)
    assert read(one, 1, "__1_0.distcp") == b"of rank 1"
    for name in (".metadata", "__0_0.distcp"):
        with pytest.raises(UnreachableError, match="rank 0's part of 1@1 is on no tier"):
            read(one, 1, name)
    with pytest.raises(UnreachableError, match="rank 0's part of 1@1 is on no tier"):
        names(one, 1)
    close_all(both)


def test_ranks_that_each_save_alone_by_one_path_are_refused(opener: Opener) -> None:
    both = opener.all_open()
    for saves in saves_of(both):
        write(saves, 1, "__0_0.distcp", b"all of it")
    zero, one = (
        error
        for error in on_all([lambda s=s: commit(s, 1) for s in saves_of(both)])  # type: ignore[misc]
    )
    assert isinstance(zero, ConfigError | CaptureError | StepError), zero
    assert isinstance(one, ConfigError | CaptureError | StepError), one
    assert "no_dist=True" in f"{zero}{one}"
    wait_until(
        lambda: not any(info.tiers for ckpt in both for info in ckpt.checkpoints()),
        "it leaves memory",
        SOON_S,
    )
    close_all(both)


@pytest.mark.parametrize(("failing", "every"), [(0, 1), (1, 1), (1, 9)])
def test_what_one_rank_cannot_save_is_saved_by_none(
    opener: SharedOpener, failing: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener.every = every
    both = opener.all_open()
    zero, one = saves_of(both)
    write(zero, 1, "__0_0.distcp", b"of rank 0")
    write(one, 1, "__1_0.distcp", b"of rank 1")

    def fail(*args: Any) -> Any:
        raise StorageFullError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(both[failing]._saver, "save_files", fail)
        with pytest.raises((CaptureError, StorageFullError), match="no space left"):
            commit(zero, 1)
    wait_until(lambda: not (zero.is_staged(1) or one.is_staged(1)), "no rank keeps files", SOON_S)
    write(one, 2, "__1_0.distcp", b"again")
    commit(zero, 2)
    assert read(one, 2, "__1_0.distcp") == b"again"
    assert [c.step for c in both[0].checkpoints() if c.tiers] == [2]
    close_all(both)


def test_files_that_a_rank_has_let_go_of_give_the_save_up(opener: Opener) -> None:
    both = opener.all_open()
    zero, one = saves_of(both)
    write(one, 1, "__1_0.distcp", b"of rank 1")
    write(one, 2, "__1_0.distcp", b"of another save")
    with pytest.raises(CaptureError, match="rank 1: save of step 1 by path: its files are gone"):
        commit(zero, 1)
    close_all(both)


def test_a_line_that_has_not_begun_goes_on_on_all_ranks_from_what_rank_0_loaded(
    opener: Opener,
) -> None:
    both = opener.all_open()
    for step in (10, 20):
        commit(open_run_of(both[0]).by_path, step)
    close_all(both)
    with network(["a", "b"]) as again:
        both = SharedOpener(opener.folder, again).all_open()
        zero, one = saves_of(both)
        with pytest.raises(StepError, match="this start loaded none"):
            zero.begin(30)
        with pytest.raises(StepError, match="restored none"):
            commit_blindly(one, 30)
        known = {c.id: c for c in both[0]._session.known()}
        first = next(c for id, c in known.items() if id.step == 10)
        assert first.commit is not None
        zero.note_loaded(first.id, first.commit.lineage.ordinal)
        with pytest.raises(StepError, match="goes on from step 10"):
            zero.begin(10)
        commit(zero, 15)
        assert [ckpt._lineage.started_from for ckpt in both] == [first.id] * 2
        assert [ckpt._lineage.ordinal for ckpt in both] == [2, 2]
        close_all(both)


def commit_blindly(saves: PathSaves, step: int) -> None:
    """Commit on a rank that cannot know that it may not: rank 0 does."""
    saves.note_opened_by_path()
    commit(saves, step)


def test_a_rank_0_that_says_nothing_is_not_waited_for_without_end(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = opener.all_open()
    zero, one = saves_of(both)
    monkeypatch.setattr("tierfall.run.by_path._SLOWER", 0.05)
    with monkeypatch.context() as deaf:
        deaf.setitem(both[0]._session.listeners, "path", lambda news: None)
        with pytest.raises(RanksError, match=r"rank 0 announced nothing within 0\.5 s"):
            commit(one, 1)
    assert not zero.is_staged(1)
    close_all(both)
