"""Where a folder that was copied or renamed belongs: what its commit record says that it was written as.

It reads commit records alone, for messages; that a checkpoint is whole is for others to find out.
"""

from __future__ import annotations

from pathlib import Path

from tierfall.core.format.records import Lineage, read_commit
from tierfall.core.types import keys
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import CheckpointId

_RECORD_BYTES_MAX = 64 << 20


def written_as(folder: Path) -> Lineage | None:
    """Read which run and checkpoint a step's folder was written as; None where nothing there says it."""
    try:
        record = folder / keys.COMMIT_NAME
        if record.stat().st_size > _RECORD_BYTES_MAX:
            return None
        return read_commit(record.read_bytes(), what=str(record)).line
    except (OSError, TierfallError):
        return None


def moved_step(folder: Path) -> str | None:
    """Say where a step's folder belongs; None where it lies there, or nothing there says it."""
    line = written_as(folder)
    if line is None or _is_at_home(folder, line):
        return None
    home = keys.step_prefix(line.run, line.checkpoint).rstrip("/")
    return f"put it below a folder named {line.run}, as it was written ({home})"


def moved_run(folder: Path) -> str | None:
    """Say how a run's folder was named; None where one of its steps lies where it belongs, or nothing says it."""
    try:
        steps = [child for child in folder.iterdir() if keys.parse_step_folder(child.name)]
    except OSError:
        return None
    lines = {step: line for step in steps if (line := written_as(step)) is not None}
    if not lines or any(_is_at_home(step, line) for step, line in lines.items()):
        return None
    runs = sorted({line.run for line in lines.values()})
    if len(runs) > 1 or runs[0] == folder.name:
        return None
    return (
        f"{folder} speaks of run {runs[0]}: it was renamed, or moved here from elsewhere; name it {runs[0]}, as it was "
        "written"
    )


def moved_shard(shard: Path) -> str | None:
    """Say what a shard without the records of its checkpoint is good for; None where they lie beside it."""
    if (shard.parent / keys.COMMIT_NAME).exists():
        return None
    return (
        f"{shard} is a shard without the records of its checkpoint, which say whether it is whole: copy the step's "
        "folder, below one named like its run, as it was written; safetensors.torch.load_file opens the file alone"
    )


def _is_at_home(folder: Path, line: Lineage) -> bool:
    here: CheckpointId | None = keys.parse_step_folder(folder.name)
    return (folder.parent.name, here) == (line.run, line.checkpoint)
