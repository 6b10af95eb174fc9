"""Commands without a training loop: pin, unpin, tag, untag, rm (also of a whole run), prune and forget.

A command is an entry in the list of every stored tier that it reaches: a living trainer reads it there. Without one,
this process takes the run's lock, and deletes what is to be deleted by itself. Failures are reported per tier, not
raised.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tierfall.backends.posix.backend import NoFolderError
from tierfall.backends.toolkit.keys import is_unfinished
from tierfall.config import Config
from tierfall.core.flush.decisions import WORDS
from tierfall.core.flush.tasks import CommandKind
from tierfall.core.format.catalog import KnownCheckpoint, Listing, decided_in, merge, to_view
from tierfall.core.format.decided import FENCE_VALID_S, DecidedList
from tierfall.core.format.records import Attempt
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.run_lock import RunLock
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    BackendError,
    CapacityError,
    IntegrityError,
    KeyNotFoundError,
    StepError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.text import format_some
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import Decision, Verdict, View
from tierfall.policies.flush import still_owed
from tierfall.policies.retention import missing_metrics, plan_retention
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.setup.places import MEMORY_NAME, run_folder, with_own_peers
from tierfall.setup.start import newest_attempt
from tierfall.setup.tier_identity import TierIdentities
from tierfall.setup.tiers import (
    ANSWER_S,
    SLOT,
    bounds_s,
    call_tiers,
    close_stores,
    missing_folders,
    open_stores,
    tier_rules,
)
from tierfall.telemetry.progress import Progress, Watch
from tierfall.telemetry.status import remove_status
from tierfall.tiers.host import lock_name
from tierfall.tiers.host_folder import prepare_folder
from tierfall.tiers.kept_images import discard_kept
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")

STAY = 2
"""So many of the newest copies that stay on a tier are looked at before others are deleted there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The outcome of a command: the tiers that executed it (or have it in their list), and the errors of the others."""

    id: CheckpointId
    done: tuple[str, ...]
    failed: Mapping[str, BaseException] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """The decisions of retention; ``left`` are the deletions that are not done."""

    decisions: tuple[Decision, ...]
    left: tuple[Decision, ...] = ()
    unread: Mapping[str, TierfallError] = field(default_factory=dict)


# Reading the run -------------------------------------------------------------------------------------


def unread(listings: Iterable[Listing]) -> dict[str, TierfallError]:
    """Return the tiers that could not be read, each with its error."""
    return {x.tier: x.error for x in listings if x.error is not None}


def restorable(known: Sequence[KnownCheckpoint]) -> tuple[CheckpointId, ...]:
    """Return the checkpoints that can be restored, newest first. Memory counts if it has the images of all ranks."""
    whole = [
        replace(c, copies={t: copy for t, copy in c.copies.items() if not copy.lacks_ranks})
        for c in known
    ]
    return tuple(c.id for c in to_view((), whole, wall_time_s=0.0).restorable)


def without_good_copy(known: Iterable[KnownCheckpoint]) -> dict[CheckpointId, str]:
    """Return why no tier has a good copy of a live checkpoint, for each such one: "damaged: ..." if all are damaged,
    else "could not be read: ..."."""
    found = {}
    for checkpoint in known:
        problems = [copy.damage for copy in checkpoint.copies.values() if copy.damage]
        if checkpoint.live and len(problems) == len(checkpoint.copies):
            what = "could not be read" if checkpoint.unread else "damaged"
            found[checkpoint.id] = f"{what}: {'; '.join(map(str, problems))}"
    return found


def view_of(config: Config, known: Sequence[KnownCheckpoint]) -> View:
    """Return the view that policies decide on, with the owed copies; a checkpoint that only read-only tiers hold is
    owed to none."""
    view = to_view(tier_rules(config), known, wall_time_s=time.time())
    written = {tier.name for tier in view.tiers}
    readable = {
        c.id
        for c in known
        if any(tier in written and copy.damage is None for tier, copy in c.copies.items())
    }
    return replace(
        view,
        checkpoints=tuple(
            replace(c, owed=frozenset(still_owed(view, c))) if c.id in readable else c
            for c in view.checkpoints
        ),
    )


def notes_on_metrics(config: Config, listings: Sequence[Listing]) -> tuple[str, ...]:
    """Return a note for each metric of a retention rule that no checkpoint has; none where a tier could not be read: it
    may hold one that has it."""
    if unread(listings):
        return ()
    return tuple(missing_metrics(view_of(config, merge(listings))).values())


def plan_prune(config: Config, listings: Sequence[Listing]) -> tuple[Decision, ...]:
    """Return the decision of retention for every copy on every stored tier that could be read, tier by tier: what is to
    be deleted from one is no reason to delete from the next."""
    known = {checkpoint.id: checkpoint for checkpoint in merge(listings)}
    silent = unread(listings)
    decisions: list[Decision] = []
    for tier in (tier.name for tier in config.written if tier.name not in silent):
        decided = plan_retention(view_of(config, [*known.values()]), tier)
        decisions += decided
        for drop in [d for d in decided if d.verdict is Verdict.DROP]:
            known[drop.checkpoint] = without_copy(known[drop.checkpoint], tier)
    return tuple(decisions)


def without_copy(checkpoint: KnownCheckpoint, tier: str) -> KnownCheckpoint:
    """Return a checkpoint as it is known once its copy on a tier is deleted."""
    return replace(
        checkpoint, copies={name: c for name, c in checkpoint.copies.items() if name != tier}
    )


def trained_elsewhere(
    listings: Sequence[Listing], stores: Mapping[str, StoredTier]
) -> Attempt | None:
    """Return the newest attempt if it is of another node: whether its trainer is alive cannot be seen from here."""
    try:
        newest = newest_attempt(listings, stores)
    except TierfallError:
        return None
    if newest is None or newest[0].node == socket.gethostname():
        return None
    return newest[0]


def check_room(
    config: Config,
    listing: Listing,
    needed_bytes: int,
    *,
    doing: str,
    advice: str = "make room by tierfall prune or tierfall rm",
) -> None:
    """Raise CapacityError where so many bytes more exceed the tier's capacity: nothing is deleted for them."""
    capacity = next(t.capacity_bytes for t in config.stored if t.name == listing.tier)
    if capacity is not None and listing.used_bytes + needed_bytes > capacity:
        room = format_size(max(0, capacity - listing.used_bytes))
        raise CapacityError(
            f"{doing} {listing.tier}: it needs {format_size(needed_bytes)}, of the capacity of "
            f"{format_size(capacity)} there is room for {room}: raise the capacity, or {advice}"
        )


