"""What a load of each system does where one bit of what it saved has changed on disk: one process for each.

``python -m benchmarks.peers.damage`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.bare import Buffer
from benchmarks.peers import registry
from benchmarks.peers.system import Task
from benchmarks.workload import Workload, shape_for

SIZE_MAX_BYTES = 64 << 20
REFUSED, WRONG, RIGHT = "refused", "wrong values", "right values"


def flip_bit(folder: Path) -> None:
    """Change one bit in the middle of the largest file below a folder."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def measure_here(task: Task) -> dict[str, str]:
    """Save, flip a bit, and load: what came of it, and the type of the error that was raised."""
    work = Workload(shape_for(task.size_bytes), device=task.device)
    work.train(1)
    saved = Buffer(work.tensors(), touched=True)
    saved.take(work.tensors())
    system = registry.type_of(task.key)(work, task.place)
    system.save()
    system.wait()
    system.begin_cold()
    flip_bit(task.place.folder)
    work.spoil()
    try:
        system.load_cold()
    except BaseException as error:  # noqa: BLE001 - whatever kept wrong values from being used
        found = {"outcome": REFUSED, "error": type(error).__name__}
    else:
        found = {"outcome": RIGHT if saved.holds(work.tensors()) else WRONG, "error": ""}
    system.close()
    return found


def main() -> None:
    print(json.dumps(measure_here(Task.parse(sys.argv[1:]))))


if __name__ == "__main__":
    main()
