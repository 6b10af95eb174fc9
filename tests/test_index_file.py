"""The merged index of a checkpoint of several ranks: written, named in the record, rewritten, deleted with it, and
optional."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
import zstandard
from typer.testing import CliRunner

import tierfall
from tests.rank_kit import config_of, save_on_ranks
from tierfall.backends.posix.backend import PosixBackend
from tierfall.cli.app import app
from tierfall.config import Config
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit
from tierfall.core.tensor_index import store as index_store
from tierfall.core.tensor_index.index import read_index
from tierfall.core.tensor_index.store import build_index
from tierfall.core.types import keys
from tierfall.core.types.errors import BackendError, UnreachableError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.ops.reader import RunReader
from tierfall.tiers.stored import StoredTier

ONE = CheckpointId(1, 1)


def state(rank: int, step: int) -> dict[str, Any]:
    """Another tensor from step 4 on."""
    more = {"late": torch.zeros(3)} if step >= 4 else {}
    return {"w": torch.full((6, 5), float(rank + step)), "rng": None, **more}


def folder(tmp_path: Path, step: int, tier: str = "shared") -> Path:
    return tmp_path / tier / "run" / f"step-{step:08d}-a0001"


def commit_of(config: Config, tier: str, step: int) -> Commit:
    with RunReader(config) as reader:
        return reader.stores[tier].read_commit(CheckpointId(step, 1))


Cli = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., str]:
    """Run a command over tiers of the test's folder, and return what it said."""

    def run(config: Config, *words: str, code: int = 0) -> str:
        path = tmp_path / "tiers.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
        done = CliRunner().invoke(app, [*words, "--config", str(path)])
        assert done.exit_code == code, done.output
        return done.output

    return run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CheckpointId]:
    """Which checkpoints an index was made for, of manifests."""
    found: list[CheckpointId] = []
    real = index_store.build_index

    def note(store: Any, commit: Commit) -> bytes:
        found.append(commit.lineage.checkpoint)
        return real(store, commit)

    monkeypatch.setattr(index_store, "build_index", note)
    return found


# At a commit -----------------------------------------------------------------------------------------


def test_a_commit_names_the_index_which_says_where_every_block_lies(
    config: Config, tmp_path: Path
) -> None:
    save_on_ranks(config, 3, [1], state)
    commit = commit_of(config, "shared", 1)
    data = (folder(tmp_path, 1) / "index.zst").read_bytes()
    named = commit.file("index.zst")
    assert named is not None
    assert (named.bytes, named.digest) == (len(data), sha256(data))
    index = read_index(data, what="index")
    assert index.names == ("w",)
    (w,) = index.find("w")
    assert [block.rank for block in w.blocks] == [0, 1, 2]
    for block in w.blocks:
        image = folder(tmp_path, 1) / f"rank-{block.rank:05d}-of-00003.safetensors"
        data_bytes = image.read_bytes()
        start = 8 + int.from_bytes(data_bytes[:8], "little") + block.start
        read = torch.frombuffer(bytearray(data_bytes[start : start + 120]), dtype=torch.float32)
        assert torch.equal(read.view(6, 5), state(block.rank, 1)["w"])


def test_it_is_made_once_for_one_layout_and_is_the_same_on_every_tier(
    tmp_path: Path, made: list[CheckpointId]
) -> None:
    config = config_of(tmp_path, shared={}, packed={"compress": {"codec": "zstd"}})
    save_on_ranks(config, 2, [1, 2, 3, 4, 5], state)
    assert sorted(made)[0] == ONE
    assert len(made) <= 4, "two tiers may begin at once; each layout is read once by each"
    assert {id.step for id in made} == {1, 4}
    files = [
        folder(tmp_path, s, t) / "index.zst" for s in range(1, 6) for t in ("shared", "packed")
    ]
    contents = [file.read_bytes() for file in files]
    assert len(set(contents[:6])) == len(set(contents[6:])) == 1
    assert contents[0] != contents[6]


def test_one_rank_and_tiers_of_single_nodes_have_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, own={"shared": False}, shared={})
    save_on_ranks(config, 2, [1], state)
    assert not (folder(tmp_path, 1, "own") / "index.zst").exists()
    assert (folder(tmp_path, 1) / "index.zst").exists()
    alone = config_of(tmp_path / "alone")
    with tierfall.open(alone) as ckpt:
        ckpt.save(1, state(0, 1), block=True)
    assert not (folder(tmp_path / "alone", 1) / "index.zst").exists()


def test_a_tier_that_refuses_the_index_takes_the_checkpoint(
    config: Config,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = PosixBackend.create

    def refuse(self: PosixBackend, key: str, **options: Any) -> Any:
        if key.endswith("index.zst"):
            raise BackendError(f"{key}: no")
        return real(self, key, **options)

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "create", refuse)
        save_on_ranks(config, 2, [1], state)
    assert "1@1 is committed without a merged index" in caplog.text
    assert commit_of(config, "shared", 1).file("index.zst") is None
    assert "nothing is damaged" in cli(config, "verify")
    assert torch.equal(tierfall.load(config)["w"], state(0, 1)["w"])


def test_a_tier_that_does_not_answer_is_asked_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr("tierfall.core.runtime.retries.FIRST_S", 0.01)
    tries: list[str] = []
    real = PosixBackend.create

    def silent(self: PosixBackend, key: str, **options: Any) -> Any:
        if key.endswith("index.zst") and len(tries) < 8:
            tries.append(key)
            raise UnreachableError(f"{key}: nobody answers")
        return real(self, key, **options)

    monkeypatch.setattr(PosixBackend, "create", silent)
    save_on_ranks(config, 2, [1], state)
    assert len(tries) == 8
    assert commit_of(config, "shared", 1).file("index.zst") is not None


