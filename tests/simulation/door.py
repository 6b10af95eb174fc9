"""The planner of one process of a simulation: events go in, tasks come out by ``submit``.

A world opens a ``Door`` for each process that it starts, has a ``Worker`` carry the tasks out when it is their time,
and posts the outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierfall.core.capture.snapshot import HostMemory
from tierfall.core.flush.coordinator import Coordinator
from tierfall.core.flush.facts import Group, Ledger, LedgerEntry
from tierfall.core.flush.lane import LaneLimits
from tierfall.core.flush.tasks import AdmissionRequest, Command, CommandKind, Event, Task
from tierfall.core.flush.worker import TaskRunner
from tierfall.core.format.catalog import Listing, decided_in, merge
from tierfall.core.format.records import Attempt
from tierfall.core.ranks.message_tree import MessageTree
from tierfall.core.ranks.topology import ALONE
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.types import events
from tierfall.core.types.values import CheckpointId, CopyState, WhenFull
from tierfall.core.types.view import TierRules
from tierfall.setup.host_memory import Leftovers, adopt_images, note_overtaken
from tierfall.setup.start import Start
from tierfall.telemetry.figures import EventTally
from tierfall.tiers.stored import StoredTier

Answer = dict[str, BaseException]
"""What a command is answered: the tiers where it failed."""
WHOLE = (CopyState.SEALED, CopyState.COMMITTED)


class Worker(TaskRunner):
    """Carries out tasks, for the attempt that ``attempt`` names at that moment."""

    def __init__(
        self, stores: Mapping[str, StoredTier], attempt: Callable[[], Attempt], *, buffer_bytes: int
    ) -> None:
        pools = {name: BufferPool(bytes=buffer_bytes, count=4) for name in stores}
        super().__init__(stores, pools, attempt)

    def keep(self, attempt: Attempt) -> None:
        """Carry out all that follows for this attempt."""
        self._attempt = lambda: attempt


class Door:
    """The planner of one process. ``events`` are what it tells of saves and copies, in their order."""

    def __init__(
        self,
        *,
        rules: tuple[TierRules, ...],
        stores: Mapping[str, StoredTier],
        memory: HostMemory,
        images: Sequence[tuple[CheckpointId, Any]],
        listings: Sequence[Listing],
        held: Sequence[Listing],
        submit: Callable[[Task], None],
        now_s: float,
        wall_s: float,
        max_wait_s: float,
        when_full: WhenFull,
        start: Start | None = None,
        message_tree: MessageTree | None = None,
        shared: Mapping[str, bool] | None = None,
        run_bytes_min: int = 0,
        set_pace: Callable[[str, float | None], None] = lambda tier, bytes_per_s: None,
    ) -> None:
        """``images`` lie in ``memory``; ``listings`` are what this process sees of the tiers, ``held`` what all have
        their parts of. ``start`` is what ranks have agreed on (None: this one is alone), ``shared`` says which tiers
        all of them see. ``run_bytes_min`` is how long a write is at least to a tier that does not pack."""
        begun = start or Start()
        ledger = Ledger(
            rules,
            "host",
            group=Group(
                topology=ALONE if message_tree is None else message_tree.topology,
                shared=shared or {},
            ),
        )
        ledger.set_clock(now_s=now_s, wall_time_s=wall_s)
        ledger.load(
            merge(held),
            held,
            decided=decided_in(held),
            scattered=begun.scattered,
            on_few_nodes=begun.on_few_nodes,
        )
        ledger.note_partial(x for x in listings if x.tier in begun.seen)
        leftovers = Leftovers(ledger, [])
        adopt_images(ledger, images, leftovers, begun.displaced)
        note_overtaken(ledger, begun.overtaken)
        self.events: list[events.Event] = []
        self.planner = Coordinator(
            ledger=ledger,
            lanes={
                name: LaneLimits(
                    parallel=2,
                    budget_bytes=1 << 20,
                    window=3 if store.is_packed else 0,
                    run_bytes_min=0 if store.is_packed else run_bytes_min,
                )
                for name, store in stores.items()
            },
            host=memory,
            submit=submit,
            max_wait_s=max_wait_s,
            when_full=when_full,
            message_tree=message_tree,
            unread=[x.tier for x in listings if x.error is not None],
            decided={x.tier: x.decided for x in listings if x.error is None},
            set_pace=set_pace,
            notify=self.events.append,
            leftovers=None if start is None else leftovers,
        )
        self.ledger = ledger
        self._unread = frozenset(x.tier for x in listings if x.error is not None)

    # Events in -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to plan."""
        self.planner.start()

    def post(self, event: Event) -> None:
        """Tell it what has happened: the outcome of a task, a part of a capture, a message of another rank."""
        self.planner.post(event)

    def step(self, now_s: float) -> float | None:
        """Let it plan by what has come; return when to call this again, if nothing comes."""
        return self.planner.step(now_s)

    @property
    def is_told(self) -> bool:
        """Something has come since the last step."""
        return not self.planner.inbox.is_empty

    def ask_for_memory(
        self, id: CheckpointId, *, image_bytes: int, deadline_s: float, records_bytes: int = 0
    ) -> list[Any]:
        """Ask for memory for a save; the answer (region, error) is appended once there is one."""
        answer: list[Any] = []
        self.post(
            AdmissionRequest(
                id=id,
                image_bytes=image_bytes,
                records_bytes=records_bytes,
                deadline_s=deadline_s,
                on_answer=lambda region, error: answer.extend((region, error)),
            )
        )
        return answer

    def command(
        self, kind: CommandKind, id: CheckpointId, on_answer: Callable[[Answer], None]
    ) -> None:
        """A person commands something."""
        self.post(Command(kind=kind, id=id, on_answer=on_answer))

    def continue_from(
        self,
        id: CheckpointId | None,
        *,
        attempt: int,
        read_whole: tuple[str, ...] | None = None,
    ) -> None:
        """The training goes on from what was restored, as this attempt. ``read_whole``: where this rank has read all of
        its image, which the ranks tell each other (None: they do not)."""
        if id is not None and read_whole is not None:
            self.planner.verifier.on_restored(id, read_whole)
        self.ledger.continue_from(id, attempt=attempt)

    def apply_rules(self) -> None:
        """Look at all tiers anew for what is to be deleted."""
        self.planner.deleter.schedule_all()

    # Facts out -----------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> dict[CheckpointId, LedgerEntry]:
        """All that are known, wherever they are."""
        return self.ledger.entries

    def whole_on(self, tier: str) -> set[CheckpointId]:
        """The checkpoints of which a tier has a whole copy, as far as this rank knows."""
        return {e.id for e in self.checkpoints.values() if e.state(tier) in WHOLE}

    @property
    def owed(self) -> tuple[tuple[CheckpointId, str], ...]:
        """The copies that tiers are owed, in the order of their saves."""
        return self.planner.owed_copies()

    @property
    def unread(self) -> frozenset[str]:
        """The tiers that this start could not look at."""
        return self._unread

    @property
    def is_fenced(self) -> bool:
        """There is a newer attempt: nothing more is written."""
        return self.planner.fenced is not None

    @property
    def is_busy(self) -> bool:
        """Something is being done, or could be."""
        return self.planner.busy()

    @property
    def is_copying(self) -> bool:
        """A copy is on its way to some tier."""
        return any(lane.active for lane in self.planner.lanes.values())

    @property
    def on_few_nodes(self) -> Mapping[tuple[str, CheckpointId], bool]:
        """The copies in peer memory that fewer nodes have than should; True: they may have been reported."""
        return dict(self.ledger.on_few_nodes)

    @property
    def counts(self) -> dict[str, Any]:
        """What a run counts of these events, by the names of its figures."""
        tally = EventTally(self.planner.lanes)
        for event in self.events:
            tally.add(event)
        return tally.read()
