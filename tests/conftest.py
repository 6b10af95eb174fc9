"""What tests of whole runs share: a small state, and a configuration whose folders are the test's own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED = Path("/dev/shm")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder for the host tier, in memory where there is such, removed afterwards."""
    place = SHARED if SHARED.is_dir() else tmp_path
    folder = Path(tempfile.mkdtemp(prefix="tierfall-test-", dir=place))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def make_config(tmp_path: Path, memory: Path) -> Callable[..., dict[str, Any]]:
    """``make_config(disk={...}, slow={...}, host={...}, max_wait="1s")``: a chain of host memory and these folders.

    A keyword that is a dict is a folder of that name below tmp_path (``host``: memory) with these settings; anything
    else is a setting of the run. Without any folder there is one, ``disk``.
    """

    def make(**words: Any) -> dict[str, Any]:
        tiers = {name: value for name, value in words.items() if isinstance(value, dict)}
        host = {"folder": str(memory), "capacity": "4MiB", **tiers.pop("host", {})}
        folders = tiers or {"disk": {}}
        return {
            "run": "run",
            "chunk": "64KiB",
            "max_wait": "30s",
            "tiers": [
                {"name": "host", "kind": "host", **host},
                *(
                    {"name": name, "kind": "file", "path": str(tmp_path / name), **settings}
                    for name, settings in folders.items()
                ),
            ],
            **{name: value for name, value in words.items() if not isinstance(value, dict)},
        }

    return make


@pytest.fixture
def make_state() -> Callable[..., dict[str, Any]]:
    """``make_state(seed)``: a model, its optimizer after one step, and a plain value: about 100 KiB."""

    def make(seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 32)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"model": model, "optimizer": optimizer, "extra": {"epoch": seed}}

    return make


@pytest.fixture
def state(make_state: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return make_state(0)
