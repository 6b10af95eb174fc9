"""The layouts of what is saved: planned once per structure, and, with other ranks, divided with them.

With other ranks, the first save of a structure waits until all of them have contributed their tables
(``core/scheduler/group/dedup.py``), and digests replicated state. Later saves reuse the layout without a message, and
read a part of the replicated state to compare it (``capture.replicas``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tierfall.core.capture.snapshot import Share
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
"""So much longer than ``max_wait`` a save waits for rank 0 to say that there is no division."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedLayout:
    """A layout, of the state that ``structure`` names, and the division that it leaves tensors out by, which depends on
    ``changes`` and ``rules`` of the state, too; what of its tensors is compared with other ranks (``replicas``);
    ``divided``: there is nothing that could be left out."""

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
    def share(self) -> Share:
        name = None if self.division is None else self.division.id
        return Share(structure=self.structure, division=name, replicas=self.replicas)


class Layouts:
    """The layouts of the last few structures. Used by the thread that saves."""

    def __init__(
        self, session: Session, *, max_wait_s: float, step_s: Callable[[], float | None]
    ) -> None:
        """``step_s`` says how long a training step takes."""
        self._session = session
        self._step_s = step_s
        self._max_wait_s = max_wait_s
        self._planned: list[_PlannedLayout] = []
        self._stands: str | None = None
        """The structure with nothing to share that the other ranks know of, if it was the last to be said."""

    def of(
        self,
        view: StateView,
        id: CheckpointId,
    ) -> tuple[Layout, bytes, Share | None]:
        """Return layout and header of a view, and what the other ranks must know of how it was divided."""
        divider = self._divider
        found = next((p for p in self._planned if p.serves(view)), None)
        share = found.share if found is not None and divider is not None else None
        if found is None or (divider is not None and not self._still(found, divider)):
            found, share = self._plan(view, id, divider)
        header = found.layout.header(view)
        if header is None:  # a value outgrew the room that was left for it
            left_out = dict(found.layout.elsewhere)
            found = self._keep(replace(found, layout=plan_layout(view, left_out)))
            header = found.layout.header(view)
            assert header is not None
        return found.layout, header, share

    @property
    def _divider(self) -> ReplicaAssigner | None:
        commits = self._session.coordinator.commits
        return None if commits is None else commits.divider

    def _still(self, planned: _PlannedLayout, divider: ReplicaAssigner) -> bool:
        """Say whether the ranks still hold to a division."""
        if planned.divided:
            return self._stands == planned.structure
        division = divider.divisions.get(planned.structure)
        return division is not None and division is planned.division

    def _plan(
        self,
        view: StateView,
        id: CheckpointId,
        divider: ReplicaAssigner | None,
    ) -> tuple[_PlannedLayout, Share | None]:
        whole = plan_layout(view)
        if divider is None:
            return self._keep(_planned(view, whole, whole.structure)), None
        shareable = ReplicatedTensors(view, whole.structure, step_s=self._step_s() or 0.0)
        structure = shareable.table.structure
        asked = AssignmentRequest(id=id, shareable=shareable, answer=_no_assignment)
        self._stands = None if shareable.numbers else structure
        if not shareable.numbers:
            self._session.coordinator.post(asked)
            planned = self._keep(_planned(view, whole, structure, divided=True))
            return planned, planned.share
        division = divider.divisions.get(structure)
        digests = None
        if division is None:
            division = self._ask(asked)
            if division is not None and len(division.keys):
                digests = shareable.digests(division)
        rank = self._session.ranks.shard.rank
        left_out = {} if division is None else shareable.left_out(division, rank)
        layout = plan_layout(view, left_out) if left_out else whole
        replicas = None
        if division is not None and len(division.keys):
            replicas = ReplicaPlan(shareable, division)
        planned = self._keep(_planned(view, layout, structure, division, replicas))
        return planned, planned.share if digests is None else replace(
            planned.share, digests=digests
        )

    def _ask(self, asked: AssignmentRequest) -> ReplicaAssignment | None:
        """Have what the ranks hold divided; None where they do not all come to be asked."""
        done, answers = InterruptibleEvent(), []

        def tell(division: ReplicaAssignment | None) -> None:
            answers.append(division)
            done.ring()

        asked.answer = tell
        self._session.coordinator.post(asked)
        if not self._session.wait(done, self._max_wait_s + ANSWER_S):
            logger.warning(
                "save: rank 0 did not say within max_wait how to divide step %d", asked.id.step
            )
            return None
        if answers[0] is None:
            logger.info("save of step %d: each rank writes all that it holds", asked.id.step)
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


def _no_assignment(division: ReplicaAssignment | None) -> None:
    """The answer before a save waits for one."""
