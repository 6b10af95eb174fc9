"""What ``export`` and ``load`` take of memory: two chunks, beside the result of ``load`` and a small fixed overhead;
also of several ranks, whatever the format.

Each runs in a process of its own, which watches its anonymous memory; files, mapped or cached, are not counted.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests import forked
from tests.rank_kit import config_of, save_on_ranks
from tierfall.config import Config
from tierfall.export.export import ExportFormat

MIB = 1 << 20
CHUNK_BYTES = 16 * MIB
OVERHEAD_BYTES = 14 * MIB  # below a third chunk
IMAGE_BYTES = 128 * MIB
RANKS_IMAGE_BYTES = 48 * MIB
RANKS_BOUND_BYTES = 16 * MIB  # chunks have 64 KiB there

# What is measured comes on the command line; before it everything is imported and warm.
_WATCHING = """
import ctypes, gc, sys
from pathlib import Path

import tierfall
from tests.memory_watch import rise_bytes
from tests.rank_kit import export_from
from tierfall.config import load_config
from tierfall.export.export import ExportFormat


def work(size):
    if what == "load":
        return tierfall.load(root / size / tier)
    config = load_config(root / size / "config.json")
    wish = {"only": ("model",)} if what == "part" else {"format": ExportFormat(what)}
    return export_from(config, tier, to=root / size / what, **wish)


root, tier, what = Path(sys.argv[1]), *sys.argv[2:]
work("small")
gc.collect()
# Else what is free already would count against the rise.
ctypes.CDLL("libc.so.6").malloc_trim(0)
print(rise_bytes(lambda: work("large")))
"""


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder in memory if there is such."""
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="tierfall-test-", dir=place))
    yield root
    shutil.rmtree(root)


def written(folder: Path, **tiers: dict[str, Any]) -> Config:
    """The configuration of a run, as the program reads it; of a run of several tiers chunks are large."""
    config = config_of(folder, **tiers).model_dump(mode="json", exclude_unset=True)
    config |= {"chunk": f"{CHUNK_BYTES // MIB}MiB"} if tiers else {}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return Config.model_validate(config)


@pytest.fixture(scope="module")
def alone(root: Path) -> Path:
    """A small and a large checkpoint on a raw and on a packed tier. Its weights pack well, in tensors of 32 MiB."""
    for size, count in (("small", 1), ("large", IMAGE_BYTES // (32 * MIB))):
        packed = {"compress": {"codec": "planes"}}
        config = written(root / "alone" / size, raw={}, planes=packed)
        torch.manual_seed(0)
        piece = torch.randint(0, 1000, (8 * MIB,), dtype=torch.int32)
        model = {str(n): piece + n for n in range(count)}
        with tierfall.open(config) as ckpt:
            ckpt.save(1, {"model": model, "rest": torch.zeros(3)}, block=True)
    return root / "alone"


@pytest.fixture(scope="module")
def ranks(root: Path) -> Path:
    """A small and a large checkpoint of two ranks, each with a stage of its own."""
    for size, count in (("small", 1), ("large", RANKS_IMAGE_BYTES // (5 * MIB))):

        def state(rank: int, step: int, count: int = count) -> dict[str, Any]:
            return {
                f"stage{rank}": {str(n): torch.full((MIB,), float(n)) for n in range(count)},
                "same": torch.ones(count * MIB // 4),
                "rng": None,
            }

        save_on_ranks(written(root / "ranks" / size), 2, [1], state)
    return root / "ranks"


def measured(folder: Path, tier: str, what: str) -> tuple[int, int]:
    """Return how far the anonymous memory of a process rose above what it was before, and what was written."""
    done = forked.run(["-c", _WATCHING, str(folder), tier, what])
    assert done.returncode == 0, done.stderr
    made = folder / "large" / what
    sizes = [file.stat().st_size for file in made.rglob("*") if file.is_file()]
    shutil.rmtree(made, ignore_errors=True)
    print(f"{what} from {tier}: {int(done.stdout) / MIB:.1f} MiB")
    return int(done.stdout), sum(sizes)


@pytest.mark.parametrize(("tier", "what"), [("raw", "torch"), ("planes", "part")])
def test_an_export_takes_two_chunks_and_a_little(alone: Path, tier: str, what: str) -> None:
    peak, length = measured(alone, tier, what)
    assert length >= IMAGE_BYTES
    assert peak < 2 * CHUNK_BYTES + OVERHEAD_BYTES


def test_load_takes_two_chunks_beside_its_result(alone: Path) -> None:
    peak, _ = measured(alone, "planes", "load")
    assert IMAGE_BYTES < peak < IMAGE_BYTES + 2 * CHUNK_BYTES + OVERHEAD_BYTES


@pytest.mark.parametrize("format", ExportFormat)
def test_an_export_of_several_ranks_takes_little_memory(ranks: Path, format: ExportFormat) -> None:
    peak, length = measured(ranks, "shared", format)
    assert length > 2 * RANKS_IMAGE_BYTES * 4 // 5
    assert peak < RANKS_BOUND_BYTES
