"""``tierfall export`` of a checkpoint of several ranks: merged, complete, and nothing of any rank is dropped
silently."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import tierfall
from tests.rank_kit import config_of, export_from, save_on_ranks
from tierfall.config import Config
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.merge import MergedHeader, TensorBlock
from tierfall.core.image.tree import MapNode, TensorNode
from tierfall.core.load.build import Fill
from tierfall.core.types.errors import BackendError, ConfigError, IntegrityError, StorageFullError
from tierfall.core.types.values import CheckpointId
from tierfall.export import gather, output
from tierfall.export.export import ExportFormat

TIERS = {"raw": {}, "zstd": {"compress": {"codec": "zstd"}}}
STEP = "run/step-00000001-a0001"


def make_state(rank: int, step: int) -> dict[str, Any]:
    """What two ranks have alike, what differs, and a stage that each has alone."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "stages": {f"stage{rank}": torch.full((5, 7), float(rank + 1))},
        "extra": {"epoch": 3, "seen": 100 + rank},
        "order": np.arange(4) + 10 * rank,
        "running": torch.full((3,), float(rank)),
        "rng": None,
    }


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = config_of(tmp_path, **TIERS)
    save_on_ranks(config, 2, [1], make_state)
    return config


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# What is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_the_torch_file_is_what_load_returns_and_what_other_ranks_had_otherwise(
    config: Config, out: Path, tier: str
) -> None:
    done = export_from(config, tier, to=out, format=ExportFormat.TORCH)
    assert done.path == out / "run-step-00000001.pt"
    assert set(done.sources) == {tier}
    assert "below per_rank" in done.notes[-1]
    read = torch.load(done.path, weights_only=False)
    own = read.pop("per_rank")
    loaded = tierfall.load(config)
    assert read.keys() == loaded.keys()
    for name, tensor in loaded["model"].items():
        assert torch.equal(read["model"][name], tensor)
    assert read["extra"] == {"epoch": 3, "seen": 100}
    assert {k: v.tolist() for k, v in read["stages"].items()} == {
        "stage0": [[1.0] * 7] * 5,
        "stage1": [[2.0] * 7] * 5,
    }
    moments = loaded["optimizer"]["state"][0]
    assert torch.equal(read["optimizer"]["state"][0]["exp_avg"], moments["exp_avg"])
    assert own.keys() == {"1"}
    assert own["1"].keys() == {"extra", "order", "running"}
    assert own["1"]["extra"] == {"epoch": 3, "seen": 101}
    assert own["1"]["order"].tolist() == [10, 11, 12, 13]
    assert own["1"]["running"].tolist() == [1.0, 1.0, 1.0]


def test_the_safetensors_file_has_every_tensor_whole_and_every_value_by_name(
    config: Config, out: Path
) -> None:
    done = export_from(config, "raw", to=out)
    opened = safetensors.torch.load_file(done.path)
    assert len(opened) == done.tensors
    assert opened["stages.stage1"].tolist() == [[2.0] * 7] * 5
    assert opened["per_rank.1.running"].tolist() == [1.0] * 3
    assert opened["running"].tolist() == [0.0] * 3
    for name, tensor in make_state(0, 1)["model"].state_dict().items():
        assert torch.equal(opened[f"model.{name}"], tensor)
    with safetensors.safe_open(done.path, "pt") as file:
        metadata = file.metadata()
    values = json.loads(metadata["tierfall.values"])
    assert {"epoch": 3, "seen": 100} in values
    assert {"epoch": 3, "seen": 101} in values
    assert "per_rank.1.order" in opened


def test_a_part_is_named_as_of_one_rank(config: Config, out: Path) -> None:
    done = export_from(config, "zstd", to=out, only=("model",))
    assert done.path == out / "model.safetensors"
    torch.nn.Linear(40, 30).load_state_dict(safetensors.torch.load_file(done.path))
    own = export_from(config, "raw", to=out, format=ExportFormat.TORCH, only=("per_rank.1.extra",))
    assert torch.load(own.path) == {"epoch": 3, "seen": 101}
    both = export_from(config, "raw", to=out, only=("model", "extra"))
    assert any("omitted" in note and "extra" in note for note in both.notes)
    with pytest.raises(ConfigError, match="extra has no tensor"):
        export_from(config, "raw", to=out, only=("extra",))
    with pytest.raises(ConfigError, match="no part of that name"):
        export_from(config, "raw", to=out, only=("per_rank.0",))


