"""``tierfall export``: one complete, verified file that other programs read, or no file."""

from __future__ import annotations

import errno
import os
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

import tierfall
from tests.rank_kit import export_from
from tierfall.config import Config, load_config
from tierfall.core.copies import images
from tierfall.core.types.errors import (
    BackendError,
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

    with pytest.raises(BackendError, match="exists already"):
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
