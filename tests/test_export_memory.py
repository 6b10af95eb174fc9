"""What ``export`` and ``load`` take of memory: two chunks, beside the result of ``load`` and a small fixed overhead.

Each runs in a process of its own, which watches its anonymous memory; files, mapped or cached, are not counted.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierfall
from tests import forked

MIB = 1 << 20
CHUNK_BYTES = 16 * MIB
OVERHEAD_BYTES = 14 * MIB  # below a third chunk
IMAGE_BYTES = 128 * MIB

# The step that is measured comes on the command line; before it everything is imported and warm.
_WATCHING = """
import ctypes, gc, json, sys
from pathlib import Path

import torch
import tierfall
from tests.memory_watch import rise_bytes
from tierfall.config import load_config
from tierfall.core.format.catalog import merge
from tierfall.export.export import ExportFormat, ExportOptions, export
from tierfall.ops.reader import RunReader


def work(what, config, tier, to, small):
    if what == "load":
        return tierfall.load(tier, step=1 if small else 2)
    with RunReader(load_config(config)) as reader:
        known = next(c for c in merge(reader.list()) if c.id.step == (1 if small else 2))
        only = ("model",) if what == "part" else ()
        format = ExportFormat.TORCH if what == "torch" else ExportFormat.SAFETENSORS
        wish = ExportOptions(to=Path(to) / str(small), format=format, only=only)
        return export(known, [tier], reader.opener(), wish)


config, what, tier, to = json.loads(sys.argv[1]), *sys.argv[2:]
work(what, config, tier, to, True)
gc.collect()
# Else what is free already would count against the rise.
ctypes.CDLL("libc.so.6").malloc_trim(0)
print(rise_bytes(lambda: work(what, config, tier, to, False)))
"""


def fill(elements: int) -> dict[str, torch.Tensor]:
    """Weights that pack well, in tensors of 32 MiB."""
    torch.manual_seed(0)
    piece = torch.randint(0, 1000, (8 * MIB,), dtype=torch.int32)
    return {str(n): piece + n for n in range(elements * 4 // (32 * MIB))}


@pytest.fixture(scope="module")
def saved() -> Iterator[tuple[dict[str, object], Path]]:
    """A small step 1 and a large step 2 on a raw and on a packed tier, all in memory where that is possible."""
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="tierfall-test-", dir=place))
    config: dict[str, object] = {
        "run": "run",
        "chunk": "16MiB",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(root / "memory")},
            {"name": "raw", "kind": "file", "path": str(root / "raw")},
            {
                "name": "planes",
                "kind": "file",
                "path": str(root / "planes"),
                "compress": {"codec": "planes"},
            },
        ],
    }
    try:
        with tierfall.open(config) as ckpt:
            ckpt.save(1, {"model": fill(8 * MIB), "rest": torch.zeros(3)}, block=True)
            ckpt.save(2, {"model": fill(IMAGE_BYTES // 4), "rest": torch.zeros(3)}, block=True)
        yield config, root
    finally:
        shutil.rmtree(root)


def peak_bytes(config: dict[str, object], what: str, tier: str, to: Path) -> int:
    """Return how far the anonymous memory of a process rose above what it was before."""
    done = forked.run(["-c", _WATCHING, json.dumps(config), what, tier, str(to)])
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(("tier", "what"), [("raw", "torch"), ("planes", "part")])
def test_an_export_takes_two_chunks_and_a_little(
    saved: tuple[dict[str, object], Path], tier: str, what: str
) -> None:
    config, root = saved
    to = root / f"out-{tier}-{what}"
    try:
        peak = peak_bytes(config, what, tier, to)
        written = sum(path.stat().st_size for path in (to / "False").iterdir())
    finally:
        shutil.rmtree(to, ignore_errors=True)
    assert written >= IMAGE_BYTES
    assert peak < 2 * CHUNK_BYTES + OVERHEAD_BYTES, f"{peak / MIB:.0f} MiB"


def test_load_takes_two_chunks_beside_its_result(saved: tuple[dict[str, object], Path]) -> None:
    config, root = saved
    peak = peak_bytes(config, "load", str(root / "planes"), root)
    assert IMAGE_BYTES < peak < IMAGE_BYTES + 2 * CHUNK_BYTES + OVERHEAD_BYTES, (
        f"{peak / MIB:.0f} MiB"
    )
