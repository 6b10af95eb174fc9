"""``tierfall export``: one complete, verified file, or folder of files, that other programs read, or nothing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tierfall
from tests.forked import start
from tests.rank_kit import config_of, export_from, save_on_ranks
from tests.steps import wait_until
from tierfall.config import Config, load_config
from tierfall.core.copies import images
from tierfall.core.types.errors import (
    CapacityError,
    ConfigError,
    StorageFullError,
)
from tierfall.export import gather, output
from tierfall.export.export import ExportFormat

MakeConfig = Callable[..., dict[str, Any]]
IMAGE = "rank-00000-of-00001.safetensors"
WHOLE = "run-step-00000001"
TIERS = {
    "raw": {},
    "zstd": {"compress": {"codec": "zstd"}},
    "planes": {"compress": {"codec": "planes"}},
}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight


def some_state() -> dict[str, Any]:
    """A model with tied weights, its optimizer, and what safetensors does not hold."""
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    hidden = model.layers[1](model.layers[0](model.embedding(torch.arange(8))))
    model.head(hidden).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "big": torch.arange(60_000, dtype=torch.float64),  # several chunks
        "odd": torch.ones(3, dtype=torch.complex128),
        "none": torch.empty(0),
        "extra": {"epoch": 3, "names": ["a", ("b", None)]},
        "array": np.arange(5),
    }


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    """Step 1 of that state in memory and on three tiers, each with a codec of its own."""
    config = load_config(make_config(**TIERS, host={"on_close": "keep"}))
    with tierfall.open(config) as ckpt:
        ckpt.save(1, some_state(), block=True)
    return config


def step_of(tmp_path: Path, tier: str) -> Path:
    return tmp_path / tier / "run" / "step-00000001-a0001"


# What is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "planes"])
def test_the_whole_state_is_the_image_byte_for_byte(
    config: Config, tmp_path: Path, out: Path, tier: str
) -> None:
    done = export_from(config, tier, to=out)
    assert done.path == out / f"{WHOLE}.safetensors"
    assert done.path.read_bytes() == (step_of(tmp_path, "raw") / IMAGE).read_bytes()
    assert set(done.sources) == {tier}
    opened = safetensors.torch.load_file(done.path)
    assert torch.equal(opened["big"], some_state()["big"])
    assert len(opened) == done.tensors


def test_what_safetensors_does_not_hold_is_reported(config: Config, out: Path) -> None:
    done = export_from(config, "raw", to=out, only=("odd", "extra"))
    left, raw = done.notes
    assert "omitted" in left
    assert "only tensors: extra;" in left
    assert "as bytes" in raw
    with safetensors.safe_open(done.path, "pt") as file:
        assert file.metadata()["tierfall.dtypes"] == '{"odd": ["complex128", [3]]}'
        assert torch.equal(
            file.get_tensor("odd").view(torch.complex128), torch.ones(3, dtype=torch.complex128)
        )
    with pytest.raises(ConfigError, match="extra has no tensor"):
        export_from(config, "raw", to=out, only=("extra",))


CLASSES = """
import collections, dataclasses, enum

