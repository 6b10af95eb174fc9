"""Paths of the form ``tiers://RUN/step-STEP/FILE``. Pure."""

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
    """A parsed path: the root, a run, a checkpoint (of the live lineage if ``attempt`` is None), or a file of it."""

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
    """Parse a path without its protocol. Raises ConfigError if it has another form."""
    run, _, below = path.strip("/").partition("/")
    if not run:
        return TierPath()
    keys.check_name(run, what=f"{PROTOCOL}://{path}: the run")
    folder, _, name = below.partition("/")
    if not folder:
        return TierPath(run=run)
    step = _STEP.match(folder)
    if step is None or "/" in name:
        raise ConfigError(f"{PROTOCOL}://{path} is not a path of a checkpoint; expected {_FORM}")
    attempt = None if step[2] is None else int(step[2])
    return TierPath(run=run, step=int(step[1]), attempt=attempt, name=name)


def folder_of(run: str, id: CheckpointId, *, live: bool) -> str:
    """Return the path of a checkpoint without the protocol; with the attempt if it is not of the live lineage."""
    return f"{run}/step-{id.step:08d}" if live else f"{run}/{keys.step_folder(id)}"
