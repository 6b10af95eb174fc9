"""One rank's training loop on a virtual clock: its steps take their time, the production cadence says which are saved,
and saves hold it up.

It knows no tier and no planner: it is told how its saves go on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.simulation.cadence_watch import Watch
from tests.simulation.clock import Clock
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.types.values import LossClass
from tierfall.core.types.view import TierRules
from tierfall.policies.cadence import CadenceRules
from tierfall.run.cadence import AnnouncedSteps, CadenceClock

EVALUATION_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What steps and saves take, and how often is saved.

    A step takes ``step_s`` seconds, as much more or less as ``uneven`` says; every so many, an evaluation comes on top.
    While copies are made, steps are slower by ``slower``. A save holds the loop for ``blocked_s``, and the step after
    it ends only once the capture has, which takes ``capture_s``.
    """

    rules: CadenceRules
    step_s: float
    uneven: float
    evaluation_every: int | None
    blocked_s: float
    capture_s: float
    slower: float


def draw_pace(
    draw: random.Random,
    tiers: tuple[TierRules, ...],
    *,
    step_s: float,
    save_every_s: float,
    copy_s: float,
) -> Pace:
    """Draw a training that saves about every ``save_every_s``, whatever it goes by, where a copy takes ``copy_s``."""
    pace = Pace(
        rules=CadenceRules(),
        step_s=step_s,
        uneven=draw.choice((0.0, 0.02, 0.1)),
        evaluation_every=draw.choice((None, None, 300)),
        blocked_s=draw.choice((0.1, 1.0, 4.0)),
        capture_s=draw.choice((0.5, 5.0, 20.0)),
        slower=draw.choice((0.0, 0.02, 0.1)),
    )
    cost_s = pace.blocked_s + max(0.0, pace.capture_s - pace.step_s) + pace.slower * copy_s
    rules = draw.choice(
        (
            CadenceRules(every_steps=round(save_every_s / pace.step_s)),
            CadenceRules(every_s=save_every_s),
            CadenceRules(overhead=cost_s / save_every_s),
            CadenceRules(mtbf_s={LossClass.PROCESS: save_every_s**2 / (2 * cost_s)}),
        )
    )
    return replace(pace, rules=replace(rules, tiers=tiers))


class Training:
    """See the module. ``due_s`` is when the step under way ends, if nothing holds it up; infinite within a save."""

    def __init__(
        self,
        pace: Pace,
        draw: random.Random,
        clock: Clock,
        watch: Watch,
        *,
        images: Callable[[int], int],
        copying: Callable[[], bool],
        others: AnnouncedSteps | None = None,
    ) -> None:
        self.pace, self.watch = pace, watch
        self._draw, self._clock = draw, clock
        self.cadence = CadenceClock(
            pace.rules, clock=lambda: clock.now_s, images=images, copying=copying, others=others
        )
        self.step = 0
        self.due_s = math.inf
        self._saving: SaveHandle | None = None
        self._asked_s = 0.0
        self.watch.begin(clock.now_s)
        self.begin_step(is_slowed=False)

    def go_on_from(self, step: int) -> None:
        """A restore: the next step is the one after that."""
        self.cadence.continue_from(step)
        self.watch.go_back(step, self._clock.now_s)
        self.step = step
        self._saving = None
        self.begin_step(is_slowed=False)

    def begin_step(self, *, is_slowed: bool, after_s: float = 0.0) -> None:
        pace = self.pace
        self._is_slowed = is_slowed
        self._step_s = pace.step_s * (1 + pace.uneven * (2 * self._draw.random() - 1))
        if pace.evaluation_every and (self.step + 1) % pace.evaluation_every == 0:
            self._step_s += EVALUATION_S
        seconds = self._step_s * (1 + pace.slower) if is_slowed else self._step_s
        self.due_s = self._clock.now_s + after_s + seconds

    def end_step(self, *, is_slowed: bool) -> bool:
        """Come to the end of a step, and begin the next; True where it is to be saved first."""
        now_s = self._clock.now_s
        self.step += 1
        if self._saving is not None:
            self._saving.add_blocked(max(0.0, now_s - self.due_s))  # a run that settles is early
        wanted = self.cadence.is_due(self.step)
        bare = not is_slowed and not self._is_slowed
        self.watch.step(self.step, self._step_s, now_s, wanted=wanted, bare=bare)
        if self._saving is not None:
            self._saving = None
            self.watch.after_save(self.cadence)
        if wanted:
            self.watch.save(self.step, now_s, self.cadence.report())
            self.due_s, self._asked_s = math.inf, now_s
        else:
            self.begin_step(is_slowed=is_slowed)
        return wanted

    def saved(self, handle: SaveHandle, image_bytes: int) -> None:
        """A save has been admitted, and holds the loop for a little more; or was skipped."""
        held_s = 0.0
        if handle.exception() is None:
            held_s = self.pace.blocked_s
            waited_s = self._clock.now_s - self._asked_s
            handle.on_begun(bytes=image_bytes, lazy=True, blocked_s=waited_s + held_s)
        self._saving = handle
        self.cadence.on_saved(handle)
        self.begin_step(is_slowed=False, after_s=held_s)
