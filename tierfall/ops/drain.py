"""``tierfall drain``: flush what a dead trainer left in host memory, by a session and its coordinator.

It writes on behalf of the attempt that left the images: where a newer attempt exists, the fence stops it. The owed
copies are listed before the first is begun; memory is freed once all of them are durable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tierfall.config import Config
from tierfall.core.format.catalog import Listing, merge
from tierfall.core.format.records import Attempt
from tierfall.core.types.errors import FencedError, IntegrityError, TierfallError
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.ops.commands import POLL_S, Watch, unread, view_of
from tierfall.ops.drain_shards import MachineShards
from tierfall.session.drain_forecast import ForecastLog
from tierfall.session.leftovers import images_in
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.session.requests import must_keep_memory
from tierfall.session.session import Session
from tierfall.session.start import Start
from tierfall.setup.attempts import attempt_of, ids_by_commits, newest_attempt
from tierfall.setup.bounded_tiers import close_stores
from tierfall.setup.places import run_folder, seen_by_one
from tierfall.setup.tiers import ANSWER_S, open_stores
from tierfall.tiers.arena.folder import prepare_folder
from tierfall.tiers.host import SealedImage, arena_slots

logger = logging.getLogger("tierfall")
RETRY_S = 2.0
"""Seconds between tries to open a tier that does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedCopy:
    """A copy that a tier is owed; ``bytes`` is its raw size."""

    checkpoint: CheckpointId
    tier: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.checkpoint} to {self.tier} ({format_size(self.bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainResult:
    """``done`` are the copies that became durable, ``left`` those that are still owed; ``memory_kept``: host memory was
    not freed."""

    done: tuple[OwedCopy, ...]
    left: tuple[OwedCopy, ...]
    problems: tuple[str, ...]
    memory_kept: bool
    seconds: float


def drain(
    config: Config,
    deadline_s: float | None,
    watch: Watch = lambda done, total: None,
    on_forecast: Callable[[str], None] = lambda line: None,
) -> DrainResult:
    """Flush what host memory holds, for ``deadline_s`` seconds at most (None: until done).

    With a deadline, the most valuable copies come first, a copy that cannot arrive in time is not begun, and a tier
    that cannot be opened is tried again until then.
    ``on_forecast`` is called with a sentence per forecast: at the start, and again once the rates of tiers are known.
    ``watch`` is called with bytes copied and bytes in total.

    Raises FencedError, and writes nothing, where a newer attempt of the run exists; LockError where a trainer is alive.
    """
    began = time.monotonic()
    until_s = None if deadline_s is None else began + deadline_s
    done: list[OwedCopy] = []
    drained, silent = _drain_once(config, until_s, watch, on_forecast)
    while until_s and drained.memory_kept and silent & {owed.tier for owed in drained.left}:
        done += drained.done
        try:
            if not _wait_for_any(config, silent, until_s):
                break
            drained, silent = _drain_once(config, until_s, watch, on_forecast)
        except TierfallError as error:  # a trainer has begun, say
            drained = replace(drained, problems=(*drained.problems, str(error)))
            break
    else:
        done += drained.done
    return replace(drained, done=tuple(done), seconds=time.monotonic() - began)


def _wait_for_any(config: Config, silent: Set[str], until_s: float) -> bool:
    """Wait until one of the tiers ``silent`` can be opened; False once the monotonic clock reaches ``until_s``."""
    logger.warning("drain: tried again until the deadline: %s", ", ".join(sorted(silent)))
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(RETRY_S, left_s))
        stores, errors = open_stores(
            seen_by_one(config), config.run, find_read_only=True, creates=False
        )
        close_stores(stores, ANSWER_S)
        if not silent <= errors.keys():
            return True
    return False


def _drain_once(
    config: Config,
    until_s: float | None,
    watch: Watch,
    on_forecast: Callable[[str], None],
) -> tuple[DrainResult, Set[str]]:
    """Drain to the tiers that can be opened now. Return the result, without its seconds, and the other tiers."""
    slots = len(arena_slots(prepare_folder(run_folder(config, config.run))))
    with ExitStack() as undo:
        tiers = OpenedTiers(
            config, run=config.run, accept_arena=True, draining=True, command="tierfall drain"
        )
        undo.callback(tiers.close, keep=True)
        images = images_in(tiers.hosts())
        if not images:  # the owner of a moment ago has flushed them
            return DrainResult(done=(), left=(), problems=(), memory_kept=False, seconds=0.0), set()
        _, newest = max(images, key=lambda held: (held[0].attempt, held[0].step))
        tiers.write_for(writer_of(newest, tiers))
        planned = _owed(tiers.config, tiers.listings)
        shards = MachineShards(tiers, slots) if tiers.agrees else None
        if shards is None:  # else other machines may be writing
            tiers.discard_unfinished()
            session = Session(tiers, Start(listings=tiers.listings))
        else:
            inherited = shards.prepare({owed.tier for owed in planned})
            planned = tuple(owed for owed in planned if shards.may_flush(owed.checkpoint))
            start = Start(listings=tiers.listings, inherited=inherited)
            session = Session(tiers, start, complete=shards.complete)
        undo.callback(session.abandon)
        if shards is not None:
            shards.add_stored(session)
        session.coordinator.ledger.set_knows_good()  # else no copy would be evicted for room
        if until_s is not None:  # before the first copy is begun in another order
            session.coordinator.drain_schedule.begin(session, until_s, time.monotonic())
        session.start()
        undo.pop_all()
    kept = True
    try:
        _wait(session, planned, until_s, watch, on_forecast)
        if session.coordinator.fenced is not None:
            raise session.coordinator.fenced
        done = session.call(lambda: _committed(session, planned))
        left = set(planned) - done
        errors = session.coordinator.errors if left else ()  # else the tier has recovered
        problems = [*(shards.problems if shards else ()), *map(str, errors)]
        kept = must_keep_memory(session) or bool(left)
    finally:
        session.close(keep_memory=kept)
    # A copy that was under way at the deadline may have been committed meanwhile.
    done |= {owed for owed in planned if _is_committed(session, owed)}
    problems += [
        f"tier {name} could not be read: {error}"
        for name, error in unread(session.listings).items()
        if shards is None or name not in shards.unknown
    ]
    result = DrainResult(
        done=tuple(owed for owed in planned if owed in done),
        left=tuple(owed for owed in planned if owed not in done),
        problems=tuple(problems),
        memory_kept=kept,
        seconds=0.0,
    )
    return result, set(tiers.errors)


def writer_of(newest: SealedImage, tiers: OpenedTiers) -> Attempt:
    """Return the attempt that left the newest image, or a later one that owned this memory after it: it saved nothing
    that memory does not hold, and it is dead, as this process has the locks of this memory.

    Raises FencedError where another later attempt exists, IntegrityError where the record of one is damaged.
    """
    listings, stores = tiers.listings, tiers.stores
    line = newest.commit.lineage
    number = line.checkpoint.attempt
    start = (
        "start the training here: its start looks at all tiers and at this memory, goes on from the newest checkpoint, "
        "and flushes what is still owed. To free this memory: 'tierfall drain --discard'"
    )
    try:
        later = newest_attempt(listings, stores, above=number)
    except IntegrityError as error:
        raise IntegrityError(
            f"drain: {error}: it may be of a newer start than the one that left {tiers.host.path}, and nothing is "
            f"written beside a newer start. If no newer start of run {line.run!r} is alive, {start}"
        ) from error
    if later is None:
        attempt = attempt_of(line)
        # A person has asked for these images to be flushed: a damaged record counts as theirs, unless commit records
        # show that the number is another attempt's.
        for listing in listings:
            if listing.tier in stores and ids_by_commits(listing, number) <= {attempt.id}:
                stores[listing.tier].trust_attempt(attempt)
        return attempt
    attempt, tier = later
    remembered = tiers.identities.remembered
    if remembered is None or remembered.attempt_id != attempt.id:
        raise FencedError(
            f"drain: attempt {number} of run {line.run!r} was followed by attempt {attempt.number} (process "
            f"{attempt.pid} on {attempt.node}) by tier {tier}, which did not begin with this memory: nothing of the "
            f"older one is written any more. Once that start has ended, {start}"
        )
    return attempt


def find_owed(config: Config, listings: Sequence[Listing]) -> tuple[OwedCopy, ...]:
    """Return every copy that is owed to a tier that could be read, oldest first: the other tiers may have theirs."""
    silent = unread(listings)
    return tuple(owed for owed in _owed(config, listings) if owed.tier not in silent)


def _owed(config: Config, listings: Sequence[Listing]) -> tuple[OwedCopy, ...]:
    view = view_of(config, merge(listings))
    return tuple(
        OwedCopy(checkpoint=c.id, tier=tier, bytes=max(copy.bytes for copy in c.copies.values()))
        for c in view.checkpoints
        for tier in (t.name for t in config.stored if t.name in c.owed)
    )


def _wait(
    session: Session,
    planned: tuple[OwedCopy, ...],
    until_s: float | None,
    watch: Watch,
    on_forecast: Callable[[str], None],
) -> None:
    """Wait until nothing is owed, or the deadline ``until_s`` of the monotonic clock."""
    total = sum(owed.bytes for owed in planned)
    forecast = ForecastLog(on_forecast)
    if until_s is not None:
        forecast.report(session.call(lambda: session.coordinator.drain_schedule.plan), first=True)
    while True:
        left_s = POLL_S if until_s is None else min(POLL_S, max(0.0, until_s - time.monotonic()))
        ended = session.wait_idle(left_s) or (until_s is not None and time.monotonic() >= until_s)
        watch(session.call(lambda: _copied_bytes(session)), total)
        if ended:
            return
        if until_s is not None:
            forecast.report(session.call(lambda: session.coordinator.drain_schedule.plan))


def _copied_bytes(session: Session) -> int:
    lanes = session.coordinator.lanes.values()
    return sum(count for lane in lanes for count in lane.edge_bytes.values())


def _is_committed(session: Session, owed: OwedCopy) -> bool:
    entry = session.coordinator.ledger.entries.get(owed.checkpoint)
    return entry is not None and entry.state(owed.tier) is CopyState.COMMITTED


def _committed(session: Session, planned: tuple[OwedCopy, ...]) -> set[OwedCopy]:
    """Return the planned copies that became durable. One that retention has deleted since counts, as long as no copy
    was given up or set aside."""
    coordinator = session.coordinator
    counters = coordinator.counters
    left = set(coordinator.owed_copies())
    done = set()
    for owed in planned:
        settled = owed.tier in session.stores and (owed.checkpoint, owed.tier) not in left
        if _is_committed(session, owed) or (
            settled and not counters.given_up_copies + counters.set_aside_copies
        ):
            done.add(owed)
    return done