def check_folders(config: Config) -> None:
    """Raise UnreachableError where a tier's folder is missing: it may not be mounted.

    Opening a tier for writing creates its folder; after that, "not mounted" could not be told from "empty".
    """
    folders = {tier.name: tier.folder for tier in config.stored if tier.folder is not None}
    answers = BoundedCalls().call_all(
        {name: partial(os.stat, folder) for name, folder in folders.items()},
        bounds_s(config),
        doing="open",
    )
    # Any other error is reported when the tier is opened.
    missing = {n: x for n, x in folders.items() if isinstance(answers[n].error, FileNotFoundError)}
    if missing:
        raise UnreachableError(f"nothing was changed, since {missing_folders(missing)}")


# What is decided -------------------------------------------------------------------------------------


def decide_on_tiers(
    config: Config, kind: CommandKind, checkpoint: KnownCheckpoint, tag: str = ""
) -> CommandResult:
    """Add the entry of a command to the list of every stored tier that can be reached; a living trainer reads it.

    What is pinned is looked at once more then: StepError if the trainer has deleted the last copy just now. StepError
    too if no stored tier has the checkpoint.
    """
    config = config.without_peers()
    if not any(tier.name in checkpoint.copies for tier in config.stored):
        raise StepError(
            f"{kind} of {checkpoint.id}: it is only in the trainer's memory, which no other process changes: wait "
            "until it is flushed, or call it in the trainer"
        )
    stores, errors = open_stores(config, offline=True)
    try:
        failed, _ = _decide(config, stores, kind, checkpoint, tag)
        if kind is CommandKind.PIN:
            _check_left(checkpoint, [stores[name] for name in stores.keys() - failed.keys()])
    finally:
        close_stores(stores, ANSWER_S)
    refused = {**errors, **failed}
    return CommandResult(
        id=checkpoint.id,
        done=tuple(x for x in checkpoint.copies if x in stores and x not in failed),
        failed={x: error for x, error in refused.items() if x in checkpoint.copies},
    )


