"""A restore from a file tier whose image is in the page cache reads it from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tierfall.backends.posix.backend import PosixBackend

MakeConfig = Callable[..., dict[str, Any]]
ELEMENTS = 600_000  # 2.4 MB, in chunks of 512 KiB


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were read of the medium, read by read."""
    found: list[int] = []
    real = PosixBackend.read_into

    def watched(self: PosixBackend, key: str, offset: int, view: memoryview) -> None:
        found.append(view.nbytes)
        real(self, key, offset, view)

    monkeypatch.setattr(PosixBackend, "read_into", watched)
    return found


@pytest.fixture
def saved(make_config: MakeConfig, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a run whose only copy of step 1 is on the file tier, and in the page cache."""
    config = make_config(disk={}, host={"capacity": "16MiB"}, chunk="512KiB")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"w": torch.arange(float(ELEMENTS)), "small": torch.arange(9)}).wait()
    shutil.rmtree(config["tiers"][0]["folder"])
    (image,) = tmp_path.rglob("*.safetensors")
    image.read_bytes()
    return config


def test_what_the_page_cache_holds_is_not_read_from_the_medium(
    saved: dict[str, Any], asked: list[int]
) -> None:
    state = {"w": torch.zeros(ELEMENTS), "small": torch.zeros(9, dtype=torch.int64)}
    with tierfall.open(saved) as ckpt:
        asked.clear()
        report = ckpt.restore(state)
    assert report is not None
    assert {source.tier for source in report.sources} == {"disk"}
    assert bool((state["w"] == torch.arange(float(ELEMENTS))).all())
    assert state["small"].tolist() == list(range(9))
    assert sum(asked) < 256 << 10  # the header and the records


def test_a_flush_reads_the_medium_and_believes_no_cache(
    saved: dict[str, Any], asked: list[int], make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={}, next={}, host={"capacity": "16MiB"}, chunk="512KiB")
    with tierfall.open(config) as ckpt:
        ckpt.drain()
    (image,) = (tmp_path / "next").rglob("*.safetensors")
    assert sum(asked) >= image.stat().st_size
    assert image.read_bytes() == next((tmp_path / "disk").rglob("*.safetensors")).read_bytes()
