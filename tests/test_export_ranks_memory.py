"""What an export of several ranks takes of memory: two chunks beside a small fixed overhead, whatever the format.

It runs in a process of its own, which watches its anonymous memory; files, mapped or cached, are not counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.rank_kit import config_of, save_on_ranks
from tierfall.export.export import ExportFormat

MIB = 1 << 20
IMAGE_BYTES = 48 * MIB
BOUND_BYTES = 16 * MIB  # chunks have 64 KiB here

_WATCHING = """
import sys
from pathlib import Path

from tests.memory_watch import rise_bytes
from tests.rank_kit import config_of, export_from
from tierfall.export.export import ExportFormat


def work(size):
    export_from(config_of(root / size), "shared", to=root / size / format, format=format)


root, format = Path(sys.argv[1]), ExportFormat(sys.argv[2])
work("small")
print(rise_bytes(lambda: work("large")))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small and a large checkpoint of two ranks, each with a stage of its own."""
    root = tmp_path_factory.mktemp("ranks")

    def state(count: int) -> Any:
        return lambda rank, step: {
            f"stage{rank}": {str(n): torch.full((MIB,), float(n)) for n in range(count)},
            "same": torch.ones(count * MIB // 4),
            "rng": None,
        }

    for name, count in (("small", 1), ("large", IMAGE_BYTES // (5 * MIB))):
        save_on_ranks(config_of(root / name), 2, [1], state(count))
    return root


@pytest.mark.parametrize("format", ExportFormat)
def test_an_export_of_several_ranks_takes_little_memory(saved: Path, format: ExportFormat) -> None:
    done = forked.run(["-c", _WATCHING, str(saved), format])
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    print(f"{format}: {peak / MIB:.1f} MiB")
    written = sum(f.stat().st_size for f in (saved / "large" / format).rglob("*") if f.is_file())
    assert written > 2 * IMAGE_BYTES * 4 // 5
    assert peak < BOUND_BYTES
