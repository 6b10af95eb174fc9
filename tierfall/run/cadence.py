"""The cadence: at which steps ``maybe_save`` saves, by the rules of ``interval`` and by measurements.

It belongs to the training thread. The policies decide (``policies.cadence``), the meter measures, and the clock is an
argument. Nothing here saves.

Several ranks save at the same step. If that does not follow from the step's number, rank 0 announces a step ahead of
time, and every rank saves at the first step from there on. No rank waits. A rank that receives an announcement after
passing the step reports a miss. Rank 0 then gives up that checkpoint on all ranks and increases its lead. See
docs/decisions/0017.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tierfall.config import IntervalSection
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.format.records import Progress
from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessageTree,
    RankMessage,
    RankReported,
)
from tierfall.core.ranks.messages import Message
from tierfall.core.types.errors import CaptureError, TierfallError
from tierfall.core.types.values import LOSS_CLASSES
from tierfall.core.types.view import TierRules
from tierfall.policies.cadence import (
    CadenceRules,
    IntervalBound,
    Measured,
    choose_interval,
    should_save,
    tier_cadences,
)
from tierfall.telemetry.reports import CadenceReport
from tierfall.telemetry.step_timer import StepMeter

logger = logging.getLogger("tierfall")

TOPIC = "cadence"
AHEAD_S = 1.0
"""Seconds, at least, by which a step is announced ahead; and at least one step."""
_RECENT_STEPS = 4096
LeaveOut = Callable[[int, TierfallError], None]
PATIENCE_STEPS = 100
"""A save that is due waits so many steps at most for earlier ones to be flushed."""


def rules_of(interval: IntervalSection, tiers: tuple[TierRules, ...]) -> CadenceRules:
    """Return ``interval`` as the policies see it."""
    mtbf = interval.mtbf
    times = () if mtbf is None else (mtbf.process_s, mtbf.node_s, mtbf.site_s)
    return CadenceRules(
        every_steps=interval.every_steps,
        every_s=interval.every_s,
        overhead=interval.budget,
        mtbf_s={loss: s for loss, s in zip(LOSS_CLASSES, times, strict=False) if s is not None},
        tiers=tiers,
        own=interval.rule(),
    )


def flush_cycle(tiers: Sequence[TierRules]) -> int:
    """Return the number of saves after which the flush pattern repeats: the LCM of all ``flush.every``.

    Where that exceeds three times the largest of them, return the largest: the pattern repeats approximately.
    """
    longest = max((tier.flush_every for tier in tiers), default=1)
    cycle = math.lcm(*(tier.flush_every for tier in tiers))
    return cycle if cycle <= 3 * longest else longest


class CadenceClock:
    """See the module."""

    def __init__(
        self,
        rules: CadenceRules,
        *,
        clock: Callable[[], float],
        images: Callable[[int], int],
        copying: Callable[[], bool],
        others: AnnouncedSteps | None = None,
        began_s: float = 0.0,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        """``images`` returns how many images of a size in bytes host memory holds, ``copying`` whether a copy is being
        written now; ``others`` is there with several ranks. ``began_s`` is the ``wall_time`` of this start."""
        self._rules = rules
        self._clock = clock
        self._images = images
        self._copying = copying
        self._others = others
        self._decides = others is None or others.decides
        self._planned: deque[int] = deque() if others is None else others.planned
        self._signal: str | None = None
        self._requested = False
        self._last_step: int | None = None
        self._stride = 1
        self._last_planned: int | None = None
        self._due_s = clock() + (rules.every_s or 0.0)
        self.meter = StepMeter(clock(), cycle=flush_cycle(rules.tiers))
        self._wall_time = wall_time
        self._earlier = Progress(began_s=began_s, kept_s=0.0)
        """Of the checkpoint that the training continues from; ``kept_s`` is without what this start has kept."""
        self._images_now = 1
        self._choice = choose_interval(rules, self._measured())

    # Inputs ----------------------------------------------------------------------------------------

    def request(self, why: str) -> None:
        """Request a save of the next step, or of one soon after; may be called in a signal handler."""
        self._signal = why

    def on_saved(self, handle: SaveHandle) -> None:
        """Note that a save has begun, requested by the cadence or not."""
        self._last_planned = max(handle.step, self._last_planned or 0)
        if self._others is not None:
            self._others.on_saved(handle.step)
        self.meter.on_save(handle)

    def continue_from(
        self, step: int | None, due: str | None = None, *, earlier: Progress | None = None
    ) -> None:
        """Discard what is planned: the lineage continues from ``step`` (None: from nothing). ``due`` is why the next
        step is to be saved, if it is; ``earlier`` is known of the training up to there."""
        self._planned.clear()
        if self._others is not None:
            self._others.reset()
        self._last_step, self._last_planned = None, step
        self._signal = due or self._signal
        self._due_s = self._clock() + (self._rules.every_s or 0.0)
        self.meter.rewind(step)
        earlier = earlier or Progress(began_s=self._earlier.began_s)
        if earlier.kept_s is not None:
            earlier = replace(earlier, kept_s=earlier.kept_s - self.meter.kept_s)
        self._earlier = earlier
        self.meter.changed = True

    # Deciding --------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether ``step``, which the loop has completed, is to be saved."""
        now_s = self._clock()
        self.meter.tick(step, now_s, copying=self._copying())
        if self._last_step is not None and step > self._last_step:
            self._stride = step - self._last_step
        self._last_step = step
        if self._others is not None:
            self._others.reach(step)
        if self._signal is not None:
            self._take_signal(step)
        if self._decides:
            self._plan(step, now_s)
        every = self._rules.every_steps
        wanted = every is not None and should_save(step, every_steps=every)
        while self._planned and self._planned[0] <= step:
            self._planned.popleft()
            wanted = True
        return wanted

    def _take_signal(self, step: int) -> None:
        why, self._signal = self._signal, None
        logger.info("%s at step %d: it asks for a save", why, step)
        if self._decides:
            self._requested = True
        elif self._others is not None:
            self._others.request(str(why), step)

    def _plan(self, step: int, now_s: float) -> None:
        """Decide whether another step is to be saved: far enough ahead for the other ranks to receive it in time."""
        steps = 0
        if self._others is not None:
            steps = self._others.lead_steps(self.meter.fastest_step_s)
            if why := self._others.requested_above(self._last_planned):
                logger.info("a save is asked for: %s", "; ".join(why))
                self._requested = True
        soonest = step + steps * self._stride
        if self._requested:
            self._requested = False
            if not self._planned:
                self._add(soonest)
        if self._rules.every_s is not None:
            if now_s + steps * self.meter.fastest_step_s >= self._due_s:
                every_s = self._rules.every_s
                self._due_s += every_s
                if self._due_s <= now_s:
                    # after a pause of the loop: missed saves are not made up for
                    self._due_s = now_s + every_s
                self._add(soonest)
        elif self._rules.measured:
            self._plan_measured(step, soonest)

    def _plan_measured(self, step: int, soonest: int) -> None:
        if self.meter.changed:
            self.meter.changed = False
            self._choose()
        steps = self._choice.interval_steps
        if steps is None:
            return
        first = self.meter.saves == 0 and self._choice.bound is IntervalBound.MEASURING
        due = step if first else (self._last_planned or 0) + steps
        if soonest >= due and not (self._is_held_back() and step < due + PATIENCE_STEPS):
            self._add(max(due, soonest))

    def _is_held_back(self) -> bool:
        """Return whether a save would find no room in memory. While saves are measured, each is to end before the
        next."""
        first = self._choice.bound is IntervalBound.MEASURING
        return self.meter.unsettled_saves + len(self._planned) >= (1 if first else self._images_now)

    def _add(self, step: int) -> None:
        if self._planned and self._planned[-1] >= step:
            return
        self._last_planned = step
        self._planned.append(step)
        if self._others is not None:
            self._others.announce(step)

    def _choose(self) -> None:
        measured = self._measured()
        self._images_now = measured.images
        before = self._choice
        self._choice = choose_interval(self._rules, measured, now_s=time.time())
        if before.bound is not self._choice.bound:
            logger.info("interval: %s", self._choice.reason)

    def _measured(self) -> Measured:
        """Return what this start has measured, and what an earlier one has where it has not yet."""
        meter, earlier = self.meter, self._earlier
        cost_s = earlier.cost_s if meter.cost_s is None else meter.cost_s
        return Measured(
            step_s=meter.step_s or earlier.step_s,
            cost_s=cost_s,
            foreground_s=meter.foreground_s,
            durable_s=meter.durable_s,
            saved=meter.saves > 0 or cost_s is not None,
            images=max(1, self._images(meter.image_bytes)) if meter.image_bytes else 1,
        )

    def end(self) -> None:
        """The loop has ended: handle what was received since its last step."""
        if self._others is not None:
            self._others.handle_messages()

    def ettr(self) -> float | None:
        """See ``Statistics``."""
        return self.meter.ettr(self._clock())

    def run_ettr(self) -> float | None:
        """See ``Statistics``."""
        return self.progress().ettr(self._wall_time())

    def progress(self) -> Progress:
        """Return what is known of the training by now."""
        measured, before_s = self._measured(), self._earlier.kept_s
        is_known = before_s is not None and self.meter.is_timed
        return Progress(
            began_s=self._earlier.began_s,
            kept_s=(before_s or 0.0) + self.meter.kept_s if is_known else None,
            step_s=measured.step_s,
            cost_s=measured.cost_s,
        )

    # Outputs ---------------------------------------------------------------------------------------

    def report(self) -> CadenceReport:
        """Return the interval, its reason, and the measurements behind it."""
        measured = self._measured()
        choice = self._choice if self._rules.measured else choose_interval(self._rules, measured)
        steps, reason = choice.interval_steps, choice.reason
        if not self._decides and self._rules.every_steps is None:
            steps, reason = None, "rank 0 decides"
        span_s = (steps or 0) * (measured.step_s or 0.0)
        known = measured.cost_s is not None and span_s > 0
        return CadenceReport(
            interval_steps=steps,
            bound=str(choice.bound),
            reason=reason,
            step_s=measured.step_s,
            cost_s=measured.cost_s,
            overhead=measured.cost_s / span_s if known and measured.cost_s is not None else None,
            durable_s=dict(measured.durable_s),
            images=measured.images,
            next_step=self._next(steps),
            tiers=tier_cadences(self._rules, measured, steps),
        )

    def _next(self, steps: int | None) -> int | None:
        """Return the next step that is saved if nothing changes; None where that is not known."""
        if self._planned:
            return self._planned[0]
        if self._rules.every_steps is not None:
            every = self._rules.every_steps
            return ((self._last_step or 0) // every + 1) * every
        if not self._rules.measured or steps is None or self._last_planned is None:
            return None
        return self._last_planned + steps


# Steps that rank 0 announces -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest(Message):
    """A rank asks rank 0 for a save, of ``step`` or a later one."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MissedStep(Message):
    """A rank received an announcement so many steps after it had passed the step."""

    late_steps: int


class AnnouncedSteps:
    """The steps that ranks announce to each other. ``decides``: this rank announces. ``planned`` are the steps to be
    saved, in rising order. ``on_message`` may be called from any thread, all other methods by the training thread."""

    def __init__(
        self,
        message_tree: MessageTree,
        *,
        run_aside: Callable[[Callable[[], object]], None],
        leave_out: LeaveOut,
    ) -> None:
        """``run_aside`` runs a call on another thread than the training's. ``leave_out`` reports a step that this rank
        does not save."""
        self._message_tree = message_tree
        self.decides = message_tree.topology.is_root
        self._run_aside = run_aside
        self._leave_out = leave_out
        self._lineage = 0
        """Counts restores: a message of another lineage is ignored."""
        self._messages: deque[RankMessage] = deque()
        self._recent: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._missed_steps = 0
        self.planned: deque[int] = deque()
        self._saved: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._requests: deque[tuple[int, str]] = deque()

    def lead_steps(self, pace_s: float) -> int:
        """Return how many steps ahead a save is announced, where a step takes ``pace_s`` seconds."""
        by_time = math.ceil(AHEAD_S / pace_s) if pace_s > 0 else 1
        return max(1, by_time) + self._missed_steps

    def announce(self, step: int) -> None:
        """Have all ranks save at the first step from ``step`` on; for rank 0."""
        lineage = self._lineage
        self._run_aside(lambda: self._message_tree.announce((TOPIC, lineage, step), None))

    def request(self, why: str, step: int) -> None:
        """Ask rank 0 for a save, of ``step`` or a later one."""
        self._report("ask", SaveRequest(step=step, why=why))

    def _report(self, what: str, message: Message) -> None:
        topic = (TOPIC, self._lineage, what)
        self._run_aside(lambda: self._message_tree.report(topic, message.to_json()))

    def requested_above(self, planned: int | None) -> list[str]:
        """Return the reasons of other ranks that ask for a save after the last ``planned`` one; for rank 0."""
        found = [why for step, why in self._requests if planned is None or planned < step]
        self._requests.clear()
        return found

    def on_message(self, news: RankMessage) -> None:
        """Queue a message until the training thread handles it."""
        self._messages.append(news)

    def reach(self, step: int) -> None:
        """Handle what was received before the end of ``step``, and note that the loop has reached it."""
        self.handle_messages()
        self._recent.append(step)

    def handle_messages(self) -> None:
        """Handle the messages received since the last call."""
        while self._messages:
            news = self._messages.popleft()
            if news.topic[1] == self._lineage:
                self._on_announcement(news)

    def on_saved(self, step: int) -> None:
        """Note that this rank saves ``step``, whether it was announced or not."""
        self._saved.append(step)

    def reset(self) -> None:
        """Discard what is planned: all ranks have restored another step."""
        self._lineage += 1
        self.planned.clear()
        self._recent.clear()
        self._saved.clear()
        self._requests.clear()

    def _on_announcement(self, news: RankMessage) -> None:
        match news:
            case DecisionAnnounced(topic=(_, _, int(step))) if not self.decides:
                self._plan(step)
            case RankReported(topic=(_, _, "ask")):
                request = SaveRequest.from_json(news.body, rank=news.rank)
                self._requests.append((request.step, f"{request.why}, at rank {news.rank}"))
            case RankReported(topic=(_, _, "missed")):
                missed = MissedStep.from_json(news.body, rank=news.rank)
                self._announce_earlier(missed.late_steps, news.rank)

    def _plan(self, step: int) -> None:
        if not self._recent or self._recent[-1] < step:
            self.planned.append(step)
            return
        missed = self._recent[bisect_left(self._recent, step)]  # the step that the others save
        if missed in self._saved:
            return
        late = sum(1 for one in self._recent if one >= step)
        rank = self._message_tree.topology.rank
        error = CaptureError(
            f"save of step {missed}: rank {rank} received its announcement {late} steps too late"
        )
        self._leave_out(missed, error)
        self._report("missed", MissedStep(late_steps=late))

    def _announce_earlier(self, late: int, rank: int) -> None:
        self._missed_steps += late + 1
        logger.warning(
            "rank %d is ahead of rank 0, and received the announcement of a save %d steps too late: from now on saves "
            "are announced %d steps earlier; ranks that do not wait for each other should save by steps (interval: "
            "{every: 100})",
            rank,
            late,
            self._missed_steps,
        )
