"""Reading a run without owning it: for the commands that only read, and ``tierfall.load``.

``RunReader`` opens the stored tiers and host memory for reading, beside a living trainer too: readers verify every byte
that they use. ``resolve_path`` finds the run, checkpoint and shard of a path; where a folder was moved or renamed, its
commit record tells where it belongs. ``held_by_runs`` has what runs hold in the memory of this node: the folder of its
host memory identifies a run, and ``tiers.json`` in it names the run's configuration file. A ``Watcher`` has the
statuses, locks and last events of a run's processes: whether one is alive is known by its lock, not its status.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from tierfall.backends.open import check_url
from tierfall.backends.posix.backend import NoFolderError
from tierfall.config import Config, PeerTierConfig, load_config
from tierfall.config.fields import is_address
from tierfall.core.copies.checkpoint_reader import OpenImage, image_opener
from tierfall.core.copies.chunk_cache import ChunkCache
from tierfall.core.format.catalog import Listing
from tierfall.core.format.records import Lineage, parse_commit
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.run_lock import LockOwner, RunLock
from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError, RestoreError, TierfallError, UnreachableError
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId, Codec, Shard, TierKind
from tierfall.setup.host_memory import images_in, list_slots, regions_in
from tierfall.setup.places import (
    folders_in,
    folders_of_run,
    is_run,
    memory_root,
    read_memory,
    run_folder,
    runs_in,
    seen_by_one,
)
from tierfall.setup.pointer import Pointer, is_pointer, read_pointer
from tierfall.setup.tier_identity import TierIdentities
from tierfall.setup.tiers import (
    ANSWER_S,
    SLOT,
    call_tiers,
    close_stores,
    list_all,
    list_together,
    may_create,
    open_slot,
    open_stores,
    start_patience_s,
)
from tierfall.telemetry.journal import LogTail
from tierfall.telemetry.progress import progress_in
from tierfall.telemetry.status import Status, read_status, remove_status
from tierfall.tiers.host import HostTier, SealedImage, held_bytes, image_files, lock_name
from tierfall.tiers.host_folder import default_folder
from tierfall.tiers.image_file import remove_image_file
from tierfall.tiers.kept_images import discard_kept
from tierfall.tiers.stored import StoredTier

T = TypeVar("T")
_RECORD_BYTES_MAX = 64 << 20
NO_MEMORY = "/nonexistent/tierfall"
"""A folder that never exists, in place of host memory: that of a run is found by its configuration."""
PATH_ANSWER_S = 60.0
"""Seconds that the file system of a path has to answer: as ``max_wait`` by default, which a path has not."""


def known_slots(folder: Path) -> list[int]:
    """Return the numbers of the slots in a run's folder that have images or a lock. Raises UnreachableError."""
    locks = (path.stem.removeprefix("slot-") for path in folder.glob("slot-*.lock"))
    return sorted({*image_files(folder), *(int(slot) for slot in locks if slot.isdecimal())})


def find_owner(folder: Path) -> LockOwner | None:
    """Return the living trainer that owns the lowest slot of a run's folder on this machine, or None; a command is
    none. Raises UnreachableError."""
    owners = (RunLock.owner(folder / lock_name(slot)) for slot in known_slots(folder))
    return next((owner for owner in owners if owner is not None and not owner.command), None)


def find_owner_of(config: Config) -> LockOwner | None:
    """Return the living trainer of a run on this machine, or None, also if memory cannot be read."""
    try:
        return find_owner(run_folder(seen_by_one(config), config.run))
    except TierfallError:
        return None


def open_memory(
    folder: Path, slots: Iterable[int], *, name: str, run: str
) -> tuple[list[HostTier], TierfallError | None]:
    """Open slots of a run's folder for reading, without locking them. Return those that can be read, and why another
    cannot."""
    hosts: list[HostTier] = []
    problem: TierfallError | None = None
    for slot in slots:
        try:
            hosts.append(open_slot(folder, slot, name=name, run=run, writable=False))
        except TierfallError as error:
            problem = error
    return hosts, problem


