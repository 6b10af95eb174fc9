"""Measurements in a process of their own: memory, threads and caches of one do not touch another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.plan import Plan


def run(module: str, words: list[str], *, own_session: bool = False) -> dict[str, Any]:
    """Run ``python -m MODULE WORDS`` and return the JSON object on the last line that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=Path(__file__).resolve().parent.parent,
        stdout=subprocess.PIPE,
        start_new_session=own_session,
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def own_folders(plan: Plan, name: str) -> Iterator[tuple[Path, Path]]:
    """Make a folder on disk and one in memory for one process, and remove them after it."""
    folders = plan.folder / name, plan.memory / name
    for folder in folders:
        folder.mkdir()
    try:
        yield folders
    finally:
        for folder in folders:
            shutil.rmtree(folder)


def drop_page_cache() -> bool:
    """Write everything to disk and drop the page cache; False where this user may not."""
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        return True
    return False
