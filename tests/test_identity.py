"""A tier has an identity: an empty mount point is never taken for a run without checkpoints, nor one folder for two
tiers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tierfall
from tests.core.ranks.threads import network
from tests.open_ranks import Opener, close_all, restore_all
from tests.steps import blank, save_steps, state_of, step_in, steps_on
from tierfall.backends.posix.backend import PosixBackend
from tierfall.cli.app import app
from tierfall.core.types.errors import (
    BackendError,
    ConfigError,
    RestoreError,
    StepError,
    UnreachableError,
)
from tierfall.tiers.stored import FEW


def tier(root: Path, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "file", "path": str(root / name), **more}


def chain(root: Path, *stored: dict[str, Any], memory: str = "memory") -> dict[str, Any]:
    host = {"name": "host", "kind": "host", "folder": str(root / memory)}
    return {"run": "run", "max_wait": "20s", "tiers": [host, *stored]}


def restored(config: dict[str, Any], **more: Any) -> int | None:
    with tierfall.open(config) as ckpt:
        state = blank()
        report = ckpt.restore(state, **more)
        assert report is None or step_in(state) == report.step
        return None if report is None else report.step


def unmount(folder: Path) -> Path:
    """Leave an empty folder in the place of a mounted one; return where its files are now."""
    away = folder.with_name(f"{folder.name}-away")
    folder.rename(away)
    folder.mkdir()
    return away


def mount_again(folder: Path, away: Path) -> None:
    shutil.rmtree(folder)
    away.rename(folder)


def test_another_node_learns_it_from_the_other_tiers(tmp_path: Path) -> None:
    """Its memory knows nothing: what the disk remembers of the shared file system counts."""
    tiers = (tier(tmp_path, "disk"), tier(tmp_path, "pfs", shared=True))
    save_steps(chain(tmp_path, *tiers), 1)
    unmount(tmp_path / "pfs")
    with pytest.raises(
        RestoreError, match="tier pfs could not be read and may hold something newer"
    ):
        restored(chain(tmp_path, *tiers, memory="other"))
    assert restored(chain(tmp_path, *tiers, memory="third"), unreachable="ignore") == 1


def test_an_emptied_disk_of_this_node_is_no_first_start_until_somebody_says_so(
    tmp_path: Path,
) -> None:
    """As often as it is opened."""
    config = chain(tmp_path, tier(tmp_path, "disk"))
    save_steps(config, 1)
    away = unmount(tmp_path / "disk")
    for _ in range(2):
        with pytest.raises(RestoreError, match=r"Is a file system not mounted there.*forget disk"):
            restored(config)
    with tierfall.open(config) as ckpt, pytest.raises(StepError):
        ckpt.save(2, state_of(2))
    mount_again(tmp_path / "disk", away)
    assert restored(config) == 1
    unmount(tmp_path / "disk")
    forget(tmp_path, config, "disk")
    assert restored(config) is None


def test_a_start_that_begins_anew_takes_the_emptied_disk(tmp_path: Path) -> None:
    config = chain(tmp_path, tier(tmp_path, "disk"))
    save_steps(config, 1)
    unmount(tmp_path / "disk")
    with tierfall.open(config, fresh=True) as ckpt:
        ckpt.save(7, state_of(7), block=True)
    assert restored(config) == 7


@pytest.mark.parametrize("every", [1, 3])
def test_what_an_emptied_disk_may_have_is_neither_passed_over_nor_deleted(
    tmp_path: Path, every: int
) -> None:
    """Another tier has some of it, or lost the newest. A start without it must be asked for."""
    pfs = tier(tmp_path, "pfs", shared=True, flush={"every": every})
    config = chain(tmp_path, tier(tmp_path, "disk", retain={"last": 3}), pfs)
    save_steps(config, 1, 2, 3, 4, 5)
    for lost in (tmp_path / "pfs").glob("run/step-00000005-*"):
        shutil.rmtree(lost)
    (tmp_path / "pfs/run/latest").unlink()
    away = unmount(tmp_path / "disk")
    with pytest.raises(RestoreError, match="disk could not be read and may hold something newer"):
        restored(config)
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(blank(), unreachable="ignore")
        assert report is not None
        assert report.step == {1: 4, 3: 3}[every]
        assert ckpt.save(9, state_of(9), block=True).attempt > 1000
    assert list((tmp_path / "disk").iterdir()) == [], "nothing is written under a mount point"
    mount_again(tmp_path / "disk", away)
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(blank(), step=5, attempt=1)
        assert report is not None, "what was left is there to be chosen"
    assert 5 in steps_on(tmp_path / "disk")


def cli(root: Path, config: dict[str, Any], *words: str, typed: str | None = None) -> Any:
    path = root / "tiers.yaml"
    path.write_text(json.dumps(config))
    return CliRunner().invoke(app, [*words, "--config", str(path)], input=typed)


def forget(root: Path, config: dict[str, Any], *names: str) -> None:
    for name in names:
        message = cli(root, config, "forget", name)
        assert message.exit_code == 0, message.output


def kept_in_memory(root: Path, config: dict[str, Any], step: int) -> None:
    """Save a step that stays in host memory alone, and is owed to every tier of ``config``."""
    seldom = [{**each, "flush": {"every": 100}} for each in config["tiers"][1:]]
    host = {**config["tiers"][0], "on_close": "keep"}
    with tierfall.open({**config, "tiers": [host, *seldom]}) as ckpt:
        ckpt.restore(blank())
        ckpt.save(step, state_of(step)).captured(timeout=20)


@pytest.mark.parametrize("words", ["drain", "import", "copy", "rm"])
def test_commands_write_nothing_under_a_mount_point_and_say_so(tmp_path: Path, words: str) -> None:
    config = chain(tmp_path, tier(tmp_path, "disk"), tier(tmp_path, "pfs", shared=True))
    save_steps(config, 1)
    if words == "drain":
        kept_in_memory(tmp_path, config, 2)
    file = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(4)}, file)
    asked = {
        "drain": ["drain"],
        "import": ["import", str(file), "--as-step", "7"],
        "copy": ["copy", "1", "--to", "disk"],
        "rm": ["rm", "--run", "run", "--all"],
    }
    away = unmount(tmp_path / "disk")
    message = cli(tmp_path, config, *asked[words], typed="run\n")
    assert message.exit_code == 1
    assert "Is a file system not mounted there" in message.output
    assert re.search(r"'tierfall forget .*disk'", message.output)
    assert list((tmp_path / "disk").iterdir()) == []
    mount_again(tmp_path / "disk", away)
    assert restored(config) == (2 if words == "drain" else 1)


def test_a_tier_that_is_away_is_not_forgotten_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that remembers nothing, and though nobody said that all nodes see it."""
    config = chain(tmp_path, tier(tmp_path, "disk"), tier(tmp_path, "pfs"))
    save_steps(config, 1)
    shutil.rmtree(tmp_path / "memory")
    real = PosixBackend.__init__

    def init(self: PosixBackend, path: Path, **more: Any) -> None:
        if Path(path).name == "pfs":
            raise UnreachableError("pfs: it does not answer")
        real(self, path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "__init__", init)
        assert restored(config, unreachable="ignore") == 1
    shutil.rmtree(tmp_path / "memory")
    message = cli(tmp_path, config, "forget", "pfs")
    assert "pfs is forgotten by disk" in message.output


