"""How one process restores: what may be restored, agreed on with the other ranks; where its parts lie; and what the
line goes on from.

It knows no state: whoever calls plans where the bytes go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tierfall.config import Config
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import NOT_SENT, NOWHERE, OpenImage
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.restore.agreement import agree_to_restore, make_barrier
from tierfall.core.restore.candidates import states_only
from tierfall.core.restore.exchange.exchange import Exchange
from tierfall.core.restore.exchange.gloo import Connect
from tierfall.core.restore.reshard import ResizeRules
from tierfall.core.restore.restore import (
    HALF_FILLED,
    RestoreRequest,
    RestoreResult,
    choose,
    fill_first,
)
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import few_of
from tierfall.core.types.values import CheckpointId
from tierfall.session.leftovers import regions_in
from tierfall.session.session import Session
from tierfall.session.start import is_shared, reported_tiers
from tierfall.setup.lineage import SavingLineage, as_step

logger = logging.getLogger("tierfall")
SLOWER = 10
"""A rank that has taken its memory, or has filled its part of a restore, waits for the others for so many times
``max_wait``: how long either takes is a matter of bytes."""


class Restorer:
    """See the module. ``connect`` makes what ranks exchange bytes over; without it each reads for itself."""

    def __init__(
        self, config: Config, session: Session, line: SavingLineage, *, connect: Connect | None
    ) -> None:
        self._config = config
        self._session = session
        self._line = line
        self._connect = connect
        self.has_gone_on: Callable[[int], None] = _ignore_step

    @property
    def slower_s(self) -> float:
        """How long one rank waits for another where bytes are moved."""
        return SLOWER * self._config.max_wait_s

    @contextmanager
    def nothing_dropped(self) -> Iterator[None]:
        """Keep every copy where it is, until what was read is known to be what this run goes on from."""
        session = self._session
        dropper = session.coordinator.dropper
        try:
            session.ask(lambda: setattr(dropper, "paused", True))
            yield
        finally:
            session.tell(lambda: setattr(dropper, "paused", False))

    @contextmanager
    def half_filled_noted(self, only: tuple[str, ...] | None) -> Iterator[Callable[[], None]]:
        """Let nothing be saved after an error that left the state, or this part of it, half filled, until a restore of
        it succeeds. Yield what is called before the state is written to: an interrupt after that is such an error."""
        begun: list[bool] = []
        try:
            yield lambda: begun.append(True)
        except BaseException as error:
            if HALF_FILLED in str(error) or (begun and not isinstance(error, Exception)):
                self._line.half_filled.add(only)
            raise

    def request(
        self, step: int | None, attempt: int | None, tier: str | None, unreachable: str
    ) -> RestoreRequest:
        """Check what a caller asked for; ConfigError for what cannot be."""
        if unreachable not in ("raise", "ignore"):
            raise ConfigError(
                f"restore: unreachable must be 'raise' or 'ignore', not {unreachable!r}"
            )
        step = None if step is None else as_step(step, doing="restore")
        attempt = None if attempt is None else as_step(attempt, doing="restore", what="attempt")
        known = [t.name for t in self._config.chain]
        if tier is not None and tier not in known:
            raise ConfigError(f"restore: no tier is named {tier!r}; there are {', '.join(known)}")
        return RestoreRequest(
            step=step, attempt=attempt, tier=tier, ignore_unreachable=unreachable == "ignore"
        )

    def fill(
        self, request: RestoreRequest, make_plan: Callable[[Any], Any], resize: ResizeRules
    ) -> RestoreResult | None:
        """Fill what ``make_plan`` plans from the newest checkpoint that is good, on all ranks; None where there is
        none. Raises RestoreError."""
        session, tally = self._session, self._session.tally()
        listings = session.list_now()
        hosts = session.hosts()
        ranks, many = session.ranks, session.ranks.many
        with ExitStack() as seen:

            def look_again() -> Sequence[Listing]:
                hosts[:] = seen.enter_context(session.looking_at_node())
                return session.with_memory(listings, hosts)

            candidates = self.candidates(listings, request, tally, look_again)
            if not candidates:
                return None
            open_image = session.opener(regions_in(hosts))
            where = (candidates, listings, request, open_image, ranks.shard)
            return fill_first(
                candidates,
                listings,
                request,
                tally,
                open_image=open_image,
                make_plan=states_only(make_plan, *where),
                shard=ranks.shard,
                ring=session.ring,
                resize=resize,
                together=make_barrier(ranks, timeout_s=self.slower_s) if many else None,
                exchange=self.exchange(),
                nowhere=self.nowhere,
            )

    @property
    def nowhere(self) -> str:
        """What it means that no tier here holds a part."""
        return NOT_SENT if self._session.ranks.many and self._connect is None else NOWHERE

    def exchange(self) -> Exchange | None:
        """Return how ranks exchange bytes; None where each reads for itself."""
        if self._connect is None:
            return None
        return Exchange(
            ranks=self._session.ranks,
            connect=self._connect,
            order=[tier.name for tier in self._config.chain],
            shared=[tier.name for tier in self._config.stored if is_shared(tier)],
            timeout_s=self.slower_s,
        )

    def candidates(
        self,
        listings: Sequence[Listing],
        request: RestoreRequest,
        tally: ReadTally,
        look_again: Callable[[], Sequence[Listing]] | None = None,
    ) -> list[KnownCheckpoint]:
        """What may be restored, newest first, the same on all ranks."""
        ranks = self._session.ranks
        if not self._session.puts_together:
            return choose(listings, request, tally)
        told = reported_tiers(self._config, ranks)
        return agree_to_restore(
            ranks, listings, request, mine=told, tally=tally, look_again=look_again
        )

    def opener(self) -> OpenImage:
        """What opens images, those in the memory of this process too."""
        return self._session.opener(regions_in(self._session.hosts()))

    def continue_from(
        self, checkpoint: KnownCheckpoint, any_saved: bool, *, verified: tuple[str, ...] = ()
    ) -> None:
        """The line goes on from here; what this start saved before, on any rank, belongs to another one. All of this
        rank's part was read, and was good, on the tiers ``verified``."""
        id, commit = checkpoint.id, checkpoint.commit
        assert commit is not None
        attempt = self._line.attempt
        if any_saved:
            self._session.listings = self._session.list_now()
            attempt = self._session.take_attempt()
        self._line.continue_from(commit, attempt)
        log_abandoned(self._session.run, self._session.known(), id)
        coordinator = self._session.coordinator

        def go_on() -> None:
            coordinator.verifier.restored(id, verified)
            coordinator.ledger.go_on_from(id, attempt=attempt.number)

        self._session.ask(go_on)
        self.has_gone_on(id.step)


def _ignore_step(step: int) -> None:
    """Nobody asked to hear from which step the line goes on."""


def log_abandoned(run: str, known: Sequence[KnownCheckpoint], from_id: CheckpointId | None) -> None:
    """Say which checkpoints the line that begins here leaves behind, and which an earlier start did, that may not have
    seen them: they go once it is as safe."""
    loose = [c for c in known if not (c.tombstoned or c.pinned)]
    begins = "anew" if from_id is None else f"at {from_id}"
    newer = [c for c in loose if from_id is None or c.id.step > from_id.step]
    for left, who in (
        ([c for c in newer if not c.abandoned], f"the line that begins {begins} leaves behind"),
        ([c for c in loose if c.abandoned], "an earlier start has left behind"),
    ):
        if left:
            logger.warning(
                "run %s: %s %s; each tier deletes its own once the present line has a copy that is as safe. To keep "
                "one, pin it now",
                run,
                who,
                few_of([str(c.id) for c in left]),
            )
