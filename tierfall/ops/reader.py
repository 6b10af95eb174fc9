"""Reading a run without owning it: what the commands that only look, and ``tierfall.load``, are built on.

It opens stored tiers for reading and, where the configuration names a host tier, what lies in memory, beside a living
trainer too: every byte that is believed was verified first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tierfall.backends.posix.backend import NoFolderError, PosixBackend
from tierfall.config import Config
from tierfall.core.copies.shard_reader import OpenImage, image_opener
from tierfall.core.format.catalog import Listing
from tierfall.core.format.records import Lineage, read_commit
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.run_lock import LockOwner, RunLock
from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError, TierfallError, UnreachableError
from tierfall.core.types.values import CheckpointId, Codec, Shard
from tierfall.session.leftovers import regions_in
from tierfall.setup.tier_identity import TierIdentities
from tierfall.setup.tiers import SLOT, any_slot, list_all, open_stores, run_folder
from tierfall.tiers.arena.arena import arena_name, lock_name
from tierfall.tiers.host import HeldImage, HostTier
from tierfall.tiers.stored import StoredTier

_RECORD_BYTES_MAX = 64 << 20


def known_slots(folder: Path) -> list[int]:
    """Return the numbers of the slots in a run's folder that have an arena or a lock."""
    found = {
        path.stem.removeprefix("slot-")
        for pattern in (arena_name(0), lock_name(0))
        for path in folder.glob(pattern.replace("0", "*"))
    }
    return sorted(int(number) for number in found if number.isdecimal())


def find_owner(folder: Path) -> LockOwner | None:
    """Return the living process that owns the lowest slot of a run's folder on this machine, or None."""
    owners = (RunLock.owner(folder / lock_name(slot)) for slot in known_slots(folder))
    return next((owner for owner in owners if owner is not None), None)


def left_in_memory(config: Config) -> tuple[int, list[TierfallError]]:
    """Count the images that all ranks have left in host memory, and list what is damaged; no slot is locked."""
    folder = run_folder(config, config.run)
    count, problems = 0, []
    for slot in known_slots(folder):
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


class RunReader:
    """The tiers of one run, open for reading."""

    def __init__(self, config: Config, *, run: str | None = None) -> None:
        self.config = config
        self.run = run or config.run
        folder = run_folder(config, self.run)
        self._lock_path = folder / lock_name(SLOT)
        self.stores, self.errors = open_stores(config, self.run, read_only=True)
        self._calls = BoundedCalls()
        self._folder = folder
        self._host_error: TierfallError | None = None
        self.host = self._attach()

    def _host(self, slot: int) -> HostTier:
        return any_slot(self._folder, slot, name=self.config.host.name, run=self.run)

    def _attach(self) -> HostTier:
        host = self._host(SLOT)
        self._host_error = None
        try:
            host.attach(writable=False)
        except TierfallError as error:
            self._host_error = error
        return host

    def attach_again(self) -> None:
        """Look at memory afresh: a living trainer may have given what was sealed there to another image."""
        self.host.close(keep=True)
        self.host = self._attach()

    def owner(self) -> LockOwner | None:
        """Say which living process trains this run on this machine."""
        return RunLock.owner(self._lock_path) or find_owner(self._folder)

    def list(self) -> tuple[Listing, ...]:
        listings = list_all(self.config, self.host, self.stores, self.errors, self._calls)
        missing = self._missing(listings)
        listings = tuple(
            Listing(tier=x.tier, error=missing[x.tier]) if x.tier in missing else x
            for x in listings
        )
        if self._host_error is None:
            return listings
        return (Listing(tier=self.host.name, error=self._host_error), *listings[1:])

    def list_as_at_open(self) -> tuple[Listing, ...]:
        """The same, but a folder that is not there, of a tier that nothing remembers, is empty: ``open`` makes it."""
        listings = self.list()
        identities = TierIdentities(self.config, self.stores, self._folder, listings)
        return tuple(
            Listing(tier=x.tier)
            if isinstance(x.error, NoFolderError) and not identities.is_remembered(x.tier)
            else x
            for x in listings
        )

    def missing(self) -> dict[str, UnreachableError]:
        """Name the tiers in which nothing lies, and something must, with why they count as not mounted."""
        return self._missing(
            list_all(self.config, self.host, self.stores, self.errors, self._calls)
        )

    def _missing(self, listings: tuple[Listing, ...]) -> dict[str, UnreachableError]:
        return TierIdentities(self.config, self.stores, self._folder, listings).missing(listings)

    def memory(self) -> Listing:
        """Say what lies in host memory, without asking the other tiers."""
        if self._host_error is not None:
            return Listing(tier=self.host.name, error=self._host_error)
        return self.host.list()

    def images(self) -> dict[CheckpointId, HeldImage]:
        return self.host.images()

    def opener(self) -> OpenImage:
        """Return what opens images, those too that are in memory now."""
        return image_opener(self.stores, self.host.name, regions_in([self.host]))

    def close(self) -> None:
        for store in self.stores.values():
            store.close()
        self.host.close(keep=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPath:
    """Where a path leads: a tier's root, a run in it, and perhaps one checkpoint and one shard."""

    root: Path
    run: str
    checkpoint: CheckpointId | None = None
    shard: Shard | None = None


def resolve_path(path: Path) -> RunPath:
    """Find out whether a path is a tier root with one run, a run folder, a step folder or a shard.

    Raises ConfigError, saying what was expected, where it is none of these.
    """
    path = path.resolve()
    if path.is_file():
        shard = keys.parse_shard(path.name)
        checkpoint = keys.parse_step_folder(path.parent.name)
        is_image = shard is not None and path.name in {keys.shard_name(shard, c) for c in Codec}
        alone = moved_shard(path) if is_image else None
        if alone is not None:
            raise ConfigError(f"load: {alone}")
        if shard is None or checkpoint is None or not is_image:
            raise ConfigError(
                f"load: {path} is not a shard of a checkpoint (RUN/step-...-a.../rank-...-of-....safetensors, .zst or "
                ".tfz behind it where it is packed); for any "
                "other safetensors file use safetensors.torch.load_file"
            )
        return _place(path.parent, checkpoint, shard)
    if not path.is_dir():
        raise ConfigError(f"load: {path} is not there; expected a .yaml file, a folder or a shard")
    if checkpoint := keys.parse_step_folder(path.name):
        return _place(path, checkpoint)
    if _is_run(path):
        return RunPath(root=path.parent, run=path.name)
    runs = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_run(child))
    if len(runs) == 1:
        return RunPath(root=path, run=runs[0])
    if elsewhere := moved_step(path):
        raise ConfigError(f"load: {path} is a step's folder under another name: {elsewhere}")
    found = f"it holds the runs {', '.join(runs[:8])}: name one" if runs else "no run lies in it"
    raise ConfigError(f"load: {path} is no run of tierfall and no tier with one run: {found}")