# Memory that no tier knows ----------------------------------------------------------------------------


def kept(root: Path, *stored: dict[str, Any], memory: str = "memory") -> dict[str, Any]:
    """A run whose images stay in host memory after ``close``."""
    config = chain(root, *stored, memory=memory)
    config["tiers"][0]["on_close"] = "keep"
    return config


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("how", ["forget", "fresh"])
def test_memory_from_before_a_tier_was_emptied_on_purpose_begins_no_new_life(
    tmp_path: Path, how: str
) -> None:
    config = kept(tmp_path, tier(tmp_path, "disk"))
    save_steps(config, 1, 2)
    empty(tmp_path / "disk")
    if how == "forget":
        forget(tmp_path, config, "disk")
    with pytest.raises(ConfigError, match=r"holds .*2@1.* of another life of run .*--discard"):
        tierfall.open(config, fresh=how == "fresh")
    assert steps_on(tmp_path / "disk") == []
    forget(tmp_path, config, "disk")
    assert cli(tmp_path, config, "drain", "--discard", typed="run\n").exit_code == 0
    assert restored(config) is None


@pytest.mark.parametrize("shared", [None, True])
@pytest.mark.parametrize("loses_disk", [False, True])
def test_memory_of_one_life_is_not_flushed_over_another_one(
    tmp_path: Path, shared: bool | None, loses_disk: bool
) -> None:
    """Two machines have run it, and the disk was emptied in between; one of them has lost the disk in mid-run."""
    disk = tier(tmp_path, "disk", **({} if shared is None else {"shared": shared}))
    ours, theirs = kept(tmp_path, disk), kept(tmp_path, disk, memory="another-machine")
    for step in (100, 200, 500):
        save_steps(ours, step)
    if loses_disk:
        with tierfall.open({**ours, "max_wait": "1s"}) as ckpt:
            ckpt.restore(blank())
            shutil.rmtree(tmp_path / "disk")
            ckpt.save(600, state_of(600)).captured(timeout=20)
    else:
        shutil.rmtree(tmp_path / "disk")
    if shared:
        (tmp_path / "disk").mkdir()
    save_steps(theirs, 1)
    with pytest.raises((ConfigError, RestoreError)):
        restored(ours)
    forget(tmp_path, ours, "disk")
    with pytest.raises(ConfigError, match="of another life"):
        restored(ours)
    assert restored(theirs) == 1
    assert steps_on(tmp_path / "disk") == [1]


