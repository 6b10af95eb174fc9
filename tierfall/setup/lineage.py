"""The lineage that a process saves: which step may follow, and what it continues from.

It reads no clock and touches no tier.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tierfall.core.format.records import Attempt, Commit, Lineage
from tierfall.core.types.errors import StepError
from tierfall.core.types.keys import STEP_MAX
from tierfall.core.types.values import CheckpointId


def as_step(step: Any, *, doing: str = "save", what: str = "step") -> int:
    """Return a step as a plain integer. Accepts any integer (NumPy's too); raises StepError for a bool."""
    if not isinstance(step, bool):
        with suppress(TypeError, RuntimeError):  # a tensor of several elements, or without any
            return operator.index(step)
    swapped = isinstance(step, Mapping) and doing == "save"
    shown = "the state: the step comes first, save(step, state)" if swapped else f"{step!r}"[:80]
    newest = "; leave it out for the newest" if doing in ("load", "restore") else ""
    raise StepError(f"{doing}: {what} must be an integer of at least 0, not {shown}{newest}")


class SavingLineage:
    """One run's lineage in this process. ``begun``: it may save, after a restore, by ``fresh``, or in a new run.

    ``started_from`` is the checkpoint that it continues from, ``last_step`` the last that was saved or restored,
    ``ordinal`` that of its checkpoint. ``half_filled``
    are the parts of the state (``only``; None: all of it) that failed restores have left half filled.
    """

    def __init__(self, run: str, attempt: Attempt, *, begun: bool) -> None:
        self._run = run
        self.attempt = attempt
        self.begun = begun
        self.saved_any = False
        self.started_from: CheckpointId | None = None
        self.half_filled: set[tuple[str, ...] | None] = set()
        self.ordinal = 0
        self.last_step: int | None = None

    def check(self, step: int) -> None:
        """Raise StepError unless ``step``, a plain integer (``as_step``), may be saved now."""
        if step < 0:
            raise StepError(f"save: step must be an integer of at least 0, not {step}")
        if step > STEP_MAX:
            raise StepError(f"save: step must be at most {STEP_MAX}, the largest that has a name")
        self.check_begun(step)
        if self.last_step is not None and step <= self.last_step:
            raise StepError(
                f"save of step {step}: this lineage is at step {self.last_step} already, and a committed step is "
                "never overwritten; to go back, restore(step=...) first"
            )

    def begin(self) -> None:
        """Let saving begin: no checkpoint exists that it could continue from."""
        self.begun = True

    def check_begun(self, step: int) -> None:
        """Raise StepError unless this start may save at all."""
        if self.half_filled:
            raise StepError(
                f"save of step {step}: the last restore() left the state half filled, of no step. Restore a checkpoint "
                "first, the newest or another step"
            )
        if not self.begun:
            raise StepError(
                f"save of step {step}: run {self._run!r} has checkpoints already (or a tier could not be asked), and "
                "this start restored none. Call restore() first to continue, choose another run name, or open with "
                "fresh=True to leave them behind"
            )

    def next(self, step: int, *, above: int = 0) -> Lineage:
        """Return the next checkpoint's place in the lineage; its ordinal is above ``above``, which other ranks
        count."""
        return Lineage(
            run=self._run,
            checkpoint=CheckpointId(step, self.attempt.number),
            attempt_id=self.attempt.id,
            ordinal=max(self.ordinal, above) + 1,
            started_from=self.started_from,
        )

    def is_at(self, step: int) -> bool:
        """Return whether ``step`` is the last that was saved or restored."""
        return step == self.last_step

    def has_saved(self, step: int) -> bool:
        """Return whether ``step`` is the last step that was saved since the last restore."""
        return self.saved_any and self.is_at(step)

    def is_past(self, step: int) -> bool:
        """Return whether a step above ``step`` was saved or restored."""
        return self.last_step is not None and self.last_step > step

    def advance(self, line: Lineage) -> None:
        """Note that the capture of a checkpoint has begun."""
        self.saved_any = True
        self.last_step = line.checkpoint.step
        self.ordinal = line.ordinal

    def continue_from(self, commit: Commit, attempt: Attempt) -> None:
        """Continue from a restored checkpoint, as ``attempt``."""
        self.attempt = attempt
        self.saved_any = False
        self.half_filled.clear()
        self.started_from = commit.lineage.checkpoint
        self.last_step = commit.lineage.checkpoint.step
        self.ordinal = commit.lineage.ordinal
        self.begun = True
