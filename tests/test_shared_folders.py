"""Which folders all nodes see: probed at open, compared with ``shared``, and the probe files are deleted."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.ranks.threads import network
from tests.open_ranks import SOON_S, Opener, close_all
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError, StorageFullError
from tierfall.core.types.values import LossClass
from tierfall.setup import start


class Two(Opener):
    """Two nodes, a rank each; ``far`` lies where ``where`` says, per rank, and is set to ``shared``."""

    def __init__(self, folder: Path, ranks: list[Ranks], where: Callable[[int], str]) -> None:
        super().__init__(folder, ranks)
        self.where = where

    def config(self, rank: int, **more: Any) -> Config:
        shared = {"shared": more.pop("shared")} if "shared" in more else {}
        place = self.folder / self.where(rank)
        tiers = [
            {"name": "host", "kind": "host", "folder": str(self.folder / str(rank) / "memory")},
            {"name": "far", "kind": "file", "path": str(place), **shared},
        ]
        return Config.model_validate({"run": "run", "max_wait": "10s", "tiers": tiers, **more})


def one_folder(rank: int) -> str:
    return "far"


def own_folders(rank: int) -> str:
    return f"far-{rank}"


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if keys.PROBE_FOLDER in path.parts]


@pytest.mark.parametrize(("where", "expected"), [(one_folder, True), (own_folders, False)])
@pytest.mark.parametrize("set_so", [False, True])
def test_what_is_not_set_is_found_out_and_what_is_set_may_agree(
    tmp_path: Path,
    ranks: list[Ranks],
    where: Callable[[int], str],
    expected: bool,
    set_so: bool,
) -> None:
    both = Two(tmp_path, ranks, where).all_open(**({"shared": expected} if set_so else {}))
    for ckpt in both:
        handle = ckpt.save(1, {"w": torch.ones(4), "rng": None})
    handle.wait(timeout=SOON_S)
    survives = [c.statistics().newest[LossClass.NODE] for c in both]
    assert survives == ([1, 1] if expected else [None, None])
    close_all(both)
    records = list(tmp_path.glob("far*/run/step-00000001-a0001/commit.json"))
    assert len(records) == (1 if expected else 2)
    assert leftovers(tmp_path) == []


def test_a_folder_that_only_some_nodes_see_is_refused(tmp_path: Path) -> None:
    with network(["a", "b", "c"]) as three:
        outcomes = Two(tmp_path, three, lambda rank: f"far-{rank // 2}").all_open()
    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
        assert "the nodes of rank 1 see what rank 0 writes there, those of rank 2 do not" in str(
            outcome
        )


def test_what_a_network_file_system_shows_late_is_waited_for(
    tmp_path: Path, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(start.PATIENCE_S, None, SOON_S)
    looks = itertools.count()
    real = PosixBackend.stat

    def stat(self: PosixBackend, key: str) -> Any:
        late = keys.PROBE_FOLDER in key and next(looks) < 4
        return real(self, f"{key}-not-yet" if late else key)

    monkeypatch.setattr(PosixBackend, "stat", stat)
    both = Two(tmp_path, ranks, one_folder).all_open()
    assert [c._config.stored[0].shared for c in both] == [True, True]
    close_all(both)


def takes_no_probe(patch: pytest.MonkeyPatch) -> None:
    """As a full disk does."""
    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if keys.PROBE_FOLDER in key:
            raise StorageFullError(f"{key}: no space")
        return real(self, key, **options)

    patch.setattr(PosixBackend, "create", create)


def saved_on(folder: Path, nodes: list[str]) -> None:
    """Save a step into the one folder, as a job on these nodes, all of which are started anew after."""
    with network(nodes) as ranks:
        ckpts = Two(folder, ranks, one_folder).all_open()
        for ckpt in ckpts:
            handle = ckpt.save(1, {"w": torch.ones(4), "rng": None})
        handle.wait(timeout=SOON_S)
        close_all(ckpts)
    for memory in folder.glob("*/memory"):
        shutil.rmtree(memory)


@pytest.mark.parametrize(
    ("rank", "before", "full"),
    [(0, ["a", "b"], False), (1, ["a"], False), (1, ["a", "b"], False), (1, ["a", "b"], True)],
)
def test_a_node_on_which_a_shared_folder_is_not_mounted_ends_the_start(
    tmp_path: Path,
    ranks: list[Ranks],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    before: list[str],
    full: bool,
) -> None:
    """What the other rank's records say counts, whichever it is, and however many ranks the run had before."""
    saved_on(tmp_path, before)
    if full:
        takes_no_probe(monkeypatch)
    outcomes = Two(tmp_path, ranks, lambda r: "unmounted" if r == rank else "far").all_open()
    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
        assert "Mount it on all nodes" in str(outcome)
        assert f"rank {1 - rank} finds that" in str(outcome)
    assert not list((tmp_path / "unmounted").rglob("a0*.json"))
