"""Announced steps: how all ranks save at the same step, where no rank can tell that step from its number.

Rank 0 announces a step some way ahead; every rank saves at the first step from there on. Nobody waits: a rank that
hears of a step after it has passed it says that it has not saved it, which gives the checkpoint up for all, and that
it heard too late, so that rank 0 announces further ahead. ``hear`` may be called from any thread, all else belongs to
the training thread. See docs/decisions/0017.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tierfall.core.ranks.message_tree import MessageTree
from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.ranks import DecisionAnnounced, RankMessage, RankReported
from tierfall.core.types.errors import CaptureError, TierfallError

logger = logging.getLogger("tierfall")

TOPIC = "cadence"
AHEAD_S = 1.0
"""So far ahead a step is announced at least, and one step."""
_RECENT_STEPS = 4096
LeaveOut = Callable[[int, TierfallError], None]


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
    """See the module. ``tell`` runs a call elsewhere than on the training thread; ``leave_out`` says of a step
    that this rank does not save it."""

    def __init__(
        self,
        council: MessageTree,
        *,
        tell: Callable[[Callable[[], object]], None],
        leave_out: LeaveOut,
    ) -> None:
        self._council = council
        self.decides = council.topology.is_root
        self._tell = tell
        self._leave_out = leave_out
        self._line = 0
        self._heard: deque[RankMessage] = deque()
        self._recent: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._missed_steps = 0
        self.planned: deque[int] = deque()
        """Steps that are still to be saved, in rising order."""
        self._saved: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._asked: deque[tuple[int, str]] = deque()

    def ahead_steps(self, pace_s: float) -> int:
        """Say how many steps ahead a save is announced, by what a step takes."""
        by_time = math.ceil(AHEAD_S / pace_s) if pace_s > 0 else 1
        return max(1, by_time) + self._missed_steps

    def announce(self, step: int) -> None:
        """Let all ranks save at the first step from ``step`` on; for rank 0."""
        line = self._line
        self._tell(lambda: self._council.announce((TOPIC, line, step), None))

    def ask(self, why: str, step: int) -> None:
        """Ask rank 0 for a save, of ``step`` or a later one."""
        line, request = self._line, SaveRequest(step=step, why=why)
        self._tell(lambda: self._council.tell((TOPIC, line, "ask"), request.to_json()))

    def asked_above(self, planned: int | None) -> list[str]:
        """Say why other ranks ask for a save, where the last that is planned does not do; for rank 0."""
        found = [why for step, why in self._asked if planned is None or planned < step]
        self._asked.clear()
        return found

    def hear(self, news: RankMessage) -> None:
        self._heard.append(news)

    def come_to(self, step: int) -> None:
        """The loop has come to ``step``."""
        self.listen()
        self._recent.append(step)

    def listen(self) -> None:
        """Take what was heard meanwhile."""
        while self._heard:
            news = self._heard.popleft()
            if news.topic[1] == self._line:  # else it is of a line that was left
                self._on_announcement(news)

    def saved(self, step: int) -> None:
        """This rank saves ``step``, for whatever reason."""
        self._saved.append(step)

    def go_back(self) -> None:
        """The line goes on from another step, on all ranks: nothing is planned any more."""
        self._line += 1
        self.planned.clear()
        self._recent.clear()
        self._saved.clear()
        self._asked.clear()

    def _on_announcement(self, news: RankMessage) -> None:
        match news:
            case DecisionAnnounced(topic=(_, _, int(step))) if not self.decides:
                self._plan(step)
            case RankReported(topic=(_, _, "ask")):
                request = SaveRequest.from_json(news.body, rank=news.rank)
                self._asked.append((request.step, f"{request.why}, at rank {news.rank}"))
            case RankReported(topic=(_, _, "missed")):
                missed = MissedStep.from_json(news.body, rank=news.rank)
                self._announce_earlier(missed.late_steps, news.rank)

    def _plan(self, step: int) -> None:
        if not self._recent or self._recent[-1] < step:
            self.planned.append(step)
            return
        missed = self._recent[bisect_left(self._recent, step)]
        if missed in self._saved:
            return
        late = sum(1 for one in self._recent if one >= step)
        error = CaptureError(
            f"save of step {missed}: rank {self._council.topology.rank} heard of it {late} steps too late"
        )
        line, report = self._line, MissedStep(late_steps=late)
        self._leave_out(missed, error)
        self._tell(lambda: self._council.tell((TOPIC, line, "missed"), report.to_json()))

    def _announce_earlier(self, late: int, rank: int) -> None:
        self._missed_steps += late + 1
        logger.warning(
            "rank %d is ahead of rank 0, and heard of a save %d steps too late: from now on saves are announced %d "
            "steps earlier; ranks that do not wait for each other should save by steps (interval: {every: 100})",
            rank,
            late,
            self._missed_steps,
        )
