"""What several ranks saved is exported whole, and stock programs take it into layouts of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

import tierfall
from tests.distributed.job import Job
from tierfall.cli.app import app
from tierfall.core.tensor_index.store import read_named_index
from tierfall.core.types.values import CheckpointId
from tierfall.ops.reader import RunReader

PROGRAM = Path(__file__).with_name("sharded_program.py")


@pytest.fixture
def config(tmp_path: Path) -> tierfall.Config:
    """The tier that all ranks of the program see."""
    config = tierfall.Config.model_validate(
        {
            "run": "one",
            "tiers": [
                {"name": "host", "kind": "host", "folder": str(tmp_path / "no-memory")},
                {"name": "pfs", "kind": "file", "path": str(tmp_path / "pfs"), "shared": True},
            ],
        }
    )
    (tmp_path / "tiers.yaml").write_text(
        yaml.safe_dump(config.model_dump(mode="json", exclude_none=True))
    )
    return config


def export(tmp_path: Path, *words: str) -> None:
    done = CliRunner().invoke(
        app, ["export", "2", "--config", str(tmp_path / "tiers.yaml"), *words]
    )
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("layout", "ranks", "into"),
    [
        ("fsdp", 4, [("fsdp", 2), ("fsdp", 4)]),
        pytest.param("tp-fsdp", 4, [("fsdp", 2)], marks=pytest.mark.torture),
    ],
)
def test_stock_dcp_loads_an_exported_folder_in_other_layouts(
    make_job: Callable[..., Job],
    tmp_path: Path,
    config: tierfall.Config,
    layout: str,
    ranks: int,
    into: list[tuple[str, int]],
) -> None:
    first, *_ = make_job(ranks, program=PROGRAM).run("train", layout=layout, until=2)
    export(tmp_path, "--format", "dcp", "--to", str(tmp_path / "dcp"))
    for other, world_size in into:
        job = make_job(world_size, program=PROGRAM)
        digests = job.run("load_dcp", layout=other)
        assert digests == [first["digest"]] * world_size
    loaded = tierfall.load(config)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=False)
    export(tmp_path, "--only", "model", "--to", str(tmp_path))
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == loaded["model"].keys()
    for name, tensor in loaded["model"].items():
        assert torch.equal(tensors[name], tensor)
        assert torch.equal(whole["model"][name], tensor)
    assert whole["per_rank"].keys() == {str(rank) for rank in range(1, ranks)}


def test_the_index_has_the_blocks_of_fsdp_by_rank(
    make_job: Callable[..., Job], config: tierfall.Config
) -> None:
    make_job(3, program=PROGRAM).run("train", layout="fsdp", until=2)
    with RunReader(config) as reader:
        store = reader.stores["pfs"]
        commit = store.read_commit(CheckpointId(2, 1))
        assert commit.file("index.zst") is not None
        index = read_named_index(store, commit)
    (weight,) = index.find("model.0.weight")
    assert weight.shape == (26, 16)
    assert [(b.rank, b.offset, b.lengths) for b in weight.blocks] == [
        (0, (0, 0), (9, 16)),
        (1, (9, 0), (9, 16)),
        (2, (18, 0), (8, 16)),
    ]
