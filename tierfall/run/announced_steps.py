"""Announced steps: all ranks save at the same step, where that does not follow from the step's number.

Rank 0 announces a step ahead of time; every rank saves at the first step from there on. No rank waits. A rank that
receives an announcement after passing the step reports a miss. Rank 0 then abandons that checkpoint on all ranks and
increases its lead. ``on_message`` may be called from any thread, all other methods by the training thread. See
docs/decisions/0017.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessageTree,
    RankMessage,
    RankReported,
)
from tierfall.core.ranks.messages import Message
from tierfall.core.types.errors import CaptureError, TierfallError

logger = logging.getLogger("tierfall")

TOPIC = "cadence"
AHEAD_S = 1.0
"""Seconds, at least, by which a step is announced ahead; and at least one step."""
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
    """See the module. ``decides``: this rank announces. ``planned`` are the steps to be saved, in rising order."""

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
        lineage, request = self._lineage, SaveRequest(step=step, why=why)
        self._run_aside(
            lambda: self._message_tree.report((TOPIC, lineage, "ask"), request.to_json())
        )

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
        lineage, report = self._lineage, MissedStep(late_steps=late)
        self._leave_out(missed, error)
        self._run_aside(
            lambda: self._message_tree.report((TOPIC, lineage, "missed"), report.to_json())
        )

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
