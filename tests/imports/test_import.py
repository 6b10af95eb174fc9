"""``tierfall import``: what other programs saved becomes a step as any other: loaded, restored and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.contract.foreign import save_dcp
from tests.steps import files_below
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config, load_config
from tierfall.core.types.errors import CapacityError, StorageFullError, TierfallError
from tierfall.imports.importer import ImportResult, import_state, read_state

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> Config:
    """Two stored tiers; the second one packs, and is flushed to rarely."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "far").mkdir()
    return load_config(
        make_config(disk={}, far={"flush": {"every": 100}, "compress": {"codec": "planes"}})
    )


def save_torch(path: Path) -> Path:
    torch.save({"model": {"w": torch.ones(100)}, "epoch": 3}, path)
    return path


def bring_in(config: Config, path: Path, step: int = 7, **words: Any) -> ImportResult:
    return import_state(config, read_state(path, **words), step)


# Formats ---------------------------------------------------------------------------------------------


def test_a_dcp_folder_keeps_lists_and_values(config: Config, tmp_path: Path) -> None:
    state = {
        "list": [torch.arange(3), {"a": torch.ones(2), "b": "text"}],
        "plain": {"names": ["x", "y"], "n": 3, "none": None},
        "empty": torch.empty(0, 4),
    }
    bring_in(config, save_dcp(tmp_path / "dcp", state))
    loaded = tierfall.load(config)
    assert loaded["plain"] == state["plain"]
    assert torch.equal(loaded["list"][0], torch.arange(3))
    assert loaded["list"][1]["b"] == "text"
    assert loaded["empty"].shape == (0, 4)


def test_a_child_that_is_called_module_keeps_its_name(config: Config, tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(2), "head": torch.ones(3)}, tmp_path / "m.pt")
    bring_in(config, tmp_path / "m.pt")
    assert tierfall.load(config)["model"].keys() == {"module.w", "head"}


# A step as any other ----------------------------------------------------------------------------------


def test_what_a_tier_cannot_hold_is_not_begun(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    config = load_config(make_config(disk={"capacity": "64KiB"}))
    with pytest.raises(CapacityError, match="import to disk: it needs"):
        bring_in(config, save_torch(tmp_path / "c.pt"))
    assert not list((tmp_path / "disk").rglob("step-*"))


def test_a_run_that_another_node_trains_is_left_alone(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_torch(tmp_path / "c.pt")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}, block=True)
    monkeypatch.setattr("socket.gethostname", lambda: "another-node")
    before = files_below(tmp_path)
    with pytest.raises(TierfallError, match="would end its trainer, if that is alive"):
        bring_in(config, path, 40)
    assert files_below(tmp_path) == before


def test_a_tier_that_does_not_get_its_copy_is_left_to_the_next_start(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PosixBackend, key: str, **more: object) -> object:
        if "/far" in self.place and "step-" in key:
            raise StorageFullError(f"create {key}: no room")
        return create(self, key, **more)

    create = PosixBackend.create
    monkeypatch.setattr(PosixBackend, "create", fail)
    seen: list[tuple[int, int]] = []
    read = read_state(save_torch(tmp_path / "c.pt"))
    done = import_state(config, read, 7, lambda *counts: seen.append(counts))
    assert (done.tiers, done.left) == (("disk",), ("far",))
    assert seen[-1] == (done.bytes, 2 * done.bytes)
    monkeypatch.undo()
    with tierfall.open(config) as ckpt:
        assert ckpt.checkpoints()[-1].step == 7
    assert tierfall.load(tmp_path / "far", step=7)["epoch"] == tierfall.load(config)["epoch"]


def test_a_failure_within_the_image_leaves_nothing(config: Config, tmp_path: Path) -> None:
    """A file of DCP is truncated: its .metadata is whole, so that only the write finds it."""
    folder = save_dcp(tmp_path / "dcp", {"m": torch.arange(2000.0)})
    read = read_state(folder)
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-3000])
    with pytest.raises(tierfall.errors.IntegrityError, match="damaged, or truncated"):
        import_state(config, read, 7)
    assert not [path for path in (tmp_path / "disk").rglob("step-*") if any(path.iterdir())]
    with tierfall.open(config) as ckpt:
        assert ckpt.restore({"w": torch.ones(1)}) is None
