"""The memory that all ranks of a run have left on this machine: every slot's arena, owned by this process.

Each slot holds one rank's part of a checkpoint. It decides nothing about what becomes of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tierfall.config import Config
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.runtime.run_lock import LockOwner, RunLock
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError, TierfallError
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.setup.tiers import SHARD, any_slot, run_folder
from tierfall.telemetry.status import remove_status
from tierfall.tiers.arena.arena import arena_name, lock_name
from tierfall.tiers.arena.folder import prepare_folder
from tierfall.tiers.host import HeldImage, HostTier, damaged

Parts = dict[CheckpointId, dict[Shard, HeldImage]]


def slots_in(folder: Path) -> list[int]:
    """Name the slots that have memory or an owner in a run's folder."""
    found = {
        path.stem.removeprefix("slot-")
        for pattern in (arena_name(0), lock_name(0))
        for path in folder.glob(pattern.replace("0", "*"))
    }
    return sorted(int(number) for number in found if number.isdecimal())


def find_owner(folder: Path) -> LockOwner | None:
    """Say which living process owns a slot of a run on this machine: the first slot's, if that has one."""
    owners = (RunLock.owner(folder / lock_name(slot)) for slot in slots_in(folder))
    return next((owner for owner in owners if owner is not None), None)


class LocalMemory:
    """See the module. Used in a with."""

    def __init__(self, config: Config, *, first: int = 0) -> None:
        """Own every slot from ``first`` on. Raises LockError where a process that lives has one, ConfigError where an
        arena is damaged as a whole, or is not this run's."""
        self._name = config.host.name
        self._hosts: list[HostTier] = []
        self._keep = True
        folder = prepare_folder(run_folder(config, config.run))
        self._undo = ExitStack()
        try:
            for slot in sorted({first, *slots_in(folder)}):
                if slot >= first:
                    self._own(config, folder, slot)
        except BaseException:
            self._undo.close()
            raise

    def _own(self, config: Config, folder: Path, slot: int) -> None:
        lock = RunLock.take(folder / lock_name(slot), run=config.run)
        self._undo.callback(lock.release)
        host = any_slot(folder, slot, name=self._name, run=config.run)
        try:
            found = host.attach()
        except IntegrityError as error:
            raise damaged(error, host.path) from error
        if found:
            self._undo.callback(self._close, host)
            self._hosts.append(host)

    def _close(self, host: HostTier) -> None:
        host.close(keep=self._keep)
        if not self._keep:
            remove_status(host.path)

    @property
    def path(self) -> Path:
        """Where the first of them lies."""
        return self._hosts[0].path

    @property
    def count(self) -> int:
        """How many ranks have left memory here."""
        return len(self._hosts)

    def parts(self) -> Parts:
        """Return every sealed image, by checkpoint and part."""
        found: Parts = {}
        for host in self._hosts:
            for id, image in host.images().items():
                shards = (keys.parse_shard(file.name) for file in image.commit.files)
                shard = next((shard for shard in shards if shard is not None), SHARD)
                found.setdefault(id, {})[shard] = image
        return {id: dict(sorted(parts.items(), key=_rank)) for id, parts in sorted(found.items())}

    def listing(self) -> Listing:
        """Say what is sealed here, a checkpoint's parts as one copy."""
        copies = []
        for id, parts in self.parts().items():
            first, *_ = parts.values()
            lives = {image.commit.line.attempt_id for image in parts.values()}
            if len(lives) > 1:
                raise IntegrityError(
                    f"{self._name}: the parts of {id} in memory are of several lives of this run"
                )
            files = tuple(file for image in parts.values() for file in image.commit.files)
            copies.append(
                FoundCopy(
                    id=id,
                    state=CopyState.SEALED,
                    bytes=sum(image.commit.image_bytes for image in parts.values()),
                    commit=replace(first.commit, files=files),
                    marks=frozenset().union(*(image.marks for image in parts.values())),
                )
            )
        damages = tuple(damage for host in self._hosts for damage in host.list().damaged)
        return Listing(tier=self._name, copies=tuple(copies), damaged=damages)

    def give_back(self) -> None:
        """Let all of it go at the end."""
        self._keep = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()


def _rank(part: tuple[Shard, HeldImage]) -> int:
    return part[0].rank


def left_in_memory(config: Config) -> tuple[int, list[TierfallError]]:
    """Look, without owning it, how many images all ranks have left here, and what is damaged."""
    folder = run_folder(config, config.run)
    count, problems = 0, []
    for slot in slots_in(folder):
        host = any_slot(folder, slot, name=config.host.name, run=config.run)
        try:
            if not host.attach(writable=False):
                continue
            listing = host.list()
        except TierfallError as error:
            problems.append(error)
            continue
        count += len(listing.copies)
        problems += listing.damaged
        host.close(keep=True)
    return count, problems
