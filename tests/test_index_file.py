"""The merged index of a checkpoint of several ranks: written, named in the record, rewritten, deleted with it, and
optional."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import tierfall
from tests.rank_kit import config_of, save_on_ranks
from tierfall.cli.app import app
from tierfall.config import Config
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit
from tierfall.core.tensor_index.index import read_index
from tierfall.core.types.values import CheckpointId
from tierfall.ops.reader import RunReader


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


# Afterwards ------------------------------------------------------------------------------------------


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