def _place(folder: Path, checkpoint: CheckpointId, shard: Shard | None = None) -> RunPath:
    run = folder.parent.name
    if not keys.NAME_PATTERN.match(run):
        elsewhere = moved_step(folder) or "put it below a folder named like its run"
        raise ConfigError(f"load: {folder} does not lie below a run's folder: {elsewhere}")
    return RunPath(root=folder.parent.parent, run=run, checkpoint=checkpoint, shard=shard)


def moved(place: RunPath) -> str | None:
    """Say where what a path led to belongs; None where it lies there."""
    run = place.root / place.run
    if place.checkpoint is None:
        return moved_run(run)
    return moved_step(run / keys.step_folder(place.checkpoint))


def _is_run(path: Path) -> bool:
    if not keys.NAME_PATTERN.match(path.name):
        return False
    return (path / keys.ATTEMPTS_FOLDER).is_dir() or any(
        keys.parse_step_folder(child.name) for child in path.iterdir() if child.is_dir()
    )


def open_place(place: RunPath) -> tuple[StoredTier, Mapping[str, Listing]]:
    """Open the folder that a path led to as a tier of its own, for reading."""
    backend = PosixBackend(place.root, read_only=True)
    store = StoredTier(name=str(place.root), run=place.run, backend=backend, links=backend.links)
    return store, {store.name: store.list()}


# Folders that were copied or renamed -------------------------------------------------------------------


def written_as(folder: Path) -> Lineage | None:
    """Read which run and checkpoint a step's folder was written as; None where nothing there says it."""
    try:
        record = folder / keys.COMMIT_NAME
        if record.stat().st_size > _RECORD_BYTES_MAX:
            return None
        return read_commit(record.read_bytes(), what=str(record)).line
    except (OSError, TierfallError):
        return None


def moved_step(folder: Path) -> str | None:
    """Say where a step's folder belongs; None where it lies there, or nothing there says it."""
    line = written_as(folder)
    if line is None or _is_at_home(folder, line):
        return None
    home = keys.step_prefix(line.run, line.checkpoint).rstrip("/")
    return f"put it below a folder named {line.run}, as it was written ({home})"


def moved_run(folder: Path) -> str | None:
    """Say how a run's folder was named; None where one of its steps lies where it belongs, or nothing says it."""
    try:
        steps = [child for child in folder.iterdir() if keys.parse_step_folder(child.name)]
    except OSError:
        return None
    lines = {step: line for step in steps if (line := written_as(step)) is not None}
    if not lines or any(_is_at_home(step, line) for step, line in lines.items()):
        return None
    runs = sorted({line.run for line in lines.values()})
    if len(runs) > 1 or runs[0] == folder.name:
        return None
    return (
        f"{folder} speaks of run {runs[0]}: it was renamed, or moved here from elsewhere; name it {runs[0]}, as it was "
        "written"
    )


def moved_shard(shard: Path) -> str | None:
    """Say what a shard without the records of its checkpoint is good for; None where they lie beside it."""
    if (shard.parent / keys.COMMIT_NAME).exists():
        return None
    return (
        f"{shard} is a shard without the records of its checkpoint, which say whether it is whole: copy the step's "
        "folder, below one named like its run, as it was written; safetensors.torch.load_file opens the file alone"
    )


def _is_at_home(folder: Path, line: Lineage) -> bool:
    here: CheckpointId | None = keys.parse_step_folder(folder.name)
    return (folder.parent.name, here) == (line.run, line.checkpoint)
