"""``tiers://``: torch.distributed.checkpoint saves and loads by path, as it is, in one process."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import tierfall
from tests import forked
from tests.cli.cli_kit import Cli
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import (
    AccessDeniedError,
    CapacityError,
    CaptureError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    LockError,
    NotSupportedError,
    RestoreError,
    StepError,
    StorageFullError,
    UnreachableError,
)
from tierfall.run.checkpointer import open_run_of
from tierfall.run.open_run import OPEN
from tierfall.run.staging import StagedFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

Make = Callable[..., dict[str, Any]]


def path(step: int) -> str:
    return f"tiers://run/step-{step:08d}"


def make_state(step: int = 0) -> dict[str, Any]:
    return {
        "weight": torch.arange(40_000, dtype=torch.float32).reshape(200, 200) + step,
        "inner": {"half": torch.full((7,), step, dtype=torch.bfloat16), "step": step},
    }


def check(loaded: dict[str, Any], step: int) -> None:
    expected = make_state(step)
    assert torch.equal(loaded["weight"], expected["weight"])
    assert torch.equal(loaded["inner"]["half"], expected["inner"]["half"])
    assert loaded["inner"]["step"] == step


def load(step: int) -> dict[str, Any]:
    state = make_state(-1)
    dcp.load(state, checkpoint_id=path(step))
    return state


def save(step: int) -> None:
    dcp.save(make_state(step), checkpoint_id=path(step))


@pytest.fixture(autouse=True)
def _nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a failing test, or a path, has opened is closed: the next test is not to find it."""
    monkeypatch.delenv("TIERFALL_CONFIG", raising=False)
    monkeypatch.setattr("tierfall.integrations.path._loaded", {})
    yield
    restart()


def restart() -> None:
    for one in list(OPEN):
        one.close("")


@pytest.fixture
def files() -> Any:
    return fsspec.filesystem("tiers")


@pytest.fixture
def ckpt(make_config: Make) -> Iterator[tierfall.Checkpointer]:
    with tierfall.open(make_config()) as opened:
        yield opened


def staged_memory() -> list[str]:
    """What of files that were written by path this process still has: mapped, or open."""
    gc.collect()
    maps = [x for x in Path("/proc/self/maps").read_text().splitlines() if "tierfall-by-path" in x]
    links = [str(x.readlink()) for x in Path("/proc/self/fd").iterdir() if x.is_symlink()]
    return maps + [link for link in links if "tierfall-by-path" in link]


# What users do ---------------------------------------------------------------------------------------


def test_saved_by_path_is_loaded_by_path(ckpt: tierfall.Checkpointer) -> None:
    save(100)
    save(200)
    check(load(100), 100)
    check(load(200), 200)
    infos = ckpt.checkpoints()
    assert [(c.step, c.tiers["disk"]) for c in infos] == [(100, "committed"), (200, "committed")]


def test_another_process_loads_it_with_nothing_imported(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(make_config()))
    with tierfall.open(make_config()):
        save(100)
    program = (
        "import torch, torch.distributed.checkpoint as dcp; state = {'weight': torch.zeros(200, 200)};"
        f"dcp.load(state, checkpoint_id={path(100)!r}); print(state['weight'].sum().item())"
    )
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "TIERFALL_CONFIG": str(tmp_path / "tiers.yaml")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert out.stdout.strip() == str(make_state(100)["weight"].sum().item()), out.stderr


def test_saving_in_a_thread_holds_up_no_optimizer(ckpt: tierfall.Checkpointer) -> None:
    state = make_state(1)
    done = dcp.async_save(state, checkpoint_id=path(1))
    state["weight"].zero_()
    done.result(60)
    check(load(1), 1)
    assert ckpt._capturer._current is None  # nothing of it is the barrier's to wait for