def config_of_place(place: str, run: str | None) -> Config:
    """Return a configuration that only reads one tier, and no memory: a tier's folder, a run's folder or an address.

    Raises ConfigError if ``run`` is not given, and the tier has not one run; else the error of a tier that could not be
    read.
    """
    root, advice = place, ""
    if not is_address(place):
        folder = Path(place).expanduser().absolute()
        try:
            if is_run(folder):
                folder, run = folder.parent, run or folder.name
            elif (folder / "tiers.yaml").exists():
                advice = f"; did you mean {folder / 'tiers.yaml'}?"
        except OSError as refusal:
            raise UnreachableError(f"{place} could not be listed: {refusal.strerror}") from refusal
        root = str(folder)
    config = _reading_only(root, run or "run")
    if run is not None:
        return config
    names, errors = find_runs(config)
    for error in errors.values():
        raise error
    if len(names) == 1:
        return load_config(config, run=names[0])
    found = f"the runs {format_some(names)}: name one by --run" if names else "no run"
    shown = "the address" if is_address(place) else place
    raise ConfigError(f"{shown} has {found}{advice}")


def _reading_only(root: str, run: str, **more: object) -> Config:
    """Return a configuration that only reads a run in a folder, or at an address, and no memory."""
    host = {"name": "host", "kind": TierKind.HOST.value, "folder": NO_MEMORY}
    tier = {"name": "disk", "kind": TierKind.FILE.value, "path": root}
    if is_address(root):
        tier = {"name": "store", "kind": TierKind.OBJECT.value, "url": root}
    return load_config({"run": run, "tiers": [host, {**tier, "read_only": True}], **more})


def find_runs(config: Config) -> tuple[list[str], dict[str, TierfallError]]:
    """Return the names of all runs on the tiers, and of these tiers in host memory, and the errors of the tiers that
    could not be read."""
    stores, errors = open_stores(config, read_only=True)
    folders = {
        tier.name: None if isinstance(tier, PeerTierConfig) else tier.folder
        for tier in config.stored
    }
    names = set[str]()
    try:
        in_memory = {n: run_folder(config, n) for n in names_in_memory(memory_root(config))}
        # Of these tiers: other projects may have other runs there.
        names = {n for n, run in in_memory.items() if image_files(run) or find_owner(run)}
    except TierfallError as error:
        errors[config.host.name] = error

    def find(store: StoredTier) -> set[str]:
        return _runs_on(store, folders[store.name])

    try:
        answers = call_tiers(stores.values(), find, config, BoundedCalls(), doing="list")
    finally:
        close_stores(stores, ANSWER_S)
    for name, answer in answers.items():
        if isinstance(answer.error, TierfallError):
            errors[name] = answer.error
        else:
            names |= answer.get()
    for name in _not_created(config, names) if errors else ():
        errors.pop(name, None)
    return sorted(names), errors


def _not_created(config: Config, runs: Iterable[str]) -> set[str]:
    """Return the tiers whose folder is missing, and that no run remembers: none of these, none of this machine."""
    try:
        known = {config.run, *runs, *names_in_memory(memory_root(config))}
    except UnreachableError:  # it is not known what a run there remembers
        return set()
    new = {tier.name for tier in config.stored}
    for run in known:
        with RunReader(config.model_copy(update={"run": run})) as reader:
            new &= {*reader.list_with_new()[1]}
    return new


def names_in_memory(root: Path) -> list[str]:
    """Return the names of runs that this user may read in a folder with host memory. Raises UnreachableError."""
    try:
        root.stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnreachableError(f"{root} could not be listed: {error.strerror}") from error
    return [folder.name for folder in folders_in(root)]


def _runs_on(store: StoredTier, folder: Path | None) -> set[str]:
    """Return the runs on a tier: the folders of a folder; of an object store, what its keys begin with."""
    if folder is not None:
        return runs_in(folder)
    parts = (stored.key.split("/") for stored in store.backend.scan(""))
    return {
        run
        for run, *below in parts
        if below and (below[0] == keys.ATTEMPTS_FOLDER or keys.parse_step_folder(below[0]))
    }