def _decide(
    config: Config,
    stores: Mapping[str, StoredTier],
    kind: CommandKind,
    checkpoint: KnownCheckpoint,
    tag: str,
) -> tuple[dict[str, BaseException], DecidedList]:
    """Add the entry of a command to the lists of these tiers; return the error of each that refused it, and what is
    decided by all of them then. Raises StepError if the checkpoint was deleted before, or may not be deleted."""
    if checkpoint.deleted and kind is not CommandKind.DELETE:
        raise StepError(f"{kind}: {checkpoint.id} was deleted by a person")
    answers = call_tiers(
        stores.values(), lambda store: store.decided.read(), config, BoundedCalls(), doing="read"
    )
    lists = [answer.value for answer in answers.values() if answer.value is not None]
    known = DecidedList(entry for one in lists for entry in one.of_all_tiers)
    if kind is CommandKind.DELETE:
        _check_deletable(checkpoint, known)
    entry = known.next(WORDS[kind], checkpoint.id, checkpoint.attempt_id, tag)
    failed: dict[str, BaseException] = {}
    for name, store in stores.items():
        try:
            if store.read_only:
                raise StepError(f"{name}: it is read-only; name a file whose run writes there")
            store.decided.add(entry, reason="command line")
        except TierfallError as error:
            failed[name] = error
    decided = known | DecidedList([entry])
    if kind is CommandKind.UNPIN and decided.is_deleted(checkpoint.id, checkpoint.attempt_id):
        why = "a person had deleted it, and only the pin kept it: the trainer, or the next start, deletes it now"
        logger.warning("unpin: %s: %s", checkpoint.id, why)
    return failed, decided


def _check_deletable(checkpoint: KnownCheckpoint, decided: DecidedList) -> None:
    id, copies = checkpoint.id, checkpoint.copies.items()
    if decided.is_pinned(id, checkpoint.attempt_id):
        raise StepError(f"delete: {id} is pinned; unpin it first")
    if all(copy.damage is not None and not copy.repairable for _, copy in copies):
        why = "; ".join(f"{tier}: it could not be read: {copy.damage}" for tier, copy in copies)
        raise StepError(f"delete: {id}: nothing is deleted of what cannot be read: {why}")


def _check_left(checkpoint: KnownCheckpoint, stores: Iterable[StoredTier]) -> None:
    """Raise StepError if no tier has a checkpoint any more that a command has just pinned there. A trainer that has
    read a tier's list before relies on it for FENCE_VALID_S at most."""
    time.sleep(FENCE_VALID_S + 0.2)
    holding = [store for store in stores if store.name in checkpoint.copies]
    if holding and not any(may_have(store, checkpoint.id) for store in holding):
        raise StepError(f"pin: {checkpoint.id} was deleted just now")


def may_have(store: StoredTier, id: CheckpointId) -> bool:
    """Return False only if a tier has answered that it has no commit record of a checkpoint."""
    try:
        store.read_commit(id)
    except KeyNotFoundError:
        return False
    except TierfallError:
        return True
    return True


# Without a trainer -----------------------------------------------------------------------------------


@contextmanager
def owned_tiers(config: Config, command: str, *, begins: bool = False) -> Iterator[OpenedTiers]:
    """Own a run, and all its memory on this machine; empty memory is freed at the end. ``command`` is the name of the
    command that does. If it ``begins`` an attempt, which the caller takes, folders of new tiers are created.

    Else raises UnreachableError, before anything is changed, where a tier's folder is missing.
    """
    if not begins:
        check_folders(config)
    tiers = OpenedTiers(config, offline=not begins, command=command)
    try:
        if not begins:
            tiers.make_durable()
        yield tiers
    finally:
        tiers.close(keep=bool(tiers.memory.images() or tiers.memory.host.holds_damaged()))


