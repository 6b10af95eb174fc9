"""What a path names: ``tiers://RUN/step-STEP/FILE``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import CheckpointId

PROTOCOL = "tiers"
METADATA = ".metadata"
_STEP = re.compile(r"step-([0-9]{1,18})(?:-a([0-9]{1,12}))?\Z")
_FORM = f"{PROTOCOL}://RUN/step-STEP (or step-STEP-aATTEMPT), and a file's name below it"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPath:
    """What a path leads to: everything, a run, a step of it (of the live line, without ``attempt``), or a file."""

    run: str = ""
    step: int | None = None
    attempt: int | None = None
    name: str = ""

    def __str__(self) -> str:
        if self.step is None:
            return f"{PROTOCOL}://{self.run}"
        attempt = "" if self.attempt is None else f"-a{self.attempt:04d}"
        folder = f"{PROTOCOL}://{self.run}/step-{self.step:08d}{attempt}"
        return f"{folder}/{self.name}" if self.name else folder


def parse(path: str) -> TierPath:
    """Read a path, without its protocol. Raises ConfigError for what is none."""
    run, _, below = path.strip("/").partition("/")
    if not run:
        return TierPath()
    keys.check_name(run, what=f"{PROTOCOL}://{path}: the run")
    folder, _, name = below.partition("/")
    if not folder:
        return TierPath(run=run)
    step = _STEP.match(folder)
    if step is None or "/" in name:
        raise ConfigError(f"{PROTOCOL}://{path} is no path of a checkpoint; expected {_FORM}")
    attempt = None if step[2] is None else int(step[2])
    return TierPath(run=run, step=int(step[1]), attempt=attempt, name=name)


def folder_of(run: str, id: CheckpointId, *, live: bool) -> str:
    """Name a checkpoint as a path without a protocol; one that is not the live line's, with its attempt."""
    return f"{run}/step-{id.step:08d}" if live else f"{run}/{keys.step_folder(id)}"
