"""Read-only tiers: restored from, never written to, and reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import Opener, close_all, restore_all
from tests.steps import blank, files_below, state_of, step_in, steps_on
from tierfall.backends.posix.backend import PosixBackend
from tierfall.cli import app
from tierfall.config import Config, load_config
from tierfall.core.format.catalog import merge
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import AccessDeniedError, ConfigError
from tierfall.core.types.values import CheckpointId
from tierfall.ops import commands
from tierfall.ops.copy import copy
from tierfall.ops.measure import measure
from tierfall.ops.reader import RunReader
from tierfall.setup import tiers as stores
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]
ARCHIVE = {"read_only": True}


@pytest.fixture
def archive(make_config: MakeConfig, tmp_path: Path) -> Path:
    """A folder that an earlier run has left, with steps 1 and 2."""
    with tierfall.open(make_config(archive={})) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    return tmp_path / "archive"


def refuse_writes(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Let a folder be opened for reading only, as a file system that is mounted so."""

    class Mounted(PosixBackend):
        def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
            if Path(path) == root and not read_only:
                raise AccessDeniedError(f"open {path} for writing: Read-only file system")
            super().__init__(path, read_only=read_only)

    monkeypatch.setattr(stores, "PosixBackend", Mounted)


def refuse_records(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Let nothing be created on a tier, as credentials that may only read."""
    take = StoredTier.create_attempt

    def taken(self: StoredTier, attempt: Any) -> None:
        if self.place == str(place):
            raise AccessDeniedError(f"create a record in {place}: 403")
        take(self, attempt)

    monkeypatch.setattr(StoredTier, "create_attempt", taken)


def restored_and_saved(config: dict[str, Any], archive: Path, step: int) -> None:
    """Go on from the archive's step 2, and save; the archive stays as it was."""
    before = files_below(archive)
    with tierfall.open(config) as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (step_in(state), report.sources[0].tier) == (2, "archive")
        handle = ckpt.save(step, state_of(step), block=True)
        assert handle.attempt == 2
        assert handle.tiers == ("disk",)
        assert ckpt.drain().left == ()
    assert files_below(archive) == before


def test_a_read_only_tier_is_restored_from_and_nothing_there_is_changed(
    make_config: MakeConfig, archive: Path, tmp_path: Path, memory: Path
) -> None:
    config = make_config(disk={"retain": {"last": 1}}, archive=ARCHIVE)
    restored_and_saved(config, archive, 3)
    assert steps_on(tmp_path / "disk") == [3]
    assert not list(memory.rglob("*.arena")), "nothing is owed to the archive"
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 3


@pytest.mark.parametrize("refuse", ["opening", "records"])
def test_a_tier_that_may_not_be_written_to_is_found_out_and_reported_once(
    refuse: str,
    make_config: MakeConfig,
    archive: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if refuse == "opening":
        refuse_writes(monkeypatch, archive)
    else:
        refuse_records(monkeypatch, archive)
    restored_and_saved(make_config(disk={}, archive={}), archive, 3)
    message = [m for m in caplog.messages if "archive is read-only" in m]
    assert len(message) == 1
    assert "say read_only: true" in message[0]


def test_a_tier_that_holds_nothing_and_may_not_be_written_to_is_an_error(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "archive").mkdir()
    refuse_writes(monkeypatch, tmp_path / "archive")
    with pytest.raises(AccessDeniedError, match=r"tier archive: .*Read-only file system"):
        tierfall.open(make_config(disk={}, archive={}))


def test_a_chain_of_read_only_tiers_points_to_load(
    make_config: MakeConfig, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(archive=ARCHIVE)
    with pytest.raises(ConfigError, match=r"archive: read-only.*tierfall\.load"):
        tierfall.open(config)
    refuse_writes(monkeypatch, archive)
    with pytest.raises(ConfigError, match=r"Read-only file system.*tierfall\.load"):
        tierfall.open(make_config(archive={}))
    assert step_in(tierfall.load(config)) == 2


def test_what_is_reported_of_writing_is_refused_beside_read_only(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"read_only: true, and capacity, retain"):
        load_config(make_config(archive={"capacity": "1GiB", "retain": {"last": 1}, **ARCHIVE}))


def test_what_lies_on_a_read_only_tier_is_listed_and_not_owed_to_others(
    make_config: MakeConfig, archive: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "tiers.yaml").write_text(json.dumps(make_config(disk={}, archive=ARCHIVE)))
    where = ["--config", str(tmp_path / "tiers.yaml")]

    def run(*words: str) -> str:
        answer = CliRunner().invoke(app, [words[0], *where, *words[1:]])
        assert answer.exit_code == 0, answer.output
        return answer.output

    assert "the process, 2@1 on archive" in run("ls")
    assert "the tier is read-only: nothing is deleted there" in run("show", "2", "--json")
    assert "still owed" not in run("drain")
    assert "archive: read-only: it is restored from" in run("check", "--size", "64KiB")


def test_commands_leave_a_read_only_tier_alone_and_say_so(
    make_config: MakeConfig, archive: Path, tmp_path: Path
) -> None:
    shutil.copytree(archive, tmp_path / "disk")
    config = load_config(make_config(disk={}, archive=ARCHIVE))
    before = files_below(archive)
    with RunReader(config) as reader:
        listings = reader.list()
    known = merge(listings)
    assert all(not seen.owed for seen in commands.view_of(config, known).checkpoints)
    assert {d.tier for d in commands.plan_prune(config, listings)} == {"disk"}
    (carried,) = commands.run_commands(config, commands.CommandKind.DELETE, [CheckpointId(1, 1)])
    assert carried.done == ("disk",)
    assert "archive is read-only: 1@1 is not changed" in str(carried.failed["archive"])
    marked = commands.set_mark_on_tiers(config, commands.CommandKind.PIN, known[1])
    assert marked.done == ("disk",)
    assert "archive is read-only" in str(marked.failed["archive"])
    with pytest.raises(ConfigError, match="tier archive is read_only"):
        copy(config, CheckpointId(2, 1), "archive")
    found = {tier.name: tier for tier in measure(config, 1 << 16)}
    assert found["archive"].read_only
    assert found["archive"].error is None
    assert files_below(archive) == before
    assert steps_on(tmp_path / "disk") == [2]


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


@pytest.mark.parametrize("number", [0, 1])
def test_what_one_rank_may_not_write_to_is_written_to_by_none(
    number: int, tmp_path: Path, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
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
    before = [files_below(tmp_path / f"{node}/archive") for node in (0, 1)]
    refuse_records(monkeypatch, tmp_path / f"{number}/archive")
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
