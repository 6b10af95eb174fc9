"""The files of this process's host memory, which somebody else may remove while it trains: the arena of each of its
slots, and the lock that tells other processes of it.

systemd does that at the end of a user's last session (RemoveIPC), and so do cleaners of temporary files. The memory
itself stays, and flushes go on; but what lies there would end with this process. It is noticed within a second, said
once, and the files are made anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tierfall.core.types.errors import LockError, TierfallError
from tierfall.tiers.arena.folder import prepare_folder
from tierfall.tiers.host import HostTier

if TYPE_CHECKING:
    from tierfall.session.session import Session

logger = logging.getLogger("tierfall")

EVERY_S = 0.5
TURN_S = 2.0
"""How long a removed file is worked on at a time, in seconds."""
BUSY_S = 0.02
"""How soon to look again whether an image that was being filled can be moved, in seconds."""
JOIN_S = 5.0
WHO = "by systemd's RemoveIPC, say, or by a cleaner of temporary files"


class MemoryFiles:
    """See the module. ``problem`` says why what lies in memory ends with this process; None: it does not. ``start``
    once the coordinator runs; ``close`` before it ends."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._one_repair = threading.Lock()
        self._state = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._said: str | None = None
        self.problem: TierfallError | None = None

    def start(self) -> None:
        # daemon: an exit without close must not hang
        self._thread = threading.Thread(
            target=self._run, name=f"tierfall-{self._session.run}-memory", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self.repair(TURN_S)

    def look(self) -> None:
        """Find out at once whether what lies in memory outlives this process."""
        with self._state:
            try:
                gone = [host for _, host in self._session.slots() if not host.file_is_there()]
            except TierfallError as error:
                self._log_once(f"it is not known whether its file is still there: {error}")
                return
            if gone:
                self._on_lost(
                    f"its file {gone[0].path} was removed while this process uses it, {WHO}"
                )

    def repair(self, timeout_s: float) -> bool:
        """Make anew what is not there, for ``timeout_s`` at most; say whether all is there. Why not is logged."""
        until_s = time.monotonic() + timeout_s
        with self._one_repair:
            self.look()
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
        """Say why what lies in memory ends with this process, and why that cannot be mended."""
        return "; ".join(str(why) for why in (self.problem, self._said) if why is not None)

    def are_ours(self) -> bool:
        """Say whether no other process can have taken the place of the files; False where that is not known."""
        try:
            return all(lock.is_there() for lock, _ in self._session.slots())
        except TierfallError as error:
            logger.warning("close: what lies in memory stays: %s", error)
            return False

    def _renew_all(self, until_s: float) -> bool:
        slots = self._session.slots()
        locks = [lock for lock, _ in slots if not lock.is_there()]
        hosts = [host for _, host in slots if not host.file_is_there()]
        if locks or hosts:
            prepare_folder(self._folder)
            self._session.identities.remember_again()
        for lock in locks:
            lock.take_again()
            level = (
                logging.DEBUG if hosts else logging.WARNING
            )  # more was removed, and that is said
            logger.log(level, "the lock file %s was removed, %s: it is made anew", lock.path, WHO)
        return all(self._renew(host, until_s) for host in hosts)

    def _renew(self, host: HostTier, until_s: float) -> bool:
        while not self._session.ask(partial(self._unlock, host)):
            if self._wait(until_s):
                return False
        while not host.file_is_there():
            moved = host.renew_file()
            if time.monotonic() >= until_s or (not moved and self._wait(until_s)):
                return host.file_is_there()
        return True

    def _unlock(self, host: HostTier) -> bool:
        """Unlock the memory's pages, on the coordinator's thread: no save and no restore can begin meanwhile."""
        return not self._session.coordinator.dropper.paused and host.unlock_pages()

    def _wait(self, until_s: float) -> bool:
        """Wait a moment; say whether there is no time left."""
        return self._closing.wait(BUSY_S) or time.monotonic() >= until_s

    # Saying so ---------------------------------------------------------------------------------------

    def _on_lost(self, why: str) -> None:
        if self.problem is None:
            host = self._session.host.name
            self.problem = TierfallError(
                f"{host}: what lies in memory ends with this process: {why}"
            )
            logger.warning("%s; flushes go on, and its files are made anew", self.problem)
            self._report()

    def _on_recovered(self) -> None:
        with self._state:
            self._said = None
            if self.problem is not None:
                self.problem = None
                logger.warning(
                    "%s: its files are made anew: what lies in memory outlives this process again",
                    self._session.host.name,
                )
                self._report()

    def _report(self) -> None:
        coordinator = self._session.coordinator
        self._session.tell(partial(coordinator.memory_outlives_process, self.problem))

    def _log_once(self, what: str) -> None:
        if what != self._said:
            self._said = what
            logger.warning("%s: %s; that is tried again", self._session.host.name, what)


def log_allocation(tier: str) -> Callable[[int, int], None]:
    """Return a callback that logs the progress of a host memory allocation every two seconds."""
    last = time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 2.0 and done < total:
            last = now
            logger.info("%s: allocating host memory: %d of %d MiB", tier, done >> 20, total >> 20)

    return log