class RunReader:
    """The tiers of one run, open for reading. Each call to a tier has a bound."""

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        """If there are other ``ranks``, all of them list together."""
        self.ranks = ranks or Ranks.alone()
        self.config = config = seen_by_one(config)
        self.run = config.run
        folder = run_folder(config, self.run)
        self.stores, self.errors = open_stores(config, read_only=True)
        self._calls = BoundedCalls()
        self._folder = folder
        self._hosts = self._attach()

    def _attach(self) -> list[HostTier]:
        """Open the memory of every rank on this node."""
        slots, unlisted = {SLOT}, None
        try:
            slots |= {*known_slots(self._folder)}
        except UnreachableError as error:
            unlisted = error
        hosts, unread = open_memory(
            self._folder, sorted(slots), name=self.config.host.name, run=self.run
        )
        self._host_error = unlisted or unread
        return hosts

    @property
    def memory_folder(self) -> Path:
        """The folder of the run's memory on this node."""
        return self._folder

    def reopen_memory(self) -> None:
        """Open memory again: a living trainer may have reused a region for another image."""
        self._close_memory()
        self._hosts = self._attach()

    def _close_memory(self) -> None:
        for host in self._hosts:
            host.close(keep=True)

    def owner(self) -> LockOwner | None:
        """Return the living process that trains this run on this machine."""
        return find_owner_of(self.config)

    def list(self) -> tuple[Listing, ...]:
        """List all tiers; those that are not created yet are empty: ``open`` creates them."""
        return self.list_with_new()[0]

    def list_with_new(self) -> tuple[tuple[Listing, ...], Sequence[str]]:
        """Return the same, and the tiers that are not created yet."""
        listings, missing, new = self.survey()
        errors = {**dict.fromkeys(new), **missing}
        return tuple(
            Listing(tier=x.tier, error=errors[x.tier]) if x.tier in errors else x for x in listings
        ), new

    def survey(
        self,
    ) -> tuple[tuple[Listing, ...], dict[str, UnreachableError], Sequence[str]]:
        """Return the listings of all tiers; those that count as not mounted, as they are empty and should not be, each
        with the error; and those that ``open`` creates: their folder is missing, and nothing remembers them."""

        opened = (self.memory(), self.stores, self.errors, self._calls)
        list_here = partial(list_all, self.config, *opened)
        timeout_s = start_patience_s(self.config)
        listings = list_together(self.config, self.ranks, list_here, "load", timeout_s=timeout_s)
        identities = TierIdentities(self.config, self.stores, self._folder, listings, self._calls)
        creatable = {tier.name for tier in self.config.written if may_create(tier)}
        absent = (x.tier for x in listings if isinstance(x.error, NoFolderError))
        new = [t for t in absent if t in creatable and not identities.is_remembered(t)]
        return listings, identities.missing(listings), new

    def memory(self) -> Listing:
        """List the host memory of all ranks on this node, without the other tiers."""
        if self._host_error is not None:
            return Listing(tier=self.config.host.name, error=self._host_error)
        return list_slots(self._hosts)

    def images(self) -> Sequence[tuple[CheckpointId, SealedImage]]:
        """Return the images in the memory of all ranks on this node."""
        return images_in(self._hosts)

    def opener(self) -> OpenImage:
        """Return a function that opens images, also those in memory now."""
        return image_opener(self.stores, self.config.host.name, regions_in(self._hosts))

    def cache_in(self, folder: Path, bytes_max: int | None) -> ChunkCache:
        """Return the cache in a folder, for the stored tiers that are not on its file system."""
        cache, places = (
            ChunkCache(folder, bytes_max),
            {t.name: t.folder for t in self.config.storage},
        )

        def find_device(store: StoredTier) -> int | None:
            place = places[store.name]
            return None if place is None else os.stat(place).st_dev

        stores = [store for name, store in self.stores.items() if name in places]
        found = call_tiers(stores, find_device, self.config, BoundedCalls())
        cache.tiers = {n for n, x in found.items() if x.error is None and x.value != cache.device}
        return cache

    def close(self) -> None:
        close_stores(self.stores, ANSWER_S)
        self._close_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPath:
    """What a path or an address names: a tier's root, a run in it, and optionally one checkpoint and one shard."""

    root: Path | str
    run: str
    checkpoint: CheckpointId | None = None
    shard: Shard | None = None

    def settings(self) -> Config:
        """Return a configuration that reads the run there, and no memory."""
        return _reading_only(str(self.root), self.run, max_wait=f"{PATH_ANSWER_S}s")

    def advice_if_moved(self) -> str | None:
        """Return where the folder belongs, by the commit records in it; None where it is there, or that is not
        known."""
        if isinstance(self.root, str):
            return None
        folder = self.root / self.run
        if self.checkpoint is not None:
            folder /= keys.step_folder(self.checkpoint)
        return _answer_of(folder, lambda: advice_if_moved(folder))


