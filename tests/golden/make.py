"""Writes the golden run of the present format: ``python tests/golden/make.py``.

A directory that was released is never made anew: the script refuses to touch one that is there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import contents

import tierfall
from tierfall.core.format.documents import FORMAT


def make(target: Path) -> None:
    """Save the golden steps below ``target``, pin one of them."""
    if target.exists():
        sys.exit(f"{target} is there already: what was released stays as it was")
    with tempfile.TemporaryDirectory() as memory:
        config = {
            "run": contents.RUN,
            "chunk": "4KiB",
            "tiers": [
                {"name": "host", "kind": "host", "folder": memory, "capacity": "8MiB"},
                {"name": "golden", "kind": "file", "path": str(target)},
            ],
        }
        contents.seed()
        with patch("socket.gethostname", return_value="golden"), tierfall.open(config) as ckpt:
            for step in contents.STEPS:
                ckpt.save(
                    step,
                    contents.state_of(step),
                    metrics={"loss": 1 / step, "worst": float("inf")},
                    tags=contents.TAGS if step == contents.PINNED else (),
                    block=True,
                )
            ckpt.pin(contents.PINNED)


if __name__ == "__main__":
    make(Path(__file__).parent / f"format-{FORMAT}")