Pair = collections.namedtuple("Pair", "left right")
Phase = enum.Enum("Phase", "WARM MAIN")
Progress = dataclasses.make_dataclass("Progress", ["step", "average"])
"""


@pytest.mark.parametrize("format", [ExportFormat.TORCH, ExportFormat.DCP])
def test_values_of_classes_that_cannot_be_imported_are_exported_as_plain_values(
    make_config: MakeConfig, out: Path, format: ExportFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Any = ModuleType("script")
    exec(CLASSES, vars(script))
    for kind in (script.Pair, script.Phase, script.Progress):
        kind.__module__ = "script"
    config = load_config(make_config())
    with monkeypatch.context() as patch, tierfall.open(config) as ckpt:
        patch.setitem(sys.modules, "script", script)
        values = {"pair": script.Pair(2, "right"), "phase": script.Phase.MAIN}
        progress = script.Progress(2, torch.full((2,), 2.0))
        ckpt.save(1, {"w": torch.ones(2), "progress": progress, **values}, block=True)
    done = export_from(config, "disk", to=out, format=format)
    assert any("values of script.Progress are exported as plain values" in n for n in done.notes)
    if format is ExportFormat.TORCH:
        found = torch.load(done.path, weights_only=False)
        assert found["progress"]["step"] == 2
        assert (found["phase"], found["pair"]) == ("MAIN", (2, "right"))


# What goes wrong -------------------------------------------------------------------------------------


def test_a_file_that_appears_meanwhile_stays(config: Config, out: Path) -> None:
    target = out / f"{WHOLE}.safetensors"

    def appear(done: int, total: int) -> None:
        if out.exists():  # it is being written
            target.write_text("mine")

    with pytest.raises(ConfigError, match="exists already"):
        export_from(config, "raw", to=out, watch=appear)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    ("only", "format"), [(("model",), ExportFormat.SAFETENSORS), ((), ExportFormat.TORCH)]
)
def test_a_full_disk_leaves_nothing(
    config: Config,
    out: Path,
    only: tuple[str, ...],
    format: ExportFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(descriptor: int, length: int) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gather, "fallocate", full)
    with pytest.raises(StorageFullError, match="No space left"):
        export_from(config, "raw", to=out, only=only, format=format)
    assert not out.parent.exists()


def test_too_little_room_is_reported_before_anything_is_written(
    config: Config, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage(10, 0, 10))
    for format in (ExportFormat.SAFETENSORS, ExportFormat.TORCH):
        with pytest.raises(CapacityError, match=r"it needs .* free are 10 B"):
            export_from(config, "raw", to=out, format=format)
    assert not out.parent.exists()


def test_an_interrupt_leaves_nothing(config: Config, out: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for format in (ExportFormat.SAFETENSORS, ExportFormat.TORCH):
        with pytest.raises(KeyboardInterrupt):
            export_from(config, "zstd", to=out, format=format, watch=interrupt)
    assert not out.parent.exists()


def test_parts_that_are_not_there_are_refused(config: Config, out: Path) -> None:
    for only, says in (
        (("modl",), "expected one of model, optimizer, big"),
        (("model.layer",), "no part of that name"),
        (("model", "model.layers"), "is within another"),
        (("big", "big"), "named twice"),
        (("../model",), "cannot name a file"),
        (("",), "no part of that name"),
    ):
        for format in (ExportFormat.SAFETENSORS, ExportFormat.TORCH):
            with pytest.raises(ConfigError, match=says):
                export_from(config, "raw", to=out, only=only, format=format)
    assert not out.parent.exists()


@pytest.mark.parametrize("only", [(), ("big",)])
def test_memory_that_its_trainer_uses_again_meanwhile_does_not_end_up_in_the_file(
    config: Config, memory: Path, out: Path, only: tuple[str, ...], monkeypatch: Any
) -> None:
    """The image in memory is written over right after each chunk of it was checked."""
    good = export_from(config, "raw", to=out / "good", only=only).path.read_bytes()
    (image,) = memory.rglob("*.image")
    real = images.chunk_digest

    def use_again(view: Any) -> str:
        digest, start = real(view), image.read_bytes().find(view)
        if start >= 0:
            with open(image, "r+b") as file:
                file.seek(start)
                file.write(bytes(len(view)))
        return digest

    monkeypatch.setattr(images, "chunk_digest", use_again)
    done = export_from(config, "host", "raw", to=out, only=only)
    assert done.path.read_bytes() == good
    assert "host" in done.sources


# For torch.distributed.checkpoint -------------------------------------------------------------------


ALONE = "ignore:torch.distributed is disabled"
MakeState = Callable[..., dict[str, Any]]


@pytest.fixture
def trained(tmp_path: Path, make_state: MakeState) -> Config:
    """Step 1, of one rank."""
    config = config_of(tmp_path)
    state = make_state(5)
    state["extra"]["nested"] = {"names": ["a", "b"], 3: torch.arange(3)}
    state["empty"] = torch.empty(0, 4)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)
    return config


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.filterwarnings(ALONE)
def test_dcp_loads_model_and_optimizer_by_its_own_names(
    trained: Config, out: Path, make_state: MakeState
) -> None:
    done = export_from(trained, "shared", to=out, format=ExportFormat.DCP)
    assert done.path == out
    assert done.bytes == sum(file.stat().st_size for file in out.iterdir())
    model, optimizer = fresh()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=out, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    saved = make_state(5)
    for one, other in zip(model.parameters(), saved["model"].parameters(), strict=True):
        assert torch.equal(one, other)
        for name, value in saved["optimizer"].state[other].items():
            assert torch.equal(optimizer.state[one][name], value), name


@pytest.mark.filterwarnings(ALONE)
def test_dcp_loads_a_scaler_as_it_saves_one(tmp_path: Path, out: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    with tierfall.open(config := config_of(tmp_path)) as ckpt:
        ckpt.save(1, {"scaler": scaler}, block=True)
    export_from(config, "shared", to=out, format=ExportFormat.DCP)
    loaded = {"scaler": torch.amp.GradScaler("cpu").state_dict()}
    dcp.load(loaded, checkpoint_id=out, no_dist=True)
    assert loaded["scaler"] == scaler.state_dict()


def test_an_empty_folder_gives_way_and_nothing_else_does(trained: Config, out: Path) -> None:
    out.mkdir(parents=True)
    export_from(trained, "shared", to=out, format=ExportFormat.DCP)
    before = sorted(out.iterdir())
    with pytest.raises(ConfigError, match="is there already; name a folder"):
        export_from(trained, "shared", to=out, format=ExportFormat.DCP, replace=True)
    assert sorted(out.iterdir()) == before
    file = out.parent / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export_from(trained, "shared", to=file, format=ExportFormat.DCP)
    with pytest.raises(ConfigError, match="is no folder"):
        export_from(trained, "shared", to=file / "below", format=ExportFormat.DCP)


def test_an_optimizer_that_does_not_know_its_parameters_keeps_their_numbers(
    tmp_path: Path, out: Path
) -> None:
    config = config_of(tmp_path)
    model, optimizer = fresh()
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"optimizer": optimizer, "rng": None}, block=True)
    export_from(config, "shared", to=out, format=ExportFormat.DCP)
    names = pickle.loads((out / ".metadata").read_bytes()).state_dict_metadata
    assert "optimizer.state.0.exp_avg" in names


# Shards ---------------------------------------------------------------------------------------------


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
    finally:
        process.kill()
        process.wait()
        process.close()
    assert not out.exists()
    (left,) = tmp_path.glob(".out.*.unfinished")
    assert not (left / "model.safetensors.index.json").exists()