def find_place(path: Path, doing: str = "load") -> RunPath:
    """Resolve a path, as ``resolve_path`` does. Raises RestoreError if its file system does not answer for
    PATH_ANSWER_S seconds."""
    return _answer_of(path, lambda: resolve_path(path, doing), doing)


def find_address(url: str, doing: str = "load") -> RunPath:
    """Resolve an address: a tier's root with one run, a run, a step or a shard in it.

    Raises ConfigError where it is none of these, and the error of a store that could not be read.
    """
    check_url(url)
    above, _, last = url.rstrip("/").rpartition("/")
    shard = keys.parse_shard(last)
    if shard is not None:
        above, _, last = above.rpartition("/")
    root, run, checkpoint = above, last, keys.parse_step_folder(last)
    if checkpoint is not None:
        root, _, run = above.rpartition("/")
    elif shard is None:
        names, errors = find_runs(_reading_only(url, "run"))
        for error in errors.values():
            raise RestoreError(f"{doing}: {url} could not be read: {error}") from error
        if len(names) > 1:
            runs = format_some(names)
            raise ConfigError(
                f"{doing}: {url} has the runs {runs}: name one, such as {url.rstrip('/')}/{names[0]}"
            )
        root, run = (url.rstrip("/"), names[0]) if names else (root, run)
    if not is_address(root) or not keys.NAME_PATTERN.match(run) or (shard and not checkpoint):
        raise ConfigError(
            f"{doing}: {url} is no tier with one run, no run (.../RUN), no step (.../RUN/step-...-a...) and no shard"
        )
    return RunPath(root=root, run=run, checkpoint=checkpoint, shard=shard)


def resolve_path(path: Path, doing: str = "load") -> RunPath:
    """Resolve a path: a tier's root with one run, a run's folder, a step's folder or a shard.

    Raises ConfigError where it is none of these.
    """
    path = path.resolve()
    if path.is_file():
        shard = keys.parse_shard(path.name)
        checkpoint = keys.parse_step_folder(path.parent.name)
        is_image = shard is not None and path.name in {keys.shard_name(shard, c) for c in Codec}
        if is_image and not (path.parent / keys.COMMIT_NAME).exists():
            raise ConfigError(
                f"{doing}: {path} is a shard without the records of its checkpoint, which it is verified by: copy the "
                "whole folder of the step, below one with the name of its run; safetensors.torch.load_file opens the "
                "file alone"
            )
        if shard is None or checkpoint is None or not is_image:
            raise ConfigError(
                f"{doing}: {path} is not a shard of tierfall's (RUN/step-...-a.../rank-...-of-....safetensors, "
                ".zst or .tfz behind it where it is packed). A file of torch.save is read by torch.load, another "
                "safetensors file by safetensors.torch.load_file"
            )
        return _place(path.parent, checkpoint, shard, doing=doing)
    if not path.is_dir():
        raise ConfigError(
            f"{doing}: {path} does not exist; expected a .yaml file, a folder or a shard"
        )
    if checkpoint := keys.parse_step_folder(path.name):
        return _place(path, checkpoint, doing=doing)
    if is_run(path):
        return RunPath(root=path.parent, run=path.name)
    runs = sorted(child.name for child in path.iterdir() if child.is_dir() and is_run(child))
    if len(runs) == 1:
        return RunPath(root=path, run=runs[0])
    if _written_as(path) is not None and (elsewhere := advice_if_moved(path)):
        raise ConfigError(f"{doing}: {path} is a step's folder under another name: {elsewhere}")
    found = "it holds no run"
    if runs:
        found = f"it holds the runs {', '.join(runs[:8])}: name one, such as {path / runs[0]}"
    raise ConfigError(f"{doing}: {path} is no run of tierfall and no tier with one run: {found}")


def _place(
    folder: Path, checkpoint: CheckpointId, shard: Shard | None = None, *, doing: str
) -> RunPath:
    run = folder.parent.name
    if not keys.NAME_PATTERN.match(run):
        elsewhere = advice_if_moved(folder) or "put it below a folder with the name of its run"
        raise ConfigError(f"{doing}: {folder} is not below a run's folder: {elsewhere}")
    return RunPath(root=folder.parent.parent, run=run, checkpoint=checkpoint, shard=shard)


