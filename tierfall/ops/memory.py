"""What runs hold in the memory of this node: images in host memory, and what is kept there for other nodes.

The folder of its host memory identifies a run. ``tiers.json`` in it names the run's configuration file.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tierfall.config import Config, load_config
from tierfall.core.runtime.run_lock import LockOwner, RunLock
from tierfall.core.types.errors import ConfigError, TierfallError
from tierfall.core.types.values import CheckpointId, TierKind
from tierfall.ops.reader import PATH_ANSWER_S, find_owner, known_slots, names_in_memory, open_memory
from tierfall.setup.host_memory import images_in
from tierfall.setup.places import folders_of_run, memory_root, read_memory, run_folder, seen_by_one
from tierfall.telemetry.status import remove_status
from tierfall.tiers.host import held_bytes, image_files, lock_name
from tierfall.tiers.host_folder import default_folder
from tierfall.tiers.image_file import remove_image_file
from tierfall.tiers.kept_images import discard_kept


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