def test_the_tensors_are_files_by_their_names(ckpt: tierfall.Checkpointer, tmp_path: Path) -> None:
    save(100)
    from safetensors.torch import load_file

    image = next((tmp_path / "disk").rglob("*.safetensors"))
    stored = load_file(image)
    assert {name: (t.dtype, t.ndim) for name, t in stored.items()} == {
        "dcp_files.__0_0%2Edistcp": (torch.uint8, 1),
        "dcp_files.%2Emetadata": (torch.uint8, 1),
    }
    metadata = pickle.loads(stored["dcp_files.%2Emetadata"].numpy().tobytes())
    assert set(metadata.state_dict_metadata) == {"weight", "inner.half", "inner.step"}


def test_nothing_is_synced_but_what_is_written(
    ckpt: tierfall.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("the whole machine was synced"))
    save(100)


def test_memory_of_the_files_is_free_once_they_are_captured(ckpt: tierfall.Checkpointer) -> None:
    save(100)
    assert staged_memory() == []


def test_its_own_saves_stay_lazy_and_plan_nothing_anew(ckpt: tierfall.Checkpointer) -> None:
    state = {"w": torch.nn.Parameter(torch.ones(100, 100))}
    optimizer = torch.optim.SGD(state.values())

    def step(number: int) -> None:
        state["w"].grad = torch.ones(100, 100)
        optimizer.step()
        ckpt.save(number, state).captured(10)

    step(1)
    planned = ckpt._saver._layouts._planned
    save(2)
    step(3)
    assert ckpt._saver._layouts._planned is planned
    assert ckpt.statistics().lazy_saves == 1
    check(load(2), 2)
    report = ckpt.restore({"w": torch.nn.Parameter(torch.zeros(100, 100))}, step=3)
    assert report is not None
    assert report.step == 3


# The line --------------------------------------------------------------------------------------------


def test_a_start_goes_on_from_what_it_loaded(make_config: Make, files: Any) -> None:
    with tierfall.open(make_config()):
        for step in (10, 20):
            save(step)
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(CheckpointException, match="this start loaded none"):
            save(30)
        check(load(10), 10)
        save(20)
        check(load(20), 20)
        known = {(c.step, c.attempt): c for c in ckpt.checkpoints()}
        assert not known[20, 2].abandoned
        left = known.get((20, 1))  # it is collected, now that the new line is as safe
        assert left is None or left.abandoned or "leaving" in left.tiers.values()
        assert [x["name"] for x in files.ls("tiers://run")][-1] == "run/step-00000020"


def test_a_step_that_is_there_is_not_overwritten(ckpt: tierfall.Checkpointer) -> None:
    save(100)
    with pytest.raises(CheckpointException, match="never overwritten"):
        save(100)
    check(load(100), 100)


def test_a_step_of_an_abandoned_line_is_read_by_its_attempt(make_config: Make) -> None:
    with tierfall.open(make_config()):
        for step in (10, 20):
            save(step)
    with tierfall.open(make_config()) as ckpt:
        ckpt.pin(20)
        load(10)
        dcp.save(make_state(21), checkpoint_id=path(20))
        check(load(20), 21)
        state = make_state(-1)
        dcp.load(state, checkpoint_id="tiers://run/step-00000020-a0001")
        check(state, 20)


def test_without_a_checkpointer_the_configuration_saves(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(make_config()))
    monkeypatch.setenv("TIERFALL_CONFIG", str(tmp_path / "tiers.yaml"))
    save(10)
    save(20)
    restart()
    save(30)  # goes on from the newest
    restart()
    with pytest.raises(CheckpointException, match="load an older step by path first"):
        save(30)
    restart()
    check(load(20), 20)
    save(25)
    restart()
    monkeypatch.setattr("tierfall.integrations.path._loaded", {})
    with pytest.raises(CheckpointException, match="goes on from step 25"):
        save(25)
    with pytest.raises(CheckpointException, match="is the configuration of run 'run'"):
        dcp.save(make_state(), checkpoint_id="tiers://other/step-1")


