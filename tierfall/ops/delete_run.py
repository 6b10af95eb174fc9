"""Deleting a whole run: its checkpoints and records on every tier, its memory on this node, and the ids of its tiers.

What tierfall did not write is kept, and named. The locks of the run are held meanwhile, so that no trainer starts on
this machine; whether one is alive on another is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tierfall.backends.toolkit.keys import is_unfinished
from tierfall.config import Config
from tierfall.core.format.catalog import Listing
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.types import keys
from tierfall.core.types.errors import BackendError, StepError, TierfallError
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId
from tierfall.ops.commands import check_folders
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.setup.nodes.kept import discard_kept
from tierfall.setup.places import MEMORY_NAME, with_own_peers
from tierfall.setup.tiers import bounds_s
from tierfall.telemetry.status import remove_status
from tierfall.tiers.stored import StoredTier


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
    answers = BoundedCalls().call_all(
        {
            name: partial(_foreign_on, store, folders[name], config.run)
            for name, store in stores.items()
        },
        bounds_s(config),
        doing="list",
        last_answer_s=lambda name: stores[name].last_answer_s(),
    )
    return {name: answer.get() for name, answer in answers.items()}


def _foreign_on(store: StoredTier, folder: Path | None, run: str) -> tuple[str, ...]:
    prefix = f"{run}/"
    if folder is None:
        names = [file.key.removeprefix(prefix) for file in store.backend.scan(prefix)]
    else:  # links, too, and names that no key can have
        names = list(_files_below(folder / run))
    return tuple(sorted(name for name in names if not keys.is_run_file(name)))


def _files_below(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if (path.is_symlink() or not path.is_dir()) and not is_unfinished(path.name):
            yield str(path.relative_to(folder))


def delete_run(config: Config, shown: Iterable[Listing]) -> DeletedRun:
    """Delete the run; ``config`` is that of a job on several nodes: of peer memory, what this node keeps is deleted.

    Raises LockError if a trainer has started, and, before anything is deleted, the error of a tier that could not be
    read, and StepError if a checkpoint was saved or pinned since the listings ``shown``.
    """
    check_folders(config)
    config = with_own_peers(config, config.run)
    with ExitStack() as undo:
        tiers = OpenedTiers(
            config, run=config.run, tending=True, accept_arena=True, command="tierfall rm"
        )
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
            (tiers.folder / MEMORY_NAME).unlink(missing_ok=True)
        remove_status(tiers.host.path)
        undo.pop_all()
    tiers.close(keep=False)
    names = (tier.name for tier in config.chain)
    return DeletedRun(
        deleted=tuple(name for name in names if name not in failed), kept=kept, failed=failed
    )


def _copies(listings: Iterable[Listing]) -> set[tuple[str, CheckpointId, bool]]:
    """Return the tier and the checkpoint of each copy, with False, and of each one that is pinned, with True."""
    return {
        (listing.tier, copy.id, pinned)
        for listing in listings
        for copy in listing.copies
        for pinned in (False, keys.PIN_MARK in copy.marks)
    }


def _delete_on_tiers(config: Config, tiers: OpenedTiers) -> dict[str, TierfallError]:
    """Delete the run on every stored tier; return the error of each tier that failed."""
    stores, peers = dict(tiers.stores), config.peers
    failed: dict[str, TierfallError] = {}
    if peers is not None:
        stores.pop(peers.name, None)
        try:
            discard_kept(peers.path, config.run)
        except BackendError as error:
            failed[peers.name] = error
    answers = BoundedCalls().call_all(
        {name: store.delete_run for name, store in stores.items()},
        bounds_s(config),
        doing="delete",
        last_answer_s=lambda name: stores[name].last_answer_s(),
    )
    for name, answer in answers.items():
        if isinstance(answer.error, TierfallError):
            failed[name] = answer.error
        else:
            answer.get()
    return failed