def test_ranks_that_have_all_alike_leave_nothing_of_their_own(tmp_path: Path, out: Path) -> None:
    config = config_of(tmp_path)
    save_on_ranks(config, 3, [1], lambda rank, step: make_state(0, step))
    done = export_from(config, "shared", to=out, format=ExportFormat.TORCH)
    assert "per_rank" not in torch.load(done.path, weights_only=False)
    assert not any("per_rank" in note for note in done.notes)


def test_an_entry_called_as_that_of_the_ranks_is_kept_apart(tmp_path: Path, out: Path) -> None:
    config = config_of(tmp_path)
    save_on_ranks(
        config, 2, [1], lambda rank, step: {"per_rank": {"mine": rank, "w": torch.ones(2)}}
    )
    read = torch.load(
        export_from(config, "shared", to=out, format=ExportFormat.TORCH).path, weights_only=False
    )
    assert read["per_rank"]["mine"] == 0
    assert read["per_rank_"]["1"]["per_rank"] == {"mine": 1}


def test_the_random_state_of_each_rank_is_kept(tmp_path: Path, out: Path) -> None:
    """All ranks are threads here, so what differs is put into one of them."""
    config = config_of(tmp_path)
    states = [torch.Generator().manual_seed(rank) for rank in range(2)]
    save_on_ranks(
        config, 2, [1], lambda rank, step: {"w": torch.ones(2), "rng": {"mine": states[rank]}}
    )
    done = export_from(config, "shared", to=out, format=ExportFormat.TORCH)
    read = torch.load(done.path, weights_only=False)
    assert torch.equal(read["rng"]["mine"].get_state(), states[0].get_state())
    assert torch.equal(read["per_rank"]["1"]["rng"]["mine"].get_state(), states[1].get_state())


def test_where_ranks_have_values_of_another_kind_both_are_kept(tmp_path: Path, out: Path) -> None:
    config = config_of(tmp_path)
    mixed = [{"a": 5, "b": {"c": torch.ones(1)}}, {"a": {"x": torch.zeros(1)}, "b": True}]
    save_on_ranks(config, 2, [1], lambda rank, step: {**mixed[rank], "rng": None})
    done = export_from(config, "shared", to=out, format=ExportFormat.TORCH)
    read = torch.load(done.path, weights_only=False)
    assert read["a"] == 5
    assert read["b"] == {"c": torch.ones(1)}
    assert read["per_rank"]["1"] == {"a": {"x": torch.zeros(1)}, "b": True}


def test_what_is_compared_in_slices_is_compared_whole(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "COMPARED_BYTES", 4096)
    config = config_of(tmp_path)

    def state(rank: int, step: int) -> dict[str, Any]:
        same, last = torch.arange(5000.0), torch.arange(5000.0)
        last[-1] += rank
        return {"n": torch.full((2,), float(rank)), "same": same, "last": last, "rng": None}

    save_on_ranks(config, 2, [1], state)
    opened = safetensors.torch.load_file(export_from(config, "shared", to=out).path)
    assert opened.keys() == {"n", "same", "last", "per_rank.1.n", "per_rank.1.last"}
    assert torch.equal(opened["per_rank.1.last"], state(1, 1)["last"])


