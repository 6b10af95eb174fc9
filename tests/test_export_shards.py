"""``tierfall export --max-shard, --dtype, --with``: a folder that other programs load by its index, or no folder."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tierfall
from tests.forked import start
from tests.rank_kit import config_of, export_from, save_on_ranks
from tests.steps import wait_until
from tierfall.config import Config, load_config

KB = 1000


def model_of(seed: int = 0) -> torch.nn.Module:
    """Tensors of several dtypes, a scalar, tied weights, and one that is larger than a shard."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(300, 16), torch.nn.Linear(16, 300, bias=False), torch.nn.Linear(16, 16)
    )
    model[1].weight = model[0].weight
    model.register_buffer("scale", torch.tensor(1.5))
    model.register_buffer("count", torch.arange(1000))
    model.register_buffer("small", torch.randn(33, 5).half())
    model.register_buffer("none", torch.empty(0, 4))
    return model


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = config_of(tmp_path, raw={}, planes={"compress": {"codec": "planes"}})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"model": model_of(), "epoch": 3}, block=True)
    return config


def by_hand(folder: Path, base: str = "model") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read shards by their index, as a program that knows only the format does; return tensors, and files by name."""
    document = json.loads((folder / f"{base}.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(document["weight_map"].values())):
        data = (folder / file).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        table = json.loads(data[8 : 8 + length])
        assert table.pop("__metadata__")["format"] == "pt"
        assert set(table) == {n for n, f in document["weight_map"].items() if f == file}
        found |= safetensors.torch.load(data)
    assert document["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found, document["weight_map"]


def assert_model(found: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    expected = model_of().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


# Shards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tier", "size"), [("raw", 1), ("planes", 5 * KB)])
def test_an_index_by_hand_leads_to_every_tensor(
    config: Config, out: Path, tier: str, size: int
) -> None:
    done = export_from(config, tier, to=out, only=("model",), max_shard_bytes=size)
    assert done.path == out
    assert done.bytes == sum(file.stat().st_size for file in out.iterdir())
    found, files = by_hand(out)
    assert_model(found)
    model_of(1).load_state_dict(found)
    count = len(set(files.values()))
    assert {f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)} == set(
        files.values()
    )
    assert files["0.weight"] == files["1.weight"], "tied weights are in one file"
    for file in set(files.values()):
        names = [name for name, other in files.items() if other == file]
        whole = sum(found[name].nbytes for name in names)
        assert (
            whole <= size
            or len({found[name].data_ptr() for name in names}) == 1
            or ({"0.weight", "1.weight"} == set(names))
        )


def test_what_fits_into_one_file_has_no_index(config: Config, out: Path) -> None:
    export_from(config, "raw", to=out, only=("model",), max_shard_bytes=10**9)
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]
    assert_model(safetensors.torch.load_file(out / "model.safetensors"))


def test_shards_of_several_ranks_are_whole(tmp_path: Path, out: Path) -> None:
    config = config_of(tmp_path)
    save_on_ranks(config, 2, [1], lambda rank, step: {"model": model_of()})
    export_from(
        config, "shared", to=out, only=("model",), max_shard_bytes=5 * KB, dtype=torch.bfloat16
    )
    assert_model(by_hand(out)[0], torch.bfloat16)


# Whole or not at all ---------------------------------------------------------------------------------


def test_a_killed_export_leaves_no_folder_of_that_name(
    make_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The program stands still before the index, and is killed there."""
    config = make_config(disk={})
    with tierfall.open(load_config(config)) as ckpt:
        ckpt.save(1, {"model": model_of()}, block=True)
    path = tmp_path / "tiers.yaml"
    path.write_text(json.dumps(config))
    out = tmp_path / "out"
    words = ["export", "1", "--to", str(out), "--only", "model", "--max-shard", "5KB"]
    program = (
        "import sys, time\n"
        "from tierfall.export import safetensors_files\n"
        "safetensors_files._index_of = lambda *args: time.sleep(60)\n"
        "from tierfall.cli import app\n"
        "app(sys.argv[1:])\n"
    )
    process = start(["-c", program, *words, "--config", str(path)])
    try:
        wait_until(
            lambda: any(tmp_path.glob(".out.*.unfinished/*-00003-of-00003.*")), "shards", 120
        )
        time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
        process.close()
    assert not out.exists()
    (left,) = tmp_path.glob(".out.*.unfinished")
    assert not (left / "model.safetensors.index.json").exists()
