"""What a tier's storage is like at a time: calm, with faults now and then, gone for some minutes, or not mounted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tierfall.core.types.backend import Publish, Writer
from tierfall.core.types.errors import AccessDeniedError, LostWriteError, UnreachableError

KEYS = "run/step-*"
UNSYNCED = Fault(kind=FaultKind.UNSYNCED, operation=Operation.PUBLISH)


class Weather(Faulty):
    """A backend with its faults or, where it is not ``bad``, none. It remembers what is visible and not durable. A bit
    flips in one read of an object, and not in the next one: two in a row are damage."""

    def __init__(self, disk: MemoryBackend, *, seed: int, plan: list[Fault]) -> None:
        super().__init__(disk, seed=seed, plan=plan)
        self.disk = disk
        self.bad = True
        self._replacing: set[str] = set()
        self._misread: set[str] = set()

    def opened(self) -> None:
        """Another process opens it."""

    def set_identity_check(self, key: str, is_same: Callable[[bytes], bool]) -> None:
        """It is always the same."""

    @property
    def unsynced(self) -> set[str]:
        """The keys of what is visible, and goes with a power cut."""
        return self._unsynced

    def cut_power(self) -> tuple[str, ...]:
        gone = tuple(sorted(self._unsynced))
        self._unsynced.clear()
        for key in gone:
            self.disk.delete(key)
        return gone

    def create(self, key: str, *, publish: Publish = Publish.REPLACE, **options: Any) -> Writer:
        durable = key in self.disk._objects and key not in self._unsynced
        (self._replacing.add if durable else self._replacing.discard)(key)
        return super().create(key, publish=publish, **options)

    def note_published(self, key: str, *, synced: bool) -> None:
        """A durable object that is replaced is there after a power cut, as it was or as it is now."""
        super().note_published(key, synced=synced or key in self._replacing)

    @contextmanager
    def inject(
        self, operation: Operation, key: str, size_bytes: int = 0
    ) -> Iterator[Mapping[FaultKind, Fault]]:
        if not self.bad:
            yield {}
            return
        with super().inject(operation, key, size_bytes) as faults:
            if operation is Operation.READ and key in self._misread:
                self._misread.remove(key)
                yield {}
                return
            if FaultKind.BIT_FLIP in faults:
                self._misread.add(key)
            yield faults


class Outage(Weather):
    """A backend with its faults, none, or an answer to nothing (``down``). ``denied``: it takes no image, and says that
    this will not pass; ``blocked`` are folders where nothing can be made, as if a link or a file stood in their place;
    ``sync_fails`` is how often the fsync of a step's folder fails, where there are folders.

    It may be unmounted: then an empty folder stands at its place. A process that has it open is refused until it is
    mounted again, by a number of its own, and what was recognised says that it is the same one; one that is opened
    meanwhile sees the empty folder for as long as it lives. ``cut_off``: files that are open go with the mount, where
    they could be written to till their end.
    """

    def __init__(self, disk: MemoryBackend, *, seed: int, plan: list[Fault]) -> None:
        super().__init__(disk, seed=seed, plan=plan)
        self.bad = self.down = self.denied = self.cut_off = False
        self.blocked: set[str] = set()
        self.mounted = True
        self._mounts = 0
        self._begun: dict[str, int] = {}
        self.sync_fails = 0.0
        self._syncs = random.Random(f"syncs {seed}")
        self._open = self._now
        self._same: tuple[str, Callable[[bytes], bool]] | None = None

    @property
    def _now(self) -> int:
        """The number of the mount that stands there; 0 of none."""
        return 1 + self._mounts if self.mounted else 0

    def unmount(self, *, cut_off: bool) -> None:
        self.mounted, self.cut_off = False, cut_off

    def mount(self) -> None:
        self._mounts += not self.mounted
        self.mounted = True

    def opened(self) -> None:
        self._open, self._same = self._now, None
        self._inner = self.disk if self.mounted else MemoryBackend(place=self.disk.place)

    def set_identity_check(self, key: str, is_same: Callable[[bytes], bool]) -> None:
        self._same = key, is_same

    @property
    def can_come_back(self) -> bool:
        """Say whether the process that has it open would go on with it after another mount."""
        return self._same is not None and self._proves()

    @property
    def in_reach(self) -> bool:
        """Say whether a process that starts now finds what is stored there."""
        return self.mounted and not self.down

    @property
    def answers(self) -> bool:
        """Say whether a call from the process that has it open comes to what is stored there."""
        return self.in_reach and self._is_the_same()

    def _is_the_same(self) -> bool:
        if self._open != self._now and self.mounted and self._proves():
            self._open, self._inner = self._now, self.disk
        return self._open == self._now

    def _proves(self) -> bool:
        if self._same is None:
            return False
        key, is_same = self._same
        found = self.disk._objects.get(key)
        return found is not None and is_same(bytes(found))

    def create(self, key: str, *, publish: Publish = Publish.REPLACE, **options: Any) -> Writer:
        if key.startswith(tuple(self.blocked)) or (self.denied and "/rank-" in key):
            raise AccessDeniedError(f"create {key!r}: not here")
        writer = super().create(key, publish=publish, **options)
        self._begun[key] = self._now
        return writer

    @contextmanager
    def inject(
        self, operation: Operation, key: str, size_bytes: int = 0
    ) -> Iterator[Mapping[FaultKind, Fault]]:
        if self.down and self.mounted:  # the empty folder below a mount always answers
            raise UnreachableError(f"{operation} {key!r}: no answer")
        at_work = operation in (Operation.WRITE, Operation.PUBLISH)
        fails = self.cut_off or operation is not Operation.WRITE
        if not self._is_the_same() and fails:
            raise UnreachableError(f"{operation} {key!r}: another folder stands there")
        if at_work and fails and self._begun.get(key) not in (None, self._now):
            raise LostWriteError(f"{operation} {key!r}: it was mounted anew since, write it anew")
        in_folder = operation is Operation.PUBLISH and self._has_folders and "/step-" in key
        if in_folder and self._syncs.random() < self.sync_fails:
            yield {FaultKind.UNSYNCED: UNSYNCED}
            return
        with super().inject(operation, key, size_bytes) as faults:
            yield faults


def draw_faults(draw: random.Random, *, has_folders: bool) -> list[Fault]:
    """Calm, a few faults, or many: before and after the fact, torn writes, flipped bits on the way back and, where
    there are folders, failed fsyncs of them."""
    chance = draw.choice((0.0, 0.02, 0.02, 0.15))
    kinds = (FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER)
    plan = [
        Fault(kind=kind, operation=operation, keys=KEYS, chance=chance, times=None)
        for kind in kinds
        for operation in Operation
    ]
    for kind, operation in (
        (FaultKind.TORN_WRITE, Operation.WRITE),
        (FaultKind.LOST_SYNC, Operation.PUBLISH),
        (FaultKind.BIT_FLIP, Operation.READ),
        *([(FaultKind.UNSYNCED, Operation.PUBLISH)] if has_folders else ()),
    ):
        plan.append(Fault(kind=kind, operation=operation, keys=KEYS, chance=chance, times=None))
    return plan