@pytest.mark.parametrize("room", [1, 24, 60, 1000])
def test_blocks_of_columns_are_put_together_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Two ranks have columns of one tensor."""
    monkeypatch.setattr(gather, "ROWS_BYTES", room)
    whole = torch.arange(60, dtype=torch.uint8).reshape(10, 6)
    data = [whole[:, :4].contiguous().flatten(), whole[:, 4:].contiguous().flatten()]
    columns = tuple(
        TensorBlock(rank=r, start=0, end=len(data[r]), offset=(0, 4 * r), lengths=(10, 4 - 2 * r))
        for r in range(2)
    )
    header = ImageHeader(
        what="header",
        data_start=0,
        data_bytes=60,
        tensors=(StoredTensor("w", torch.uint8, (10, 6), 0, 60),),
        tree=MapNode("dict", (("w", TensorNode(0)),)),
        values=(),
    )
    alive: list[int] = []

    class Images:
        world_size = 2

        def read(self, rank: int, fills: Sequence[Fill]) -> None:
            alive.append(sum(fill.end - fill.start for fill in fills))
            for fill in fills:
                for target in fill.targets:
                    target.copy_(data[rank][fill.start : fill.end])

    told: list[tuple[int, int]] = []
    gathered = gather.MergedCheckpoint(
        run="run",
        id=CheckpointId(1, 1),
        merged=MergedHeader(header=header, blocks=(columns,), replicas={}),
        images=Images(),  # type: ignore[arg-type]
        own=None,
        tally=ReadTally(),
        watch=lambda done, total: told.append((done, total)),
    )
    path = tmp_path / "file"
    with open(path, "wb") as file:
        gathered.write({0: (3, 70)}, file.fileno())
    written = path.read_bytes()
    assert written[3:63] == written[70:130] == bytes(range(60))
    assert max(alive) <= max(room, 4)
    assert told[-1] == (60, 60)


# What goes wrong -------------------------------------------------------------------------------------


def test_of_tensors_that_do_not_fit_together_load_takes_rank_0s_and_an_export_both(
    tmp_path: Path, out: Path
) -> None:
    config = config_of(tmp_path)
    save_on_ranks(config, 2, [1], lambda rank, step: {"w": torch.ones(3 + rank), "x": 1})
    assert len(tierfall.load(config)["w"]) == 3
    opened = safetensors.torch.load_file(export_from(config, "shared", to=out).path)
    assert (len(opened["w"]), len(opened["per_rank.1.w"])) == (3, 4)


@pytest.mark.parametrize("format", ExportFormat)
def test_damage_is_read_from_the_next_tier_and_without_one_nothing_is_written(
    config: Config, tmp_path: Path, out: Path, format: ExportFormat
) -> None:
    image = tmp_path / "raw" / STEP / "rank-00001-of-00002.safetensors"
    flip(image, -4)
    done = export_from(config, "raw", "zstd", to=out, format=format)
    assert set(done.sources) == {"raw", "zstd"}
    assert any("on raw" in fallback.what for fallback in done.fallbacks)
    with pytest.raises(IntegrityError, match="damaged in every copy"):
        export_from(config, "raw", to=out.parent / "other" / "deep", format=format)
    assert not (out.parent / "other").exists()


@pytest.mark.parametrize("format", ExportFormat)
def test_a_full_disk_leaves_nothing(
    config: Config, out: Path, format: ExportFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if offset > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(output.os, "pwrite", full)
    with pytest.raises(StorageFullError, match="No space left"):
        export_from(config, "raw", to=out, format=format)
    assert not out.parent.exists()


def test_a_rank_whose_part_is_nowhere_is_an_error(
    config: Config, tmp_path: Path, out: Path
) -> None:
    for tier in TIERS:
        (tmp_path / tier / STEP / "rank-00001-of-00002.json").unlink()
    with pytest.raises((IntegrityError, BackendError), match="rank-00001-of-00002"):
        export_from(config, *TIERS, to=out)
    assert not out.parent.exists()


def test_a_file_that_is_there_stays_unless_it_is_to_be_replaced(config: Config, out: Path) -> None:
    out.mkdir(parents=True)
    (out / "model.safetensors").write_text("mine")
    with pytest.raises(BackendError, match="exists already: --force replaces it"):
        export_from(config, "raw", to=out, only=("model",))
    export_from(config, "raw", to=out, only=("model",), replace=True)
    assert len(safetensors.torch.load_file(out / "model.safetensors")) == 2
