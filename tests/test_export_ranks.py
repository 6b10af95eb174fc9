"""``tierfall export`` of a checkpoint of several ranks: merged, complete, and nothing of any rank is dropped
silently."""

from __future__ import annotations

import json
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
from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.merge import merge_headers
from tierfall.core.image.tree import (
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    TensorNode,
    ValueNode,
)
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.core.types.errors import BackendError, ConfigError, IntegrityError
from tierfall.export.export import ExportFormat
from tierfall.export.gather import TensorPair, separate_per_rank

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


# What is written -------------------------------------------------------------------------------------


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


# What goes wrong -------------------------------------------------------------------------------------


def test_of_tensors_that_do_not_fit_together_load_takes_rank_0s_and_an_export_both(
    tmp_path: Path, out: Path
) -> None:
    config = config_of(tmp_path)
    save_on_ranks(config, 2, [1], lambda rank, step: {"w": torch.ones(3 + rank), "x": 1})
    assert len(tierfall.load(config)["w"]) == 3
    opened = safetensors.torch.load_file(export_from(config, "shared", to=out).path)
    assert (len(opened["w"]), len(opened["per_rank.1.w"])) == (3, 4)


def test_a_rank_whose_part_is_nowhere_is_an_error(
    config: Config, tmp_path: Path, out: Path
) -> None:
    for tier in TIERS:
        (tmp_path / tier / STEP / "rank-00001-of-00002.json").unlink()
    with pytest.raises((IntegrityError, BackendError), match="rank-00001-of-00002"):
        export_from(config, *TIERS, to=out)
    assert not out.parent.exists()


# Values in which a rank differs from rank 0 ---------------------------------------------------------


def header(tensors: Sequence[StoredTensor], values: Sequence[Any], **entries: Node) -> ImageHeader:
    return ImageHeader(
        what="header",
        data_start=0,
        data_bytes=max((t.end for t in tensors), default=0),
        tensors=tuple(tensors),
        tree=MapNode("dict", tuple(entries.items())),
        values=tuple(values),
    )


def floats(name: str, start: int, piece: TensorPiece | None = None) -> StoredTensor:
    return StoredTensor(name, torch.float32, (2,), start, start + 8, piece)


def nothing_differs(rank: int, pairs: Sequence[TensorPair]) -> frozenset[TensorPair]:
    return frozenset()


def all_differ(rank: int, pairs: Sequence[TensorPair]) -> frozenset[TensorPair]:
    return frozenset(pairs)


def test_a_tensor_whose_bytes_another_rank_has_is_read_there() -> None:
    """Rank 1 names a tensor of its object that it has no bytes of, since rank 0 wrote it for both."""

    def thing() -> ObjectNode:
        state = MapNode("dict", (("w", TensorNode(0)), ("n", ValueNode(0, ()))))
        return ObjectNode(state)

    absent = StoredTensor("thing.w", torch.float32, (2,), 0, 8, written_by=0)
    headers = {
        0: header([floats("thing.w", 0)], [1], thing=thing()),
        1: header([absent], [2], thing=thing()),
    }
    aside, name = separate_per_rank(headers, all_differ)
    merged = merge_headers(aside, what="merged", own=0)
    own = dict(merged.header.tree.entries)[name]
    assert isinstance(own, MapNode)
    ((rank, of_rank),) = own.entries
    assert rank == "1"
    assert isinstance(of_rank, MapNode)
    ((_, node),) = of_rank.entries
    assert isinstance(node, ObjectNode)
    position = dict(node.state.entries)["w"].position  # type: ignore[union-attr]
    assert [(block.rank, block.end) for block in merged.blocks[position]] == [(0, 8)]


def test_a_name_that_begins_another_keeps_its_own_place() -> None:
    """The keys of a module may have dots where other keys end."""
    headers = {
        rank: header(
            [],
            [rank, rank],
            m=ModuleNode((("a", "a", ValueNode(0, ())), ("a.b", "a.b", ValueNode(1, ())))),
        )
        for rank in range(2)
    }
    aside, name = separate_per_rank(headers, nothing_differs)
    own = dict(dict(aside[1].tree.entries)[name].entries)["1"]  # type: ignore[union-attr]
    assert set(dict(own.entries)) == {"m", "m.a.b"}