# Given up --------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_nothing(
    ckpt: tierfall.Checkpointer, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(pickle, "dump", lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(CheckpointException, match="broken"):
            save(100)
    assert staged_memory() == []
    assert ckpt.checkpoints() == []
    assert not files.exists(path(100))
    assert files.ls("tiers://run") == []
    save(100)
    check(load(100), 100)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failing", ["open", "write"])
def test_what_another_thread_of_dcps_cannot_write_is_saved_by_none(
    ckpt: tierfall.Checkpointer, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """DCP's writer does not look how its own threads have ended."""
    saves, here, met = open_run_of(ckpt).by_path, threading.current_thread(), threading.Event()
    create = saves.create if failing == "write" else StagedFiles.create

    def failing_elsewhere(*given: Any) -> Any:
        if threading.current_thread() is here:
            assert met.wait(20)
            return create(*given)
        met.set()
        if failing == "open":
            raise StorageFullError("no space left")
        file = create(*given)
        monkeypatch.setattr(file.raw, "_grow", lambda *ranges: _full())
        return file

    monkeypatch.setattr(saves if failing == "write" else StagedFiles, "create", failing_elsewhere)
    state = {f"w{number}": torch.ones(1000) for number in range(4)}
    with pytest.raises(CheckpointException, match=r"given up|files are gone"):
        dcp.save(state, storage_writer=FsspecWriter(path(1), thread_count=2))
    assert ckpt.checkpoints() == []
    assert staged_memory() == []
    monkeypatch.undo()
    dcp.save(state, storage_writer=FsspecWriter(path(1), thread_count=2))
    assert [c.step for c in ckpt.checkpoints()] == [1]


def _full() -> None:
    raise StorageFullError("no space left")


def test_a_save_that_never_ends_is_freed_by_the_next(
    ckpt: tierfall.Checkpointer, files: Any
) -> None:
    files.makedirs(path(1))
    with files.open(f"{path(1)}/__0_0.distcp", "wb") as file:
        file.write(b"x" * 100_000)
    assert staged_memory() != []
    assert not files.exists(f"{path(1)}/__0_0.distcp")
    save(2)
    assert staged_memory() == []
    with pytest.raises(CaptureError, match="another save by path began"):
        files.mv(f"{path(1)}/.metadata.tmp", f"{path(1)}/.metadata")


def test_a_save_that_another_overtakes_is_an_error(ckpt: tierfall.Checkpointer) -> None:
    go_on = threading.Event()

    class Late(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            assert go_on.wait(20)
            return super().create_local_plan()

    first = dcp.async_save(make_state(1), checkpoint_id=path(1), planner=Late())
    save(2)
    go_on.set()
    with pytest.raises(CheckpointException, match="this lineage is at step 2 already"):
        first.result(20)  # type: ignore[union-attr]
    assert [c.step for c in ckpt.checkpoints()] == [2]
    check(load(2), 2)
    assert staged_memory() == []


def test_closing_frees_what_was_never_committed(make_config: Make, files: Any) -> None:
    with tierfall.open(make_config()):
        file = files.open(f"{path(1)}/__0_0.distcp", "wb")
        file.write(b"x")
    with pytest.raises(CaptureError, match="given up"):
        file.close()
    assert staged_memory() == []


def test_a_file_that_is_still_written_is_not_saved(ckpt: tierfall.Checkpointer, files: Any) -> None:
    file = files.open(f"{path(1)}/__0_0.distcp", "wb")
    with files.open(f"{path(1)}/.metadata.tmp", "wb"):
        pass
    with pytest.raises(CaptureError, match=r"__0_0\.distcp is still being written"):
        files.mv(f"{path(1)}/.metadata.tmp", f"{path(1)}/.metadata")
    file.close()
    assert ckpt.checkpoints() == []


def test_files_beyond_the_capacity_are_refused_while_they_are_written(
    ckpt: tierfall.Checkpointer,
) -> None:
    with pytest.raises(CheckpointException, match="set a capacity that holds two"):
        dcp.save({"w": torch.zeros(2 << 20)}, checkpoint_id=path(1))  # 8 MiB, and there are 4
    assert staged_memory() == []


def test_without_a_capacity_half_of_the_free_memory_is_the_bound(
    make_config: Make, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierfall.tiers.arena.folder._memory_free_bytes", lambda: 200_000)
    config = make_config()
    del config["tiers"][0]["capacity"]
    with tierfall.open(config):
        file = files.open(f"{path(1)}/__0_0.distcp", "wb")
        file.write(bytes(100_000))
        file.flush()
        file.write(b"x")
        with pytest.raises(CapacityError, match="100000 bytes"):
            file.flush()
        with pytest.raises(CapacityError, match="100000 bytes"):
            file.close()


def test_a_tier_that_does_not_answer_is_waited_for_and_no_longer(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what finds no room in memory meanwhile is an error: it must not look like a save that was made."""
    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if not key.endswith(".safetensors"):
            return real(self, key, **options)
        raise UnreachableError(f"{key}: nobody answers")

    with monkeypatch.context() as silent:
        silent.setattr(PosixBackend, "create", create)
        ckpt = tierfall.open(make_config(host={"capacity": "400KiB"}, max_wait="1s"))
        save(1)
        assert "tier disk does not have it after 1 s" in caplog.text
        with pytest.raises(CheckpointException, match="CapacityError"):
            save(2)
        check(load(1), 1)
    ckpt.close()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_tier_that_does_not_take_it(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if "step-" in key:
            raise StorageFullError(f"{key}: no space left")
        return real(self, key, **options)

    monkeypatch.setattr(PosixBackend, "create", create)
    ckpt = tierfall.open(make_config(on_error=on_error, max_wait="1s"))
    if on_error == "warn":
        save(1)
        check(load(1), 1)  # it lies in memory
        ckpt.close()
        return
    with pytest.raises(CheckpointException, match="the disk is full"):
        save(1)
    with pytest.raises(CapacityError, match="the disk is full"):
        ckpt.close()


# Reading ---------------------------------------------------------------------------------------------


def test_ranges_of_a_file_are_read(ckpt: tierfall.Checkpointer, files: Any, tmp_path: Path) -> None:
    data = os.urandom(200_000)  # more than three chunks
    with files.open(f"{path(1)}/__0_0.distcp", "wb") as file:
        file.write(data)
    with files.open(f"{path(1)}/.metadata.tmp", "wb"):
        pass
    files.mv(f"{path(1)}/.metadata.tmp", f"{path(1)}/.metadata")
    name = f"{path(1)}/__0_0.distcp"
    assert files.cat_file(name) == data
    assert files.cat_file(name, start=65_000, end=140_001) == data[65_000:140_001]
    assert files.cat_file(name, start=-10) == data[-10:]
    assert files.info(name)["size"] == len(data)
    assert files.cat_file(f"{path(1)}/.metadata") == b""
    files.get(name, str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == data
    with files.open(name, "rb") as file:
        assert file.seek(-5, io.SEEK_END) == 199_995
        assert file.read() == data[-5:]
        assert file.read() == b""
        with pytest.raises(ValueError, match="negative seek"):
            file.raw.seek(-1)


def test_a_damaged_chunk_is_read_from_the_next_tier(make_config: Make, tmp_path: Path) -> None:
    config = make_config(disk={}, slow={})
    with tierfall.open(config) as ckpt:
        save(1)
        ckpt.drain(20)
    (image,) = (tmp_path / "disk").rglob("*.safetensors")
    (other,) = (tmp_path / "slow").rglob("*.safetensors")
    flip(image)
    with tierfall.open(config) as ckpt:
        check(load(1), 1)
        ckpt.drain(20)
        assert image.read_bytes() == other.read_bytes(), "it is written anew"
        flip(image)
        flip(other)
        with pytest.raises(CheckpointException, match="IntegrityError"):
            load(1)


def flip(image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[-5000] ^= 1
    image.write_bytes(data)


def test_what_was_checked_is_what_is_used_though_memory_comes_to_hold_another_image(
    make_config: Make, files: Any
) -> None:
    with tierfall.open(make_config(chunk="1MiB")) as ckpt:
        save(1)
        name = f"{path(1)}/__0_0.distcp"
        expected = files.cat_file(name)
        with files.open(name, "rb") as file:
            assert file.read(10) == expected[:10]
            (entry,) = ckpt._session.coordinator.ledger.entries.values()
            assert entry.region is not None
            entry.region.image[-20_000:] = bytes(20_000)
            assert file.read() == expected[10:]
        assert files.cat_file(name) == expected  # from the disk, now


@pytest.mark.parametrize("codec", ["zstd", "planes"])
def test_packed_images_are_read(make_config: Make, codec: str) -> None:
    with tierfall.open(make_config(disk={"compress": {"codec": codec}})):
        save(1)
    with tierfall.open(make_config(disk={"compress": {"codec": codec}})):
        check(load(1), 1)


def test_a_tier_that_cannot_be_asked_is_not_taken_for_empty(
    make_config: Make, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(*args: Any) -> Any:
        raise UnreachableError("nobody answers")

    with tierfall.open(make_config()):
        monkeypatch.setattr(PosixBackend, "scan", scan)
        with pytest.raises(UnreachableError, match="may hold it"):
            files.exists(path(1))


@pytest.mark.parametrize("opened", [False, True])
def test_a_run_is_not_listed_while_a_tier_that_may_hold_newer_steps_cannot_be_read(
    opened: bool,
    make_config: Make,
    files: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that takes the newest step of a listing would go back, or begin anew."""
    config = make_config(disk={"retain": {"last": 1}}, slow={"shared": True})
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("TIERFALL_CONFIG", str(tmp_path / "tiers.yaml"))
    with tierfall.open(config) as ckpt:
        save(1)
        ckpt.drain(30)
    assert files.ls("tiers://run", detail=False) == ["run/step-00000001"]
    (tmp_path / "slow").rename(tmp_path / "away")
    (tmp_path / "slow").mkdir()
    with tierfall.open(config) if opened else nullcontext():
        for look in (files.ls, files.find, lambda run: files.glob(f"{run}/step-*")):
            with pytest.raises(UnreachableError, match="slow could not be read and may hold"):
                look("tiers://run")
    if not opened:
        shutil.rmtree(tmp_path / "disk" / "run")
        with pytest.raises(UnreachableError, match="slow could not be read and may hold"):
            files.exists("tiers://run")
    (tmp_path / "slow").rmdir()
    (tmp_path / "away").rename(tmp_path / "slow")
    assert files.ls("tiers://run", detail=False) == ["run/step-00000001"]


def test_a_tier_that_may_not_be_read_is_not_passed_over_by_find_and_glob(
    make_config: Make, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(*args: Any) -> Any:
        raise AccessDeniedError("not yours to read")

    with tierfall.open(make_config()):
        save(1)
        monkeypatch.setattr(PosixBackend, "scan", scan)
        for look in (files.ls, files.find, lambda run: files.glob(f"{run}/step-*")):
            with pytest.raises(AccessDeniedError, match="not yours to read"):
                look("tiers://run")
        monkeypatch.undo()
        assert files.glob("tiers://run/step-*") == ["run/step-00000001"]
        assert files.find("tiers://run/step-00000007") == []


def test_a_step_folder_that_is_a_link_is_reported_by_open_and_ls(
    make_config: Make, files: Any, tmp_path: Path
) -> None:
    """A program that restores the newest step that is listed does not restore an older one."""
    with tierfall.open(make_config()) as ckpt:
        save(1)
        save(2)
        ckpt.drain(30)
    folder = tmp_path / "disk" / "run" / "step-00000002-a0001"
    folder.rename(tmp_path / "archived")
    folder.symlink_to(tmp_path / "archived")
    with tierfall.open(make_config()):
        for look in (lambda: files.ls("tiers://run"), lambda: files.open(f"{path(2)}/.metadata")):
            with pytest.raises(
                AccessDeniedError, match=r"symbolic link.*put the folder itself there"
            ):
                look()
        check(load(1), 1)
        save(2)  # of this attempt: the link is in nobody's way
        check(load(2), 2)


# What else is done with such a step ------------------------------------------------------------------


def test_restore_load_and_export_refuse_it_by_name(make_config: Make, tmp_path: Path) -> None:
    with tierfall.open(make_config()) as ckpt:
        save(100)
        with pytest.raises(
            RestoreError, match=r"100@1: torch\.distributed\.checkpoint has saved this step by path"
        ):
            ckpt.restore(make_state())
        with pytest.raises(RestoreError) as alone:
            ckpt.restore(make_state())
        assert "by step=" not in str(alone.value)
        ckpt.save(200, make_state(200), block=True)
        save(300)
        with pytest.raises(RestoreError, match=r"300@1: .* a state is 200@1: name it by step=200"):
            ckpt.restore(make_state())
    with pytest.raises(RestoreError, match=r"checkpoint_id='tiers://"):
        tierfall.load(make_config())
    with pytest.raises(RestoreError, match="has saved this step by path"):
        tierfall.load(tmp_path / "disk")
    cli = Cli(tmp_path, make_config())
    answer = cli("export", "100", "--to", str(tmp_path / "out"), code=-1)
    assert answer.code != 0
    assert "has saved this step by path" in answer.err
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_commands_see_to_it_as_to_any_other(make_config: Make, tmp_path: Path) -> None:
    config = make_config(disk={}, slow={"flush": {"every": 9}})
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            save(step)
        ckpt.drain(20)

    cli = Cli(tmp_path, config)
    assert list(cli.steps()) == ["1@1", "2@1"]
    cli("show", "1")
    cli("verify")
    cli("copy", "1", "--to", "slow")
    cli("rm", "2", "--yes")
    with tierfall.open(config) as ckpt:
        assert [c.step for c in ckpt.checkpoints() if "slow" in c.tiers] == [1]
        check(load(1), 1)


def test_retention_drops_it(make_config: Make, files: Any) -> None:
    with tierfall.open(make_config(disk={"retain": {"last": 2}})) as ckpt:
        for step in (1, 2, 3):
            save(step)
        ckpt.drain(20)
        ckpt.prune()
        held = [c.step for c in ckpt.checkpoints() if "disk" in c.tiers]
    assert held == [2, 3]


def test_the_name_of_the_entry_is_kept_for_it(ckpt: tierfall.Checkpointer) -> None:
    with pytest.raises(CaptureError, match="choose another name"):
        ckpt.save(1, {"dcp_files": {"x": torch.ones(1)}})


# What is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ("tiers://run/100", ConfigError, "expected tiers://RUN/step-STEP"),
        ("tiers://run/step-1/a/b", ConfigError, "expected tiers://RUN/step-STEP"),
        ("tiers://-run/step-1", ConfigError, "not a usable name"),
        ("tiers://other/step-1", ConfigError, r"no Checkpointer of run 'other' .*open: run"),
        ("tiers://run/step-1-a0001", ConfigError, "leave the attempt out"),
        ("tiers://run", ConfigError, "names no step"),
        ("tiers://", ConfigError, "names no run"),
    ],
)
def test_a_path_that_leads_nowhere(
    ckpt: tierfall.Checkpointer,
    files: Any,
    bad: str,
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        files.makedirs(bad)


def test_a_step_that_is_not_there(ckpt: tierfall.Checkpointer, files: Any) -> None:
    save(1)
    assert not files.exists(path(2))
    assert not files.exists(f"{path(1)}/x")
    with pytest.raises(KeyNotFoundError, match="there are: 1@1"):
        files.open(f"{path(2)}/.metadata", "rb")
    with pytest.raises(KeyNotFoundError, match="no rank wrote a file of this name"):
        files.open(f"{path(1)}/x", "rb")
    with pytest.raises(CheckpointException, match="has no such checkpoint; there are: 1@1"):
        load(2)
    with pytest.raises(KeyNotFoundError, match="it is not there"):
        files.rm(path(2))


def test_a_step_of_tierfalls_own(ckpt: tierfall.Checkpointer, files: Any) -> None:
    ckpt.save(1, {"w": torch.ones(1)}, block=True)
    with pytest.raises(KeyNotFoundError, match="was not saved by path"):
        files.open(f"{path(1)}/.metadata", "rb")
    assert files.ls("tiers://run") == []
    assert files.ls(path(1)) == []


def test_what_dcp_does_not_do_is_refused(ckpt: tierfall.Checkpointer, files: Any) -> None:
    with pytest.raises(NotSupportedError, match=r"Checkpointer\.save"):
        files.open(f"{path(1)}/model.safetensors", "wb")
    with pytest.raises(NotSupportedError, match="mode 'ab'"):
        files.open(f"{path(1)}/__0_0.distcp", "ab")
    with pytest.raises(ConfigError, match="is no file"):
        files.open(path(1), "wb")
    with files.open(f"{path(1)}/__0_0.distcp", "wb"):
        pass
    with pytest.raises(NotSupportedError, match=r"only \.metadata\.tmp is renamed"):
        files.mv(f"{path(1)}/__0_0.distcp", f"{path(1)}/x")
    with pytest.raises(FileNotFoundError, match="was not written"):
        files.mv(f"{path(1)}/.metadata.tmp", f"{path(1)}/.metadata")
    save(2)
    with pytest.raises(NotSupportedError, match="tierfall rm"):
        files.rm(f"{path(2)}/.metadata")
    check(load(2), 2)


def test_each_rank_for_itself_is_refused(ckpt: tierfall.Checkpointer) -> None:
    with pytest.raises(NotSupportedError, match=r"__0\.metadata"):
        dcp.save(make_state(), checkpoint_id=path(1), use_collectives=False)


def test_a_run_that_another_process_trains_is_not_fenced(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(make_config()))
    monkeypatch.setenv("TIERFALL_CONFIG", str(tmp_path / "tiers.yaml"))
    with tierfall.open(make_config()) as ckpt:
        program = f"import fsspec; fsspec.filesystem('tiers').makedirs({path(1)!r})"
        out = forked.run(["-c", program])
        assert LockError.__name__ in out.stderr
        assert "THREAD" in out.stderr
        ckpt.save(1, {"w": torch.ones(1)}, block=True)


def test_two_runs_of_one_name_are_distinguished(
    make_config: Make, tmp_path: Path, files: Any
) -> None:
    other = make_config(elsewhere={}, host={"folder": str(tmp_path / "memory")})
    with (
        tierfall.open(make_config()),
        tierfall.open(other),
        pytest.raises(ConfigError, match="2 Checkpointers of run 'run'"),
    ):
        files.makedirs(path(1))


def test_a_step_may_not_go_back(ckpt: tierfall.Checkpointer, files: Any) -> None:
    save(5)
    with pytest.raises(StepError, match="at step 5 already"):
        files.makedirs(path(4))


def test_every_record_damaged(ckpt: tierfall.Checkpointer, tmp_path: Path, files: Any) -> None:
    save(1)
    ckpt.close()
    (record,) = (tmp_path / "disk").rglob("commit.json")
    record.write_bytes(record.read_bytes()[:-9])
    with tierfall.open({**_config_of(ckpt)}), pytest.raises(IntegrityError, match="is damaged"):
        files.ls(path(1))


def _config_of(ckpt: tierfall.Checkpointer) -> dict[str, Any]:
    return ckpt._config.model_dump(mode="json", exclude_none=True)


def test_before_the_first_start_a_run_is_not_there_by_path(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script asks whether there is anything to go on from; nobody has made the tiers' folders yet."""
    path = tmp_path / "tiers.json"
    config = make_config(nvme={}, pfs={"shared": True})
    path.write_text(json.dumps(config))
    monkeypatch.setenv("TIERFALL_CONFIG", str(path))
    fs = fsspec.filesystem("tiers", skip_instance_cache=True)
    assert not fs.exists("tiers://run")
    assert fs.ls("tiers://run") == []
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"w": torch.zeros(4)}, block=True)
    shutil.rmtree(tmp_path / "pfs")  # now the other tier remembers it
    with pytest.raises(UnreachableError, match="pfs could not be read"):
        fs.ls("tiers://run")
