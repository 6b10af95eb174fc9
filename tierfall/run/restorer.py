"""How one process restores: the candidates, agreed on with the other ranks, their images, and the lineage after it.

It knows no state: the caller plans where the bytes go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tierfall.config import Config
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import CheckpointReader, OpenImage
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.restore.agreement import agree_to_restore, make_barrier
from tierfall.core.restore.candidates import RestoreRequest, choose, naming_deletion
from tierfall.core.restore.pulled_reader import PulledReader
from tierfall.core.restore.reshard import ResizeRules
from tierfall.core.restore.restore import HALF_FILLED, Choice, RestoreResult, Together, fill_first
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.types.errors import ConfigError, StepError
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId
from tierfall.run.saver import SavingLineage, as_step
from tierfall.run.session import Session
from tierfall.setup.places import runs_in
from tierfall.setup.tiers import call_tiers, patience_s, reported_tiers

logger = logging.getLogger("tierfall")
LOOK_S = 2.0
"""Seconds that a tier has to answer which other runs it has."""


class Restorer:
    """See the module."""

    def __init__(self, config: Config, session: Session, lineage: SavingLineage) -> None:
        self._config = config
        self._session = session
        self._lineage = lineage
        self.patience_s = patience_s(config)

    @contextmanager
    def deletions_paused(self) -> Iterator[None]:
        """Pause deletions until it is known whether the run continues from what was read."""
        session = self._session
        deleter = session.coordinator.deleter
        try:
            session.call(lambda: deleter.set_paused(True))
            yield
        finally:
            session.call_soon(lambda: deleter.set_paused(False))

    @contextmanager
    def noting_half_filled(self, only: tuple[str, ...] | None) -> Iterator[Callable[[], None]]:
        """Refuse saves after an error that left the state, or the part ``only``, half filled, until a restore succeeds.

        Yields a function to call before the state is written: an interrupt after that is such an error.
        """
        begun: list[bool] = []
        try:
            yield lambda: begun.append(True)
        except BaseException as error:
            if HALF_FILLED in str(error) or (begun and not isinstance(error, Exception)):
                self._lineage.half_filled.add(only)
            raise

    def request(
        self,
        step: int | None,
        attempt: int | None,
        tier: str | None = None,
        unreachable: str = "raise",
        *,
        doing: str = "restore",
    ) -> RestoreRequest:
        """Return a request made of the arguments of ``restore``; ConfigError for invalid ones."""
        if unreachable not in ("raise", "ignore"):
            raise ConfigError(
                f"restore: unreachable must be 'raise' or 'ignore', not {unreachable!r}"
            )
        step = None if step is None else as_step(step, doing=doing)
        attempt = None if attempt is None else as_step(attempt, doing=doing, what="attempt")
        known = [t.name for t in self._config.chain]
        if tier is not None and tier not in known:
            raise ConfigError(f"restore: no tier is named {tier!r}; there are {', '.join(known)}")
        return RestoreRequest(
            step=step,
            attempt=attempt,
            tier=tier,
            ignore_unreachable=unreachable == "ignore",
            operation=doing,
        )

    def fill(
        self, request: RestoreRequest, make_plan: Callable[[Any], Any], resize: ResizeRules
    ) -> RestoreResult | None:
        """Fill what ``make_plan`` plans from the newest good checkpoint, on all ranks; None where there is none.

        Raises RestoreError where no candidate can be read whole.
        """
        session, tally = self._session, self._session.new_tally()
        ranks = session.ranks
        with ExitStack() as seen:

            def choose_now(request: RestoreRequest) -> Choice:
                listings = session.list_now()
                candidates = self.candidates(listings, request, tally)
                return Choice(
                    candidates=candidates, listings=listings, open_image=session.tiers.opener()
                )

            chosen = choose_now(request)
            if not chosen.candidates:
                self._warn_of_other_runs()
                return None
            seen.enter_context(session.holds.hold("restore", tally.describe, level=logging.INFO))
            seen.enter_context(naming_deletion(request, chosen.listings, session.list_now))
            return fill_first(
                chosen,
                request,
                tally,
                make_plan=make_plan,
                shard=ranks.shard,
                make_reader=self.reader,
                resize=resize,
                together=self.barrier(),
                choose_again=choose_now,
            )

    def _warn_of_other_runs(self) -> None:
        if not self._session.ranks.topology.is_root:
            return
        folders = {t.name: t.folder for t in self._config.stored if t.folder is not None}
        answers = call_tiers(
            (store for store in self._session.stores.values() if store.name in folders),
            lambda store: runs_in(folders[store.name]),
            self._config,
            BoundedCalls(),
            timeout_s=LOOK_S,
        )
        found = {run for each in answers.values() for run in each.value or ()}
        if others := found - {self._session.run}:
            logger.warning(
                "restore: no tier has a checkpoint of run %r, and training begins anew. Other runs on these tiers: %s. "
                "To continue from one, give its name as 'run' in the configuration",
                self._session.run, format_some(sorted(others)),
            )  # fmt: skip

    def reader(
        self,
        checkpoint: KnownCheckpoint,
        tiers: Sequence[str],
        open_image: OpenImage,
        tally: ReadTally,
    ) -> CheckpointReader:
        """Return a reader of a checkpoint's images; several ranks share what they read."""
        ring = self._session.ring
        if not self._session.ranks.many:
            return CheckpointReader(checkpoint, tiers, open_image, tally, ring)
        config = self._config
        return PulledReader(
            checkpoint,
            tiers,
            open_image,
            tally,
            ring,
            ranks=self._session.ranks,
            order=[tier.name for tier in config.chain],
            max_wait_s=config.max_wait_s,
            patience_s=self.patience_s,
            interface=None if config.peers is None else config.peers.interface,
        )

    def barrier(self) -> Together:
        """Return what all ranks end a candidate by."""
        return make_barrier(self._session.ranks, timeout_s=self.patience_s)

    def candidates(
        self, listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally
    ) -> list[KnownCheckpoint]:
        """Return the checkpoints that may be restored, newest first, the same on all ranks."""
        ranks = self._session.ranks
        if not self._session.tiers.agrees:
            return choose(listings, request, tally)
        reported = reported_tiers(self._config, ranks)
        return agree_to_restore(ranks, listings, request, mine=reported, tally=tally)

    def begin(self) -> None:
        """Let saving begin: no tier holds a checkpoint that the lineage could continue from."""
        self._lineage.begin()
        self._session.call(self._session.coordinator.begin_anew)

    def begin_empty(self) -> None:
        """Let saving begin, on all ranks, if no tier holds a checkpoint; see ``Checkpointer.begin``."""
        request = RestoreRequest(operation="begin", advice="or open with fresh=True")
        session = self._session
        if there := self.candidates(session.list_now(), request, session.new_tally()):
            raise StepError(
                f"begin: run {session.run!r} has checkpoints, the newest is {there[0].id}: call restore() or load() to "
                "continue from one, choose another run name, or open with fresh=True to leave them behind"
            )
        self.begin()


def log_abandoned(run: str, known: Sequence[KnownCheckpoint], from_id: CheckpointId | None) -> None:
    """Log which checkpoints are abandoned by the lineage that begins here, and which an earlier start abandoned, as it
    may not have seen them."""
    loose = [c for c in known if not (c.deleted or c.pinned)]
    begins = "anew" if from_id is None else f"at {from_id}"
    newer = [c for c in loose if from_id is None or c.id.step > from_id.step]
    for left, who in (
        ([c for c in newer if not c.abandoned], f"the lineage that begins {begins} abandons"),
        ([c for c in loose if c.abandoned], "an earlier start has abandoned"),
    ):
        if left:
            logger.warning(
                "run %s: %s %s; each tier deletes its own once the present lineage has a copy as safe. To keep "
                "one, pin it now",
                run,
                who,
                format_some([str(c.id) for c in left]),
            )