def find_pointer(path: Path, doing: str = "load") -> Pointer | None:
    """Return the pointer at a path, None where there is none. Raises as ``read_pointer`` and ``find_place`` do."""
    return _answer_of(path, lambda: read_pointer(path) if is_pointer(path) else None, doing)


def _answer_of(path: Path, call: Callable[[], T], doing: str = "load") -> T:
    name = str(path)
    answer = BoundedCalls().call_all({name: call}, {name: PATH_ANSWER_S}, doing="open")[name]
    if isinstance(answer.error, UnreachableError):
        raise RestoreError(
            f"{doing}: {answer.error}. Try again once its file system answers, or load from another tier's folder"
        ) from answer.error
    return answer.get()


# Folders that were copied or renamed -------------------------------------------------------------------


def advice_if_moved(folder: Path) -> str | None:
    """Return where the folder of a step, or of a run, belongs by its commit records; None if it is in place, or if they
    do not tell."""
    if (line := _written_as(folder)) is not None:
        if _is_in_place(folder, line):
            return None
        place = keys.step_prefix(line.run, line.checkpoint).rstrip("/")
        return f"put it below a folder named {line.run}, as it was written ({place})"
    try:
        steps = [child for child in folder.iterdir() if keys.parse_step_folder(child.name)]
    except OSError:
        return None
    lines = {step: line for step in steps if (line := _written_as(step)) is not None}
    runs = {line.run for line in lines.values()}
    if len(runs) != 1 or any(_is_in_place(step, line) for step, line in lines.items()):
        return None
    (run,) = runs
    if run == folder.name:
        return None
    return f"{folder} was written as run {run}, and was renamed or moved: name it {run}"


def _written_as(folder: Path) -> Lineage | None:
    """Return the lineage in the commit record of a step's folder; None where it cannot be read."""
    try:
        record = folder / keys.COMMIT_NAME
        if record.stat().st_size > _RECORD_BYTES_MAX:
            return None
        return parse_commit(record.read_bytes(), what=str(record)).lineage
    except (OSError, TierfallError):
        return None


def _is_in_place(folder: Path, line: Lineage) -> bool:
    here: CheckpointId | None = keys.parse_step_folder(folder.name)
    return (folder.parent.name, here) == (line.run, line.checkpoint)


# What runs hold in the memory of this node ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """The memory of one run. ``bytes`` are those of all its images, ``kept_bytes`` those of what is ``kept`` for other
    nodes; ``owner`` is the living process that has it. ``file`` is the path of the run's file, '' if it had none."""

    run: str
    folder: Path
    file: str
    kept: str
    owner: LockOwner | None
    checkpoints: tuple[CheckpointId, ...]
    bytes: int
    kept_bytes: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"run {self.run} in {self.folder}"

    def settings(self) -> Config:
        """Read the run's file, as this node sees it. Raises ConfigError where it had none, or has other tiers now."""
        if not self.file:
            raise ConfigError("it was not configured by a file")
        settings = load_config(self.file, run=self.run)
        if run_folder(settings, self.run) != self.folder:
            raise ConfigError(f"{self.file} has other tiers now")
        return seen_by_one(settings)

    def discard(self) -> None:
        """Free all of it, once another command that holds it has ended, within ``max_wait``. Raises LockError where a
        process owns it, BackendError if a file cannot be deleted."""
        try:
            wait_s = self.settings().max_wait_s
        except TierfallError:
            wait_s = PATH_ANSWER_S
        with ExitStack() as held:
            slots = known_slots(self.folder)
            for slot in slots:
                lock = RunLock.acquire(
                    self.folder / lock_name(slot),
                    run=self.run,
                    command="tierfall drain",
                    wait_s=wait_s,
                )
                held.callback(lock.release)
            for path in [path for each in image_files(self.folder).values() for path in each]:
                remove_image_file(path)
            for slot in slots:
                remove_status(self.folder, slot)
            if self.kept:
                discard_kept(Path(self.kept) / self.run)


def held_by_runs(config: Config | None) -> list[HeldMemory]:
    """Return what runs of this user hold in the memory folder of a configuration (None: in the default one), by name.

    Raises UnreachableError if it cannot be listed.
    """
    root = default_folder() if config is None else memory_root(config)
    names = sorted(names_in_memory(root))
    return [
        held
        for run in names
        for folder in folders_of_run(root / run)
        if (held := _look_at(run, folder)) is not None
    ]


