"""The files of this process's host memory, which others may remove during training: the arena of each of its slots, and
the lock file.

systemd removes them at the end of a user's last session (RemoveIPC), and so do cleaners of temporary files. The memory
itself remains, and flushes continue; but its images are lost with this process. A thread detects that within a second,
logs it once, and has new files for the next images.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial

from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.types.errors import LockError, TierfallError
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.tiers.arena.folder import prepare_folder
from tierfall.tiers.host import HostTier

logger = logging.getLogger("tierfall")

EVERY_S = 0.5
JOIN_S = 5.0
WHO = "by systemd's RemoveIPC, say, or by a cleaner of temporary files"


class MemoryFiles:
    """See the module. ``problem`` is why images in memory are lost with this process; None: none is.

    ``start`` once the coordinator runs; ``close`` before it ends.
    """

    def __init__(
        self,
        tiers: OpenedTiers,
        coordinator: Coordinator,
        *,
        call_soon: Callable[[Callable[[], object]], None],
    ) -> None:
        """``call_soon`` runs a function on the coordinator's thread: see ``Session``."""
        self._tiers = tiers
        self._coordinator = coordinator
        self._call_soon = call_soon
        self._one_repair = threading.Lock()
        self._state = threading.RLock()  # a signal handler may ask while its thread is in here
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._logged: str | None = None
        self.problem: TierfallError | None = None

    def start(self) -> None:
        # daemon: an exit without close must not hang
        thread = threading.Thread(
            target=self._run, name=f"tierfall-{self._tiers.run}-memory", daemon=True
        )
        thread.start()
        self._thread = thread

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self.repair()

    def check(self) -> None:
        """Check now whether the images in memory outlive this process."""
        with self._state:
            try:
                lost = self._lost()
            except TierfallError as error:
                self._log_once(f"it is not known whether its file is still there: {error}")
                return
            if lost:
                self._on_lost(
                    f"its file {lost[0].path} was removed while this process uses it, {WHO}"
                )

    def hold_place(self) -> None:
        """At the end, hold this run's place in memory again if its lock file was removed; log what prevents it."""
        try:
            self._reacquire_locks()
        except TierfallError as error:
            logger.warning("%s: its place cannot be held: %s", self._tiers.host.name, error)

    def repair(self) -> bool:
        """Have new files where some are missing; return whether all images in memory have one.

        What prevents that is logged.
        """
        with self._one_repair:
            self.check()
            try:
                self._replace_files()
                lost = self._lost()
            except TierfallError as error:
                if isinstance(error, LockError):
                    with self._state:
                        self._on_lost("another process took this run's place in memory")
                self._log_once(f"no new file can be allocated at present: {error}")
                return False
            with self._state:
                self._logged = None
                if not lost:
                    self._on_recovered()
            return not lost

    def _lost(self) -> list[HostTier]:
        """The memory of which an image, or the next one, ends with this process."""
        lost = [host for host in self._tiers.hosts() if host.regions_without_file()]
        return lost if self._tiers.host.file_exists() else [self._tiers.host, *lost]

    def ends_with_process(self, regions: Iterable[HostRegion]) -> bool:
        """Whether one of these images in memory is lost with this process, by all that is known."""
        try:
            lost = [each for host in self._tiers.hosts() for each in host.regions_without_file()]
            return any(region is each for region in regions for each in lost)
        except TierfallError:
            return True

    def __str__(self) -> str:
        """Describe why the images in memory are lost with this process, and what prevents a repair."""
        return "; ".join(str(why) for why in (self.problem, self._logged) if why is not None)

    def are_intact(self) -> bool:
        """Return whether no other process can own files of these names; False where that is not known."""
        try:
            return all(lock.is_file_intact() for lock, _ in self._tiers.slots())
        except TierfallError as error:
            logger.warning("close: what is in memory stays: %s", error)
            return False

    def _replace_files(self) -> None:
        self._reacquire_locks()
        self._tiers.host.replace_file(self._closing.is_set)

    def _reacquire_locks(self) -> None:
        locks = [lock for lock, _ in self._tiers.slots() if not lock.is_file_intact()]
        is_gone = not self._tiers.host.file_exists()
        if locks or is_gone:
            prepare_folder(self._tiers.folder)
            self._tiers.identities.rewrite_memory()
        for lock in locks:
            lock.reacquire()
            # with its arena gone too, that is what is logged
            level = logging.DEBUG if is_gone else logging.WARNING
            logger.log(level, "the lock file %s was removed, %s: it is made anew", lock.path, WHO)

    # Reports -----------------------------------------------------------------------------------------

    def _on_lost(self, why: str) -> None:
        if self.problem is None:
            host = self._tiers.host.name
            self.problem = TierfallError(f"{host}: what is in memory ends with this process: {why}")
            logger.warning(
                "%s; flushes go on, and a new file is tried for the next images", self.problem
            )
            self._report()

    def _on_recovered(self) -> None:
        if self.problem is not None:
            logger.info("%s: all images in memory have a file again", self._tiers.host.name)
            self.problem = None
            self._report()

    def _report(self) -> None:
        self._call_soon(partial(self._coordinator.set_memory_survival, self.problem))

    def _log_once(self, what: str) -> None:
        if what != self._logged:
            self._logged = what
            logger.warning("%s: %s; that is tried again", self._tiers.host.name, what)