def test_memory_is_of_no_other_life_while_a_tier_could_not_be_read(tmp_path: Path) -> None:
    """What is not mounted may know it: nothing tells to discard it."""
    config = kept(tmp_path, tier(tmp_path, "disk"), tier(tmp_path, "pfs", shared=True))
    save_steps(config, 1, 2)
    empty(tmp_path / "disk")
    away = unmount(tmp_path / "pfs")
    with pytest.raises(RestoreError, match="Is a file system not mounted there"):
        restored(config)
    forget(tmp_path, config, "disk")
    with pytest.raises(ConfigError) as caught:
        restored(config)
    assert "another life" not in str(caught.value)
    assert "--discard" not in str(caught.value)
    assert "Is a file system not mounted there" in str(caught.value)
    mount_again(tmp_path / "pfs", away)
    assert restored(config) == 2


def another_life(folder: Path, step: int) -> None:
    """Put a run of the same name, of which nobody here knows, in the place of a tier."""
    shutil.rmtree(folder)
    root = folder.with_name("elsewhere")
    save_steps(chain(root, tier(root, "pfs", shared=True)), step)
    (root / "pfs").rename(folder)
    shutil.rmtree(root)


@pytest.mark.parametrize("remembers", ["machine", "tier"])
@pytest.mark.parametrize("shared", [True, None])
def test_another_file_system_in_a_tiers_place_is_not_that_tier(
    tmp_path: Path, remembers: str, shared: bool | None
) -> None:
    if (remembers, shared) == ("tier", None):
        pytest.skip("a node's own disk may be another one after a restart of the machine")
    pfs = tier(tmp_path, "pfs", **({} if shared is None else {"shared": shared}))
    config = chain(tmp_path, *([tier(tmp_path, "disk")] if remembers == "tier" else []), pfs)
    save_steps(config, 1, 2)
    if remembers == "tier":
        shutil.rmtree(tmp_path / "memory")
    right = tmp_path / "right"
    shutil.copytree(tmp_path / "pfs", right)
    another_life(tmp_path / "pfs", 300)
    with pytest.raises(RestoreError, match=r"has another id in run/tier\.json"):
        restored(config)
    assert steps_on(tmp_path / "pfs") == [300]
    assert cli(tmp_path, config, "ls").exit_code != 0
    shutil.rmtree(tmp_path / "pfs")
    right.rename(tmp_path / "pfs")
    assert restored(config) == 2


def test_a_tier_that_moved_to_where_nothing_lies_is_asked_about(tmp_path: Path) -> None:
    """The path may be wrong; the way to say that it is not is named, and holds."""
    disk = tier(tmp_path, "disk", flush={"every": 2})
    save_steps(chain(tmp_path, disk, tier(tmp_path, "pfs", shared=True)), 1, 2, 3)
    moved = {**tier(tmp_path, "elsewhere", shared=True), "name": "pfs"}
    config = chain(tmp_path, disk, moved, memory="another-nodes")
    for _ in range(2):
        with pytest.raises(RestoreError, match=r"run .run. was in .*/pfs before\..*forget pfs"):
            restored(config)
    forget(tmp_path, config, "pfs")
    assert restored(config) == 2
    back = chain(tmp_path, disk, tier(tmp_path, "pfs", shared=True), memory="third")
    with pytest.raises(RestoreError, match=r"has another id in run/tier\.json"):
        restored(back)
    forget(tmp_path, back, "pfs")
    assert restored(back) == 3