def run_commands(
    config: Config,
    kind: CommandKind,
    ids: Sequence[CheckpointId],
    *,
    even_the_last: bool = True,
    tag: str = "",
) -> tuple[CommandResult, ...]:
    """Execute a command for each checkpoint, on every tier, memory included.

    Raises LockError if a trainer has started, StepError, unless ``even_the_last``, if a deletion would leave nothing
    that can be restored: another command may have deleted the rest just now.
    """
    verb = "rm" if kind is CommandKind.DELETE else str(kind)  # on the command line
    with owned_tiers(config, f"tierfall {verb}") as tiers:
        known = {checkpoint.id: checkpoint for checkpoint in merge(tiers.listings)}
        left = set(restorable([*known.values()])) - set(ids)
        if kind is CommandKind.DELETE and not (left or even_the_last):
            raise StepError("rm: no step would be left that can be restored; nothing was deleted")
        if gone := [id for id in ids if id not in known]:
            raise StepError(f"{verb}: {format_some([*map(str, gone)])} was deleted just now")
        return tuple(_run_command(tiers, kind, known, id, tag) for id in ids)


def _run_command(
    tiers: OpenedTiers,
    kind: CommandKind,
    known: dict[CheckpointId, KnownCheckpoint],
    id: CheckpointId,
    tag: str,
) -> CommandResult:
    """Execute a command. What nodes keep for each other goes by the lists of the other tiers at the next start."""
    config, checkpoint, host = tiers.config.without_peers(), known[id], tiers.memory.name
    stores = {
        tier.name: tiers.stores[tier.name] for tier in config.stored if tier.name in tiers.stores
    }
    failed, decided = _decide(config, stores, kind, checkpoint, tag)
    if kind is CommandKind.DELETE:
        known[id] = replace(checkpoint, deleted=True)
        full = {tier for tier, error in failed.items() if isinstance(error, StorageFullError)}
        # where it is noted nowhere, the next start would bring back what is deleted; a full tier has room for it then
        chosen = stores.keys() if stores.keys() - failed.keys() else full
        for name in [tier for tier in stores if tier in chosen and tier in checkpoint.copies]:
            if not stores[name].read_only:
                failed.pop(name, None)
                newest = max((c.id for c in good_on(name, known.values())), default=None)
                error = _delete_on(stores[name], checkpoint, decided, newest, note=name in full)
                if error is not None:
                    failed[name] = error
        if stores.keys() - failed.keys() or not stores:
            _free_images(tiers, id)
    noted = stores.keys() - failed.keys()
    holding = [
        x.tier for x in tiers.listings if x.tier in (*stores, host) and x.copy(id) is not None
    ]
    done = {host, *noted} if noted or not stores else noted
    refused = {x: error for x, error in failed.items() if x in holding or not noted}
    return CommandResult(
        id=id,
        done=tuple(x for x in holding if x in done),
        failed={**refused, **unread(tiers.listings)},
    )


def _delete_on(
    store: StoredTier,
    checkpoint: KnownCheckpoint,
    decided: DecidedList,
    newest: CheckpointId | None,
    *,
    note: bool = False,
) -> TierfallError | None:
    """Delete a checkpoint on a tier; with ``note``, add there afterwards what is decided about it. Return what has
    prevented that. ``newest`` is what ``latest`` names then."""
    try:
        refused = store.delete(checkpoint.id, attempt=None, known=decided, next_latest=newest)
        for entry in decided.of(checkpoint.id, checkpoint.attempt_id) if note else ():
            store.decided.add(entry, reason="command line")
    except TierfallError as error:
        return error
    if refused is None:
        return None
    return StepError(f"{checkpoint.id} was pinned or tagged there just now: it is not deleted")


def good_on(tier: str, known: Iterable[KnownCheckpoint]) -> list[KnownCheckpoint]:
    """Return the checkpoints of the live lineage whose copy on a tier is good, oldest first."""
    there = (c for c in known if c.live and tier in c.copies and c.copies[tier].damage is None)
    return sorted(there, key=lambda c: c.id)


def _free_images(tiers: OpenedTiers, id: CheckpointId) -> None:
    for of, image in tiers.memory.images():
        if of == id:
            image.region.release()