def _look_at(run: str, folder: Path) -> HeldMemory | None:
    slots = known_slots(folder)
    remembered = read_memory(folder)
    kept = remembered.kept if remembered is not None else ""
    in_images = held_bytes(folder)
    kept_bytes = held_bytes(Path(kept) / run) if kept else 0
    if not in_images + kept_bytes:
        return None
    hosts, unread = open_memory(folder, slots, name=TierKind.HOST.value, run=run)
    ids = {id for id, _ in images_in(hosts)}
    damaged = [error for host in hosts for error in host.list().damaged]
    for host in hosts:
        host.close(keep=True)
    return HeldMemory(
        run=run,
        folder=folder,
        file=remembered.file if remembered is not None else "",
        kept=kept,
        owner=find_owner(folder),
        checkpoints=tuple(sorted(ids)),
        bytes=in_images,
        kept_bytes=kept_bytes,
        problems=tuple(str(error) for error in (unread, *damaged) if error is not None),
    )


# The processes of a run on this node ----------------------------------------------------------------

LIST_EVERY_S = 10.0
"""How often tiers are listed where no trainer is alive: an object store charges for listings."""
EVENTS_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One slot of this node: its living owner, and the last status that was written there."""

    number: int
    owner: LockOwner | None
    status: Status | None

    @property
    def alive(self) -> bool:
        """Whether the process that wrote the status is alive."""
        return self.status is not None and self.owner is not None and _same(self.owner, self.status)


def _same(owner: LockOwner, status: Status) -> bool:
    if owner.start_ticks is not None and status.start_ticks is not None:
        return (owner.pid, owner.start_ticks) == (status.pid, status.start_ticks)
    return owner.pid == status.pid


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The processes of a run at one moment. ``problems`` name what could not be read, ``progress`` has a line for each
    restore or command that moves bytes. ``live`` is the status of the
    living process of the lowest rank; without one, ``last_status`` is that of the lowest rank."""

    wall_time_s: float
    slots: tuple[RankProcess, ...]
    live: Status | None
    last_status: Status | None
    events: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]
    progress: tuple[str, ...] = ()

    @property
    def owner(self) -> LockOwner | None:
        return next((slot.owner for slot in self.slots if slot.owner is not None), None)


class Watcher:
    """Takes snapshots of a run's processes."""

    def __init__(self, config: Config, *, run: str) -> None:
        self._folder = run_folder(config, run)
        path = config.events and config.events.file_of(run=run, rank=0)
        self._tail = LogTail(Path(path)) if path else None
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._conditions = Conditions()

    def take_snapshot(self) -> RunSnapshot:
        slots, problems = self._slots()
        living = [slot.status for slot in slots if slot.alive and slot.status is not None]
        ended = [slot.status for slot in slots if not slot.alive and slot.status is not None]
        live = min(living, key=lambda status: status.rank, default=None)
        last = None if live else min(ended, key=lambda status: status.rank, default=None)
        if self._tail is not None:  # it has older ones than a process keeps
            try:
                self._events.extend(self._tail.read())
            except OSError as error:
                problems.append(f"the event log could not be read: {error}")
        shown = live or last
        return RunSnapshot(
            wall_time_s=time.time(),
            slots=slots,
            live=live,
            last_status=last,
            events=tuple(self._events) or (shown.events if shown else ()),
            problems=tuple(problems),
            progress=progress_in(self._folder),
        )

    def living_statuses(self) -> tuple[Status, ...]:
        """Return the statuses of the living processes of this node, by slot; for any thread."""
        slots, problems = self._slots()
        if problems:
            self._conditions.report("status", logging.WARNING, "%s", "; ".join(problems))
        else:
            self._conditions.end(
                "status", "the statuses of run %s are read again", self._folder.name
            )
        return tuple(slot.status for slot in slots if slot.alive and slot.status is not None)

    def _slots(self) -> tuple[tuple[RankProcess, ...], list[str]]:
        """Return the slots of this node, and what could not be read of them."""
        found, problems = [], []
        try:
            for number in known_slots(self._folder):
                owner = status = None
                try:
                    owner = RunLock.owner(self._folder / lock_name(number))
                    status = read_status(self._folder, number)
                except TierfallError as error:
                    problems.append(str(error))
                found.append(RankProcess(number=number, owner=owner, status=status))
        except UnreachableError as error:
            problems.append(str(error))
        return tuple(found), problems
