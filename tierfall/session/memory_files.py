"""The files of this process's host memory, which others may remove during training: the arena of each of its slots, and
the lock file.

systemd removes them at the end of a user's last session (RemoveIPC), and so do cleaners of temporary files. The memory
itself remains, and flushes continue; but its images would be lost with this process. A thread detects that within a
second, logs it once, and creates the files anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.types.errors import LockError, TierfallError
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.tiers.arena.folder import prepare_folder
from tierfall.tiers.host import HostTier

logger = logging.getLogger("tierfall")

EVERY_S = 0.5
TURN_S = 2.0
"""Seconds that one attempt to renew a file takes at most."""
BUSY_S = 0.02
"""Seconds until the next attempt to move an image that is being filled."""
JOIN_S = 5.0
WHO = "by systemd's RemoveIPC, say, or by a cleaner of temporary files"


class MemoryFiles:
    """See the module. ``problem`` is why the images in memory are lost with this process; None: they are not.

    ``start`` once the coordinator runs; ``close`` before it ends.
    """

    def __init__(
        self,
        tiers: OpenedTiers,
        coordinator: Coordinator,
        *,
        call: Callable[[Callable[[], bool]], bool],
        call_soon: Callable[[Callable[[], object]], None],
    ) -> None:
        """``call`` and ``call_soon`` run a function on the coordinator's thread: see ``Session``."""
        self._tiers = tiers
        self._coordinator = coordinator
        self._call = call
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
            self.repair(TURN_S)

    def check(self) -> None:
        """Check now whether the images in memory outlive this process."""
        with self._state:
            try:
                gone = [host for _, host in self._tiers.slots() if not host.file_exists()]
            except TierfallError as error:
                self._log_once(f"it is not known whether its file is still there: {error}")
                return
            if gone:
                self._on_lost(
                    f"its file {gone[0].path} was removed while this process uses it, {WHO}"
                )

    def repair(self, timeout_s: float) -> bool:
        """Create missing files anew, for ``timeout_s`` seconds at most; return whether all are there.

        What prevents that is logged.
        """
        until_s = time.monotonic() + timeout_s
        with self._one_repair:
            self.check()
            try:
                done = self._renew_all(until_s)
            except TierfallError as error:
                if isinstance(error, LockError):
                    with self._state:
                        self._on_lost("another process took this run's place in memory")
                self._log_once(f"its files cannot be made anew at present: {error}")
                return False
            if done:
                self._on_recovered()
            return done

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

    def _renew_all(self, until_s: float) -> bool:
        slots = self._tiers.slots()
        locks = [lock for lock, _ in slots if not lock.is_file_intact()]
        hosts = [host for _, host in slots if not host.file_exists()]
        if locks or hosts:
            prepare_folder(self._tiers.folder)
            self._tiers.identities.rewrite_memory()
        for lock in locks:
            lock.reacquire()
            # with its arena gone too, that is what is logged
            level = logging.DEBUG if hosts else logging.WARNING
            logger.log(level, "the lock file %s was removed, %s: it is made anew", lock.path, WHO)
        return all(self._renew(host, until_s) for host in hosts)

    def _renew(self, host: HostTier, until_s: float) -> bool:
        while not self._call(partial(self._unlock, host)):
            if self._wait(until_s):
                return False
        while not host.file_exists():
            moved = host.recreate_file()
            if time.monotonic() >= until_s or (not moved and self._wait(until_s)):
                return host.file_exists()
        return True

    def _unlock(self, host: HostTier) -> bool:
        """Unlock the memory's pages, on the coordinator's thread: no save and no restore can begin meanwhile."""
        return not self._coordinator.deleter.paused and host.unlock_pages()

    def _wait(self, until_s: float) -> bool:
        """Wait for BUSY_S; return whether the time is over."""
        return self._closing.wait(BUSY_S) or time.monotonic() >= until_s

    # Reports -----------------------------------------------------------------------------------------

    def _on_lost(self, why: str) -> None:
        if self.problem is None:
            host = self._tiers.host.name
            self.problem = TierfallError(f"{host}: what is in memory ends with this process: {why}")
            logger.warning("%s; flushes go on, and its files are made anew", self.problem)
            self._report()

    def _on_recovered(self) -> None:
        with self._state:
            if self._logged is not None or self.problem is not None:
                logger.warning(
                    "%s: its files are made anew: what is in memory outlives this process again",
                    self._tiers.host.name,
                )
            self._logged = None
            if self.problem is not None:
                self.problem = None
                self._report()

    def _report(self) -> None:
        self._call_soon(partial(self._coordinator.set_memory_survival, self.problem))

    def _log_once(self, what: str) -> None:
        if what != self._logged:
            self._logged = what
            logger.warning("%s: %s; that is tried again", self._tiers.host.name, what)