# Afterwards ------------------------------------------------------------------------------------------


def test_it_goes_with_its_checkpoint(tmp_path: Path, cli: Cli) -> None:
    config = config_of(tmp_path, shared={"retain": {"last": 2}})
    save_on_ranks(config, 2, [1, 2, 3], state)
    left = sorted(path.name for path in (tmp_path / "shared/run").glob("step-*"))
    assert left == ["step-00000002-a0001", "step-00000003-a0001"]
    cli(config, "rm", "2")
    assert not folder(tmp_path, 2).exists()


def test_what_a_kill_left_of_it_is_collected(config: Config, tmp_path: Path) -> None:
    save_on_ranks(config, 2, [1, 2], state)
    (folder(tmp_path, 2) / "commit.json").unlink()  # as before the commit
    (tmp_path / "shared/run/latest").write_text("step-00000001-a0001\n")
    save_on_ranks(config, 2, [], state)
    assert not folder(tmp_path, 2).exists()
    assert (folder(tmp_path, 1) / "index.zst").exists()


def test_rank_0_takes_it_away_with_its_own_files(config: Config, tmp_path: Path) -> None:
    """A copy that was given up is collected rank by rank."""
    save_on_ranks(config, 2, [1], state)
    (folder(tmp_path, 1) / "commit.json").unlink()
    assert [keys.is_written_by("index.zst", Shard(r, 2)) for r in (0, 1)] == [True, False]
    store = StoredTier(name="shared", run="run", backend=PosixBackend(tmp_path / "shared"))
    store.discard(ONE, Shard(1, 2), attempt=None)
    assert (folder(tmp_path, 1) / "index.zst").exists()
    store.discard(ONE, Shard(0, 2), attempt=None)
    assert not folder(tmp_path, 1).exists()
    store.close()


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_damaged_one_costs_nothing_is_reported_and_is_made_anew(
    tmp_path: Path, cli: Cli, how: str, codec: str
) -> None:
    config = config_of(tmp_path, shared={"compress": {"codec": codec}})
    save_on_ranks(config, 2, [1], state)
    path = folder(tmp_path, 1) / "index.zst"
    good, images = path.read_bytes(), sorted(folder(tmp_path, 1).glob("rank-*"))
    times = [image.stat().st_mtime_ns for image in images]
    damage(path, how)
    assert torch.equal(tierfall.load(config)["w"], state(0, 1)["w"])
    message = cli(config, "verify", code=1)
    assert "damaged: shared 1@1 index.zst" in message
    assert "restores use the manifests instead" in message
    assert "tierfall verify 1@1 --tier shared --repair" in message
    message = cli(config, "verify", "1", "--tier", "shared", "--repair")
    assert "index.zst rebuilt from the manifests" in message
    assert path.read_bytes() == good
    assert [image.stat().st_mtime_ns for image in images] == times, "nothing else is written"
    cli(config, "verify")


def test_an_index_that_comes_out_otherwise_is_named_anew(
    config: Config, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another zstd may write other bytes of the same."""
    save_on_ranks(config, 2, [1], state)
    before = (folder(tmp_path, 1) / "index.zst").read_bytes()
    damage(folder(tmp_path, 1) / "index.zst", "flipped")
    real = zstandard.ZstdCompressor
    monkeypatch.setattr(
        "tierfall.core.tensor_index.builder.zstandard.ZstdCompressor",
        lambda **options: real(**{**options, "write_checksum": True}),
    )
    cli(config, "verify", "--repair")
    assert (folder(tmp_path, 1) / "index.zst").read_bytes() != before
    cli(config, "verify")


def test_with_other_damage_all_is_written_anew_and_the_index_too(tmp_path: Path, cli: Cli) -> None:
    config = config_of(tmp_path, shared={}, far={})
    save_on_ranks(config, 2, [1], state)
    damage(folder(tmp_path, 1) / "index.zst", "missing")
    damage(folder(tmp_path, 1) / "rank-00001-of-00002.safetensors", "flipped")
    message = cli(config, "verify", "--repair")
    assert "rewritten from far" in message
    assert (folder(tmp_path, 1) / "index.zst").exists()
    cli(config, "verify")


def test_a_copy_has_one(tmp_path: Path, cli: Cli) -> None:
    config = config_of(tmp_path, shared={}, far={"flush": {"every": 100}})
    with_far = folder(tmp_path, 1, "far")
    save_on_ranks(config_of(tmp_path), 2, [1], state)
    (tmp_path / "far").mkdir()
    cli(config, "copy", "1", "--to", "far")
    assert (with_far / "index.zst").read_bytes() == (folder(tmp_path, 1) / "index.zst").read_bytes()
    cli(config, "verify")
    assert "it is good" in cli(config, "copy", "1", "--to", "far")
    assert "index.zst" in cli(config, "show", "1")


# Reading it ------------------------------------------------------------------------------------------


def test_a_manifest_that_is_another_makes_no_index(config: Config, tmp_path: Path) -> None:
    save_on_ranks(config, 2, [1, 2], state)
    manifest = "rank-00001-of-00002.json"
    (folder(tmp_path, 1) / "index.zst").unlink()
    (folder(tmp_path, 1) / manifest).write_bytes((folder(tmp_path, 2) / manifest).read_bytes())
    with RunReader(config) as reader:
        store = reader.stores["shared"]
        with pytest.raises(tierfall.errors.IntegrityError, match="not the manifest"):
            build_index(store, store.read_commit(ONE))