def prune(config: Config, watch: Watch = lambda done, total: None) -> PruneResult:
    """Apply retention on every stored tier, as a trainer does after each commit. Copies count as good by their
    records. Where one of the newest that are to stay lacks files, on any tier, nothing more is deleted."""
    with owned_tiers(config, "tierfall prune") as tiers:
        known = {checkpoint.id: checkpoint for checkpoint in merge(tiers.listings)}
        decisions = plan_prune(tiers.config, tiers.listings)
        left = [d for d in decisions if d.verdict is Verdict.DROP]
        gone = {(drop.tier, drop.checkpoint) for drop in left}
        progress = Progress(watch, sum(drop.bytes for drop in left))
        stay = {
            name: [c.id for c in good_on(name, known.values()) if (name, c.id) not in gone]
            for name in tiers.stores
        }
        if left and all(_are_whole(tiers.stores[name], ids[-STAY:]) for name, ids in stay.items()):
            planned = decided = decided_in(tiers.listings)
            for drop in tuple(left):
                checkpoint, store = known[drop.checkpoint], tiers.stores[drop.tier]
                newest = max(stay[drop.tier], default=None)
                about = (drop.checkpoint, checkpoint.attempt_id)
                error: TierfallError | None = StepError("it was pinned or tagged just now")
                for _ in range(2):  # once more if something was decided about another one
                    if error is not None and decided.of(*about) == planned.of(*about):
                        error = _delete_on(store, checkpoint, decided, newest)
                        decided |= store.decided.known.of_all_tiers
                if error is None:
                    left.remove(drop)
                    progress.add(drop.bytes)
                else:
                    logger.warning("%s: not deleted: %s: %s", drop.tier, drop.checkpoint, error)
        silent = unread(tiers.listings)
    return PruneResult(decisions=decisions, left=tuple(left), unread=silent)


def _are_whole(store: StoredTier, ids: Iterable[CheckpointId]) -> bool:
    """Return whether the copies that are to stay still have their files; log what prevents that."""
    for id in ids:
        try:
            found = store.find_copy(id)
            problem = IntegrityError("it is gone") if found is None else found.damage
        except TierfallError as error:
            problem = error
        if problem is not None:
            logger.warning(
                "%s: nothing is deleted there, as %s, which is to stay, is not whole: %s",
                store.name, id, problem,
            )  # fmt: skip
            return False
    return True


def forget(config: Config, tier: str) -> tuple[tuple[str, ...], dict[str, TierfallError]]:
    """Remove the id of a tier from what the other tiers of the run and this machine remember, so that an empty folder
    in its place counts as a new tier. Return where it was removed, and the errors by tier.

    Raises LockError if a trainer of this machine is alive: it goes by what it remembers.
    """
    with owned_folder(config, "tierfall forget") as folder:
        storage = config.without_peers()
        stores, failed = open_stores(storage, offline=True)
        try:
            identities = TierIdentities(config, stores, folder, calls=BoundedCalls())
            forgotten_by, refused = identities.forget(tier, wall_time_s=time.time())
        finally:
            close_stores(stores, ANSWER_S)
        failed.pop(tier, None)  # the tier itself need not answer
        return forgotten_by, {
            name: error
            for name, error in {**failed, **refused}.items()
            if identities.is_remembered(name) or not isinstance(error, NoFolderError)
        }


@contextmanager
def owned_folder(config: Config, command: str) -> Iterator[Path]:
    """Hold the run's lock for a command; yield the folder of the run's memory. Raises LockError beside a trainer."""
    folder = prepare_folder(run_folder(config, config.run))
    lock = RunLock.acquire(
        folder / lock_name(SLOT), run=config.run, command=command, wait_s=config.max_wait_s
    )
    try:
        yield folder
    finally:
        lock.release()


# A whole run ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedRun:
    """``deleted`` names the tiers, memory included, on which the run was deleted. ``kept`` has, by tier, the files
    there that tierfall did not write. ``failed`` has the errors of the other tiers."""

    deleted: tuple[str, ...]
    kept: dict[str, tuple[str, ...]]
    failed: dict[str, TierfallError]


