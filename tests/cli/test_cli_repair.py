"""``tierfall verify --repair``: damaged copies are rewritten from good ones, and no good copy is put at risk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, folder, save_on_two_nodes

import tierfall
from tests.contract.kit import IMAGE, MANIFEST, flip
from tests.steps import files_below, state_of, steps_on
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.format import documents
from tierfall.core.format.decided import Word
from tierfall.core.format.records import Attempt, Commit
from tierfall.core.types.errors import StorageFullError
from tierfall.core.types.values import CheckpointId
from tierfall.ops import sync
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]
TWO = CheckpointId(2, 1)


def files_of_persons(root: Path) -> dict[str, bytes]:
    """Every file, but what says of a copy that it was found damaged."""
    return {name: data for name, data in files_below(root).items() if "-damaged-" not in name}


def store_of(root: Path) -> StoredTier:
    return StoredTier(name=root.name, run="run", backend=PosixBackend(root))


@pytest.fixture
def make(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Cli]:
    """``make(disk, far)``: steps 1 (pinned) and 2, or more, on both tiers, packed by these codecs."""

    def saved(disk: str = "none", far: str = "none", steps: int = 2, **words: Any) -> Cli:
        config = make_config(
            disk={"compress": {"codec": disk}}, far={"compress": {"codec": far}}, **words
        )
        with tierfall.open(config) as ckpt:
            for step in range(1, steps + 1):
                ckpt.save(step, state_of(step), block=True)
            ckpt.pin(1)
        return Cli(tmp_path, config)

    return saved


@pytest.fixture
def cli(make: Callable[..., Cli]) -> Cli:
    return make()


@pytest.mark.parametrize("far", ["there", "damaged"])
def test_what_the_tier_is_still_owed_stands_in_the_record_that_is_written_anew(
    cli: Cli, tmp_path: Path, far: str
) -> None:
    record = folder(tmp_path / "disk", 2) / "commit.json"
    owes = replace(store_of(tmp_path / "disk").read_commit(TWO), owed=(CheckpointId(1, 7),))
    record.write_bytes(owes.encode())
    flip(folder(tmp_path / "disk", 2) / IMAGE, 10_000)
    if far == "damaged":  # in another chunk: both together have all
        flip(folder(tmp_path / "far", 2) / IMAGE, -1)
    (repair, *_) = cli.json("verify", "--tier", "disk", "--repair")["repairs"]
    assert repair["done"]
    assert store_of(tmp_path / "disk").read_commit(TWO).owed == owes.owed


def test_a_packed_copy_is_never_its_own_source(make: Callable[..., Cli], tmp_path: Path) -> None:
    """Image and record are replaced one after the other: in between its own good chunks could not be read."""
    cli = make("zstd", "zstd")
    for tier, part in (("disk", 3), ("far", 2)):
        image = folder(tmp_path / tier) / f"{IMAGE}.zst"
        flip(image, image.stat().st_size * (part - 1) // 3)
    before = files_of_persons(tmp_path)
    document = cli.json("verify", "--repair", code=1)
    assert [repair["done"] for repair in document["repairs"]] == [False, False]
    assert files_of_persons(tmp_path) == before


def test_a_copy_is_repaired_from_memory(make: Callable[..., Cli], tmp_path: Path) -> None:
    cli = make(host={"on_close": "keep"})
    for tier in ("disk", "far"):
        flip(folder(tmp_path / tier) / IMAGE, -1)
    repairs = cli.json("verify", "--repair")["repairs"]
    assert {repair["why"] for repair in repairs} == {"rewritten from host"}


# At no moment is something good gone -----------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_a_repair_that_ends_after_any_write_can_be_done_again(
    make: Callable[..., Cli], tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier fails when the n-th file is to be published: image, its record, manifest, commit record."""
    cli = make(codec, codec)
    good = files_below(tmp_path / "far")
    real, count, write = PosixBackend.create, 0, 0

    def fail_late(self: Any, key: str, **words: Any) -> Any:
        nonlocal count
        if "/step-" in key:
            count += 1
            if count >= write:
                raise StorageFullError("no space")
        return real(self, key, **words)

    for write in range(1, 5):
        flip(folder(tmp_path / "disk") / "commit.json", 40)
        flip(folder(tmp_path / "disk") / MANIFEST, 40)
        count = 0
        with monkeypatch.context() as patch:
            patch.setattr(PosixBackend, "create", fail_late)
            answer = cli("verify", "--repair", code=-1)
        assert files_below(tmp_path / "far") == good
        assert (folder(tmp_path / "disk") / "commit.json").exists(), "it never seems unfinished"
        assert answer.code == (1 if count >= write else 0)
        assert cli.steps()["1@1"].keys() == {"disk", "far"}
        assert tierfall.load(cli.config, step=1)["extra"] == {"step": 1}
        cli("verify", "--repair")
        assert steps_on(tmp_path / "disk") == [1, 2]


