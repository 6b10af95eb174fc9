"""The layouts of saved states: planned once per structure; with several ranks, replicas are assigned to one of them.

With several ranks, the first save of a structure waits until all ranks have reported what they save
(``scheduler.group.dedup``), and digests the replicas. Later saves reuse the layout without a message, and read a part
of the replicas at each save, to be compared (``sampling.replicas``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tierfall.core.capture.snapshot import ReplicaShare
from tierfall.core.image.dedup import ReplicaAssignment, ReplicatedTensors
from tierfall.core.image.layout import Layout, plan_layout
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.sampling.replicas import ReplicaPlan
from tierfall.core.scheduler.group.dedup import ReplicaAssigner
from tierfall.core.scheduler.ledger.tasks import AssignmentRequest
from tierfall.core.state.item import OnResize
from tierfall.core.state.view import StateView
from tierfall.core.types.values import Changes, CheckpointId
from tierfall.session.session import Session

logger = logging.getLogger("tierfall")

KEPT = 4
ANSWER_S = 5.0
"""Seconds beyond ``max_wait`` that a save waits for rank 0's answer that there is no assignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedLayout:
    """A cached layout, and the replica assignment (``division``) it was planned with.

    Both depend on ``structure``, ``changes`` and ``rules`` of the state. ``replicas`` is what is compared with other
    ranks. ``divided``: no tensor could be left out.
    """

    layout: Layout
    structure: str
    changes: tuple[Changes, ...]
    rules: Mapping[str, OnResize]
    division: ReplicaAssignment | None
    replicas: ReplicaPlan | None
    divided: bool

    def serves(self, view: StateView) -> bool:
        same = self.changes == view.changes and self.rules == view.rules
        return same and self.layout.matches(view)

    @property
    def share(self) -> ReplicaShare:
        name = None if self.division is None else self.division.id
        return ReplicaShare(structure=self.structure, assignment=name, replicas=self.replicas)


class Layouts:
    """The layouts of the last few structures. Used by the thread that saves."""

    def __init__(
        self, session: Session, *, max_wait_s: float, step_s: Callable[[], float | None]
    ) -> None:
        """``step_s`` returns how long a training step takes, in seconds; None while that is not known."""
        self._session = session
        self._step_s = step_s
        self._max_wait_s = max_wait_s
        self._planned: list[_PlannedLayout] = []
        self._reported: str | None = None
        """The structure without replicas that was reported to the other ranks last; None once another was."""

    def of(
        self,
        view: StateView,
        id: CheckpointId,
    ) -> tuple[Layout, bytes, ReplicaShare | None]:
        """Return layout and header of a view, and how its replicas were assigned, for the other ranks."""
        divider = self._divider
        found = next((p for p in self._planned if p.serves(view)), None)
        share = found.share if found is not None and divider is not None else None
        if found is None or (divider is not None and not self._is_current(found, divider)):
            found, share = self._plan(view, id, divider)
        header = found.layout.header(view)
        if header is None:  # a value outgrew the space reserved for it
            left_out = dict(found.layout.written_by_others)
            found = self._keep(replace(found, layout=plan_layout(view, left_out)))
            header = found.layout.header(view)
            assert header is not None
        return found.layout, header, share

    @property
    def _divider(self) -> ReplicaAssigner | None:
        """What assigns replicas to ranks; None where one rank writes all."""
        return self._session.coordinator.commits.replicas if self._session.ranks.many else None

    def _is_current(self, planned: _PlannedLayout, divider: ReplicaAssigner) -> bool:
        """Return whether the ranks still use the assignment that a layout was planned with."""
        if planned.divided:
            return self._reported == planned.structure
        division = divider.assignments.get(planned.structure)
        return division is not None and division is planned.division

    def _plan(
        self,
        view: StateView,
        id: CheckpointId,
        divider: ReplicaAssigner | None,
    ) -> tuple[_PlannedLayout, ReplicaShare | None]:
        whole = plan_layout(view)
        if divider is None:
            return self._keep(_planned(view, whole, whole.structure)), None
        shareable = ReplicatedTensors(view, whole.structure, step_s=self._step_s() or 0.0)
        structure = shareable.table.structure
        self._reported = None if shareable.numbers else structure
        if not shareable.numbers:
            self._session.coordinator.post(
                AssignmentRequest(id=id, shareable=shareable, on_answer=_ignore_assignment)
            )
            planned = self._keep(_planned(view, whole, structure, divided=True))
            return planned, planned.share
        division = divider.assignments.get(structure)
        digests = None
        if division is None:
            division = self._request_assignment(id, shareable)
            if division is not None and len(division.keys):
                digests = shareable.digests(division)
        rank = self._session.ranks.shard.rank
        left_out = {} if division is None else shareable.written_by_others(division, rank)
        layout = plan_layout(view, left_out) if left_out else whole
        replicas = None
        if division is not None and len(division.keys):
            replicas = ReplicaPlan(shareable, division)
        planned = self._keep(_planned(view, layout, structure, division, replicas))
        return planned, planned.share if digests is None else replace(
            planned.share, digests=digests
        )

    def _request_assignment(
        self, id: CheckpointId, shareable: ReplicatedTensors
    ) -> ReplicaAssignment | None:
        """Have the replicas assigned to ranks; None where not all ranks report what they save."""
        done, answers = InterruptibleEvent(), []

        def on_answer(division: ReplicaAssignment | None) -> None:
            answers.append(division)
            done.set()

        self._session.coordinator.post(
            AssignmentRequest(id=id, shareable=shareable, on_answer=on_answer)
        )
        if not self._session.wait(done, self._max_wait_s + ANSWER_S):
            logger.warning(
                "save: rank 0 did not say within max_wait how to divide step %d", id.step
            )
            return None
        if answers[0] is None:
            logger.info("save of step %d: each rank writes all that it holds", id.step)
        return answers[0]

    def _keep(self, planned: _PlannedLayout) -> _PlannedLayout:
        others = [kept for kept in self._planned if kept.structure != planned.structure]
        self._planned = [planned, *others[: KEPT - 1]]
        return planned


def _planned(
    view: StateView,
    layout: Layout,
    structure: str,
    division: ReplicaAssignment | None = None,
    replicas: ReplicaPlan | None = None,
    *,
    divided: bool = False,
) -> _PlannedLayout:
    return _PlannedLayout(
        layout=layout,
        structure=structure,
        changes=view.changes,
        rules=view.rules,
        division=division,
        replicas=replicas,
        divided=divided,
    )


def _ignore_assignment(division: ReplicaAssignment | None) -> None:
    """The answer to a report of a structure without replicas."""