@pytest.mark.parametrize(("how", "memory"), [("renamed", "memory"), ("both", "another-nodes")])
def test_a_tier_under_another_name_that_is_not_mounted_is_not_a_new_one(
    tmp_path: Path, how: str, memory: str
) -> None:
    disk = tier(tmp_path, "disk", flush={"every": 2})
    pfs = tier(tmp_path, "pfs", shared=True)
    save_steps(chain(tmp_path, disk, pfs), 1, 2, 3)
    (tmp_path / "link").symlink_to("pfs")
    pfs["name"] = "lustre"
    if how == "both":
        pfs["path"] = str(tmp_path / "link")
    config = chain(tmp_path, disk, pfs, memory=memory)
    away = unmount(tmp_path / "pfs")
    for _ in range(2):  # a start without it does not make the next one forget it
        with pytest.raises(RestoreError, match="Is a file system not mounted there"):
            restored(config)
    assert not list((tmp_path / "pfs").iterdir())
    mount_again(tmp_path / "pfs", away)
    assert restored(config) == 3


def test_tiers_that_have_changed_places_are_not_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the rules of the small one would be applied to the other."""
    save_steps(chain(tmp_path, tier(tmp_path, "disk"), tier(tmp_path, "pfs", shared=True)), 1, 2)
    disk = {**tier(tmp_path, "pfs", retain={"last": 1}), "name": "disk"}
    pfs = {**tier(tmp_path, "disk", shared=True), "name": "pfs"}
    config = chain(tmp_path, disk, pfs, memory="another-nodes")
    with pytest.raises(RestoreError, match=f"disk: {tmp_path}/pfs has another id"):
        restored(config)
    assert f"disk: {tmp_path}/pfs has another id" in caplog.text
    assert f"pfs: {tmp_path}/disk has another id" in caplog.text
    assert steps_on(tmp_path / "pfs") == [1, 2]
    forget(tmp_path, config, "disk", "pfs")
    for _ in range(2):
        assert restored(config) == 2


def test_a_tier_may_be_renamed_while_it_is_there(tmp_path: Path) -> None:
    save_steps(chain(tmp_path, tier(tmp_path, "disk"), tier(tmp_path, "pfs", shared=True)), 1)
    pfs = {**tier(tmp_path, "pfs", shared=True), "name": "lustre"}
    for _ in range(2):
        assert restored(chain(tmp_path, tier(tmp_path, "disk"), pfs)) == 1


# One folder twice -------------------------------------------------------------------------------------


def mount_one_as_two(root: Path, patch: pytest.MonkeyPatch) -> None:
    """As by a bind mount, or one export that is mounted twice: two paths, and neither is a link to the other."""
    real = PosixBackend.__init__

    def init(self: PosixBackend, path: Path, **more: Any) -> None:
        real(self, root / "one" if Path(path).name == "two" else path, **more)

    patch.setattr(PosixBackend, "__init__", init)


def test_one_folder_by_two_ways_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount_one_as_two(tmp_path, monkeypatch)
    config = chain(tmp_path, tier(tmp_path, "one"), tier(tmp_path, "two", shared=True))
    for _ in range(2):  # at the first start, and at a later one
        with pytest.raises(ConfigError, match=r"tiers one .* and two .* have one id"):
            tierfall.open(config)


# Mounted anew in mid-run -----------------------------------------------------------------------------


def test_what_was_begun_before_its_tier_was_mounted_again_is_not_published(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path / "disk")
    with backend.create("run/tier.json") as writer:
        writer.write(0, memoryview(b"same"))
        writer.publish()
    backend.set_identity_check("run/tier.json", lambda found: found == b"same")
    writer = backend.create("run/key")
    writer.write(0, memoryview(b"bytes"))
    away = unmount(tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    shutil.copytree(away, tmp_path / "disk")
    with pytest.raises(BackendError, match="mounted anew since this object was begun") as message:
        writer.publish()
    assert not isinstance(message.value, UnreachableError), "it is not to be asked again"
    assert not (away / "run/key").exists()
    backend.close()


def test_another_folder_in_its_place_in_mid_run_gets_nothing(tmp_path: Path) -> None:
    """A tier of another run's, or of another disk."""
    save_steps(chain(tmp_path, tier(tmp_path, "other"), memory="other-memory"), 7)
    backend = PosixBackend(tmp_path / "disk")
    with backend.create("run/tier.json") as writer:
        data = (tmp_path / "other/run/tier.json").read_bytes()
        writer.write(0, memoryview(bytearray(data)))
        writer.publish()
    backend.set_identity_check("run/tier.json", lambda found: found != data)
    unmount(tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    shutil.copytree(tmp_path / "other", tmp_path / "disk")
    with pytest.raises(UnreachableError, match="not the one that was opened"):
        backend.create("run/x")
    backend.close()


def test_a_shared_tier_whose_mount_point_is_missing_is_not_created_here(tmp_path: Path) -> None:
    """On this machine's disk it would be shared with nobody, and count as surviving the loss of the node."""
    folder = tmp_path / "mnt" / "nas" / "mine"
    nas = tier(tmp_path, "nas", shared=True) | {"path": str(folder)}
    config = chain(tmp_path, tier(tmp_path, "disk"), nas)
    with pytest.raises(RestoreError, match=r"nas is shared, and .*/mnt/nas is not there: mount"):
        restored(config)
    with pytest.raises(RestoreError, match="not known whether this is a first start"):
        restored(config, unreachable="ignore")
    assert not (tmp_path / "mnt").exists()
    folder.parent.mkdir(parents=True)
    save_steps(config, 1)
    assert steps_on(folder) == [1]


def test_a_copy_of_a_tiers_folder_is_another_tier_without_its_id(tmp_path: Path) -> None:
    save_steps(chain(tmp_path, tier(tmp_path, "one")), 1, 2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    config = chain(tmp_path, tier(tmp_path, "one"), tier(tmp_path, "two", shared=True))
    with pytest.raises(ConfigError, match=r"of a copy, delete run/tier\.json"):
        tierfall.open(config)
    (tmp_path / "two/run/tier.json").unlink()
    save_steps(config, 3)
    assert steps_on(tmp_path / "two") == [1, 2, 3]


def test_a_disk_that_was_unmounted_in_mid_run_is_not_taken_for_a_deleted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would write what is in memory under the mount point."""
    config = {**chain(tmp_path, tier(tmp_path, "disk")), "max_wait": "1s"}
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        ckpt.save(1, state_of(1), block=True)
        away = unmount(tmp_path / "disk")
        monkeypatch.setattr("tierfall.setup.places.device_of", lambda folder: -1)
        ckpt.save(2, state_of(2)).captured(timeout=20)
    with pytest.raises(RestoreError, match="Is a file system not mounted there"):
        restored(config)
    assert list((tmp_path / "disk").iterdir()) == []
    mount_again(tmp_path / "disk", away)
    assert restored(config) == 2


# Several nodes ----------------------------------------------------------------------------------------


def saved_by_two(root: Path, *steps: int) -> None:
    with network(["a", "b"]) as ranks:
        checkpointers = Opener(root, ranks).all_open()
        for step in steps:
            for ckpt in checkpointers:
                handle = ckpt.save(step, state_of(step))
            handle.wait(timeout=20)
        close_all(checkpointers)


@pytest.mark.parametrize("few", [FEW, 0])
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_an_emptied_disk_of_one_of_several_nodes_is_written_again_if_all_of_it_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, is_elsewhere: bool, few: int
) -> None:
    """By the parts that the other nodes have; also if a start leaves old records for later."""
    monkeypatch.setattr("tierfall.tiers.stored.FEW", few)
    saved_by_two(tmp_path, 1, 2)
    disk = tmp_path / str(node) / "nvme"
    empty(disk)
    if not is_elsewhere:
        for far in tmp_path.glob("*/far/run"):
            shutil.rmtree(next(far.glob("step-00000002-*")))
            (far / "latest").unlink()
    with network(["a", "b"]) as ranks:
        checkpointers = Opener(tmp_path, ranks).all_open()
        outcomes = restore_all(checkpointers, [blank(), blank()])
        close_all(checkpointers)
    if is_elsewhere:
        assert [outcome.step for outcome in outcomes] == [2, 2]
        assert list(disk.glob("run/step-00000002-*/commit.json"))
    else:
        assert all("may hold something newer" in str(outcome) for outcome in outcomes)
        assert list(disk.iterdir()) == []


def test_emptied_disks_of_several_nodes_are_no_first_start_of_any_rank(tmp_path: Path) -> None:
    with network(["a", "b"]) as first:
        checkpointers = Opener(tmp_path, first).all_open()
        for ckpt in checkpointers:
            ckpt.save(1, state_of(1))
        close_all(checkpointers)
    for disk in tmp_path.glob("*/[!m]*"):
        shutil.rmtree(disk)
    with network(["a", "b"]) as second:
        checkpointers = Opener(tmp_path, second).all_open()
        for outcome in restore_all(checkpointers, [blank(), blank()]):
            assert isinstance(outcome, RestoreError)
            assert "tierfall forget" in str(outcome)
        close_all(checkpointers)