def test_a_shared_copy_is_repaired_from_the_parts_of_nodes(tmp_path: Path) -> None:
    config = save_on_two_nodes(tmp_path)
    image = folder(tmp_path / "pfs") / "rank-00000-of-00002.safetensors"
    before = image.read_bytes()
    flip(image, 70)
    (repair,) = Cli(tmp_path, config).json("verify", "1", "--tier", "pfs", "--repair")["repairs"]
    assert (repair["done"], image.read_bytes()) == (True, before), repair


# What is not touched ---------------------------------------------------------------------------------


def test_another_life_of_the_run_is_not_written_over(
    make_config: MakeConfig, make: Callable[..., Cli], tmp_path: Path
) -> None:
    with tierfall.open(make_config(other={})) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    cli = make()
    for damaged in (IMAGE, "commit.json"):
        shutil.rmtree(folder(tmp_path / "disk"))
        shutil.copytree(folder(tmp_path / "other"), folder(tmp_path / "disk"))
        flip(folder(tmp_path / "disk") / damaged, 70 if damaged == IMAGE else 40)
        before = files_of_persons(tmp_path)
        answer = cli("verify", "--repair", code=1)
        assert "another checkpoint than that on other tiers" in answer.err
        assert files_of_persons(tmp_path) == before


def test_what_a_newer_tierfall_wrote_is_not_written_over(cli: Cli, tmp_path: Path) -> None:
    make_newer(folder(tmp_path / "disk") / "commit.json")
    before = files_below(tmp_path)
    answer = cli("verify", "--repair", code=1)
    assert "not repaired: disk 1@1 commit.json: a newer tierfall wrote it" in answer.err
    assert "not checked: disk 1@1 commit.json: " in answer.err
    assert "written in format 9" in answer.err
    assert "nothing is damaged, 1 file of a newer tierfall could not be checked" in answer.out
    assert "could not be checked\n" in answer.out
    assert "tierfall rm" not in answer.err
    assert files_below(tmp_path) == before


def make_newer(path: Path) -> None:
    """Seal a record in a format that this version does not know."""
    members = json.loads(path.read_text())
    for name in ("format", "requires", "digest"):
        members.pop(name)
    newer = documents.seal(members).rpartition(b',"digest"')[0]
    newer = newer.replace(b'"format":1', b'"format":9')
    path.write_bytes(newer + f',"digest":"{documents.sha256(newer)}"}}\n'.encode())


@pytest.mark.parametrize("tier", ["disk", "far"])
def test_beside_a_copy_of_a_newer_tierfall_a_damaged_one_is_not_called_lost(
    cli: Cli, tmp_path: Path, tier: str
) -> None:
    make_newer(folder(tmp_path / tier) / "commit.json")
    other = "far" if tier == "disk" else "disk"
    flip(folder(tmp_path / other) / IMAGE, -1)
    for words in (["verify", "1"], ["verify", "1", "--tier", other]):
        answer = cli(*words, code=1)
        assert "tierfall rm" not in answer.err
        assert "no good copy of it is left" not in answer.err


def test_what_is_to_be_deleted_is_not_repaired(cli: Cli, tmp_path: Path) -> None:
    store = store_of(tmp_path / "far")
    store.decided.add(store.decided.read().next(Word.DELETED, TWO, None))
    store.close()
    flip(folder(tmp_path / "disk", 2) / IMAGE, -1)
    assert "marked for deletion" in cli("verify", "--repair", code=1).err


def test_a_copy_that_is_dropped_at_the_last_moment_does_not_come_back(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trainer of another node does between the last look and the commit record."""
    two = folder(tmp_path / "disk", 2)
    flip(two / IMAGE, -1)
    real = StoredTier.commit

    def drop_first(store: StoredTier, commit: Commit, **words: Any) -> None:
        store.delete(commit.lineage.checkpoint, attempt=None, known=None)
        real(store, commit, **words)

    monkeypatch.setattr(StoredTier, "commit", drop_first)
    assert "2@1 was deleted while it was written to disk" in cli("verify", "--repair", code=1).err
    assert not two.exists()
    monkeypatch.undo()
    cli("verify")
    assert cli.steps()["2@1"].keys() == {"far"}


def test_a_start_elsewhere_fences_a_repair(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "disk") / "commit.json"
    flip(path, 40)
    damaged, real = path.read_bytes(), sync.send

    def start(*words: Any, **more: Any) -> Any:
        store = store_of(tmp_path / "disk")
        store.fence.create(
            Attempt(run="run", number=2, id="f" * 32, node="other", pid=7, wall_time_s=1.0)
        )
        store.close()
        return real(*words, **more)

    monkeypatch.setattr(sync, "send", start)
    assert "process 7 on other" in cli("verify", "--repair", code=1).err
    assert path.read_bytes() == damaged