def foreign_files(config: Config, stores: dict[str, StoredTier]) -> dict[str, tuple[str, ...]]:
    """Return, by tier, the files in the run's folder that tierfall did not write."""
    folders = {tier.name: tier.folder for tier in config.stored}

    def find(store: StoredTier) -> tuple[str, ...]:
        return _foreign_on(store, folders[store.name], config.run)

    answers = call_tiers(stores.values(), find, config, BoundedCalls(), doing="list")
    return {name: answer.get() for name, answer in answers.items()}


def _foreign_on(store: StoredTier, folder: Path | None, run: str) -> tuple[str, ...]:
    prefix = f"{run}/"
    if folder is None:
        names = [file.key.removeprefix(prefix) for file in store.backend.scan(prefix)]
    else:  # links, too, and names that no key can have
        names = [
            str(path.relative_to(folder / run))
            for path in (folder / run).rglob("*")
            if (path.is_symlink() or not path.is_dir()) and not is_unfinished(path.name)
        ]
    return tuple(sorted(name for name in names if not keys.is_run_file(name)))


def delete_run(config: Config, shown: Iterable[Listing]) -> DeletedRun:
    """Delete a run: its checkpoints and records on every tier, its memory on this node, and the ids of its tiers.

    What tierfall did not write is kept, and named. The locks of the run are held meanwhile, so that no trainer starts
    on this machine; whether one is alive on another is not known. ``config`` is that of a job on several nodes: of peer
    memory, what this node keeps is deleted.

    Raises LockError if a trainer has started, and, before anything is deleted, the error of a tier that could not be
    read, and StepError if a checkpoint was saved or pinned since the listings ``shown``.
    """
    check_folders(config)
    config = with_own_peers(config)
    with ExitStack() as undo:
        tiers = OpenedTiers(config, offline=True, command="tierfall rm")
        undo.callback(tiers.close, keep=True)
        for listing in tiers.listings:
            if listing.error is not None:
                raise listing.error
        if new := sorted(_copies(tiers.listings) - _copies(shown)):
            steps = format_some([f"{id} on {tier}" for tier, id, _ in new])
            raise StepError(
                f"rm: nothing was deleted, since {steps} was saved or pinned after the run was shown: repeat it"
            )
        failed = _delete_on_tiers(config, tiers)
        done = {name: store for name, store in tiers.stores.items() if name not in failed}
        kept = foreign_files(tiers.config, done)
        if not failed:
            (tiers.memory.folder / MEMORY_NAME).unlink(missing_ok=True)
        remove_status(tiers.memory.folder, tiers.memory.host.slot)
        undo.pop_all()
    tiers.close(keep=False)
    with suppress(TierfallError), owned_folder(tiers.config, "tierfall rm") as folder:
        for path in folder.glob("*.lock"):  # last: a trainer may begin then
            path.unlink(missing_ok=True)
    names = (tier.name for tier in config.chain)
    return DeletedRun(
        deleted=tuple(name for name in names if name not in failed), kept=kept, failed=failed
    )


def _copies(listings: Iterable[Listing]) -> set[tuple[str, CheckpointId, bool]]:
    """Return the tier and the checkpoint of each copy, with False, and of each one that is pinned, with True."""
    return {
        (tier, checkpoint.id, pinned)
        for checkpoint in merge(listings)
        for tier in checkpoint.copies
        for pinned in (False, checkpoint.pinned)
    }


def _delete_on_tiers(config: Config, tiers: OpenedTiers) -> dict[str, TierfallError]:
    """Delete the run on every stored tier; return the error of each tier that failed."""
    stores, peers = dict(tiers.stores), config.peers
    failed: dict[str, TierfallError] = {}
    if peers is not None:
        stores.pop(peers.name, None)
        try:
            discard_kept(peers.path / config.run)
        except BackendError as error:
            failed[peers.name] = error
    delete = StoredTier.delete_run
    answers = call_tiers(stores.values(), delete, config, BoundedCalls(), doing="delete")
    for name, answer in answers.items():
        if isinstance(answer.error, TierfallError):
            failed[name] = answer.error
        else:
            answer.get()
    return failed
